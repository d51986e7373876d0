"""This peer's connections to the others of its run: whether they can reach it, and which links use a relay.

Ties together reach.py (the check), links.py (connections) and relay.py (circuits) for the network process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from spes_swarm.metrics import events
from spes_swarm.network.link.links import Links
from spes_swarm.network.link.reach import ReachService
from spes_swarm.network.link.relay import Relay
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.run_services import RunServices
from spes_swarm.network.transport.daemon import Daemon

_TEND_S = 2.0
_FIRST_REVIEW_S = 10.0  # then as soon as there is a peer to ask; a founder starts without one
_REVIEW_S = 300.0
_DOUBT_S = 30.0  # until a negative result is confirmed, before this peer counts as unreachable


@dataclass(eq=False)
class Connectivity:
    """Maintains this peer's connections in the background once it takes part in a run."""

    daemon: Daemon
    rpc: Rpc
    _: KW_ONLY
    announced: bool  # the user has given the addresses at which this peer can be reached
    use_relays: bool  # it serves as a relay and uses circuits
    notify: Callable[[events.Reach | events.Link], None]
    found: events.Reach = events.UNKNOWN_REACH  # the latest result of the check whether this peer can be reached
    _links: Links | None = field(default=None, init=False)
    _doubted: bool = field(default=False, init=False)
    _next_review: float = field(default_factory=lambda: time.monotonic() + _FIRST_REVIEW_S, init=False)

    def __post_init__(self) -> None:
        self._reach = ReachService(self.daemon, self.rpc)
        self._relay = Relay(self.daemon, enabled=self.use_relays)

    async def start(self) -> None:
        """Registers the services that other peers may call; until `attend`, nothing is relayed."""
        await self._reach.start()
        await self._relay.start()

    async def check(self) -> events.Reach:
        """Asks connected peers whether this one can be reached; see reach.py."""
        peers = list(await self.daemon.connections())
        self.found = await self._ask(peers) if peers else events.UNKNOWN_REACH
        return self.found

    async def _ask(self, peers: list[str]) -> events.Reach:
        return await self._reach.check(peers, await self.daemon.maddrs(), announced=self.announced)

    def attend(self, run: RunServices, *, review: bool) -> None:
        """Starts maintaining the connections to the peers of a run.

        With `review`, reachability is checked again from time to time, and `run` updated. During a round, connections
        that work are left alone.
        """
        self._relay.admits = lambda peer_id: any(n.peer_id == peer_id for n in run.neighbours())
        links = self._links = Links(
            self.daemon,
            use_relays=self.use_relays,
            maddrs_of=run.greeter.greet,
            on_link=lambda peer_id, relayed: self.notify(events.Link(peer=peer_id, relayed=relayed)),
        )
        if self.found.reachable:
            run.set_reach(True, self.found.address)
        if self.found.reachable is not None:
            self._next_review = time.monotonic() + _REVIEW_S

        async def look_around() -> None:
            await links.tend(run.neighbours(), reachable=run.state.reachable, busy=run.announcer.in_round)
            if review and time.monotonic() >= self._next_review:
                await self._review(run)

        run.repeat(look_around, _TEND_S)

    async def _review(self, run: RunServices) -> None:
        """Checks again; a negative result is confirmed before this peer stops counting as reachable."""
        known = {neighbour.peer_id for neighbour in run.neighbours()}
        peers = [peer for peer in await self.daemon.connections() if peer in known]
        if not peers:
            return
        random.shuffle(peers)
        found = await self._ask(peers)
        doubtful = found.reachable is False and run.state.reachable and not self._doubted
        self._doubted = doubtful
        self._next_review = time.monotonic() + (_DOUBT_S if doubtful else _REVIEW_S)
        if found.reachable is None or doubtful:
            return
        run.set_reach(found.reachable, found.address if found.reachable else None)
        if (found.reachable, found.address) != (self.found.reachable, self.found.address):
            self.notify(found)
        self.found = found

    def stop(self) -> None:
        """Stops dialling; circuits through this peer last until the daemon ends."""
        if self._links is not None:
            self._links.stop()
