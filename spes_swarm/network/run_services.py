"""The services of one run inside the network process: what they are, how they are connected, their start and end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.log import context, where_to_read
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.diagnosis import roster_lines
from spes_swarm.network.discovery import REFRESH_S, Discovery
from spes_swarm.network.link.dht_records import RecordWriter, RunRecordValidator
from spes_swarm.network.link.known_peers import KnownPeers
from spes_swarm.network.link.known_records import KnownRecords
from spes_swarm.network.link.peer_greeter import PeerGreeter
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.run_dht import RunDht
from spes_swarm.network.link.wire import Guests
from spes_swarm.network.round.audits import Audits
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.network.round.sync_round import SyncRounds
from spes_swarm.network.round.token_count import TokenCount
from spes_swarm.network.run_commands import RunCommandHandler
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transfer.catching_up import CatchingUp
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.port.commands import Called, Listener
from spes_swarm.port.messages import RunSettings
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.reputation import Neighbour

_LOGGER = logging.getLogger(__name__)


class RunServices:
    """Creates, connects, starts and ends the services of one run; `commands` executes the trainer's commands."""

    def __init__(self, listener: Listener, daemon: Daemon, rpc: Rpc, identity: Identity, settings: RunSettings) -> None:
        run, transport, on_fault = settings.manifest.run, daemon.transport, self._on_fault
        self._listener = listener
        self._daemon = daemon
        self._rpc = rpc
        self._dht = RunDht(daemon, rpc, settings.manifest, on_fault, settings.tokenizer, settings.acts)
        door = self._dht.door
        state = self.state = RunState.of(identity, settings, door.admits, door.members.exclusions)
        context.run, context.round = state.run_id, lambda: state.reference.round
        self._tasks: list[asyncio.Task[None]] = []
        self._known_records: KnownRecords | None = None
        announcer = self.announcer = Announcer(state, self._dht.now, on_fault)
        guests = Guests(admits=door.admits, is_member=state.is_member)
        proofs = Proofs(transport, state, on_fault, guests, announcer.announce_soon, door.members.inviter)
        known_peers = KnownPeers([*settings.initial_peers, *settings.known_peers])
        self.greeter = PeerGreeter(rpc, state.roster, known_peers, self._own_maddrs, daemon.connections)
        discovery = self._discovery = Discovery(state, door, self.greeter, announcer, proofs, on_fault)
        limits, num_threads = ExchangeLimits.of(run.round), settings.num_threads
        exchange = Exchange(transport, rpc, state.run_id, limits, on_fault, guests, num_threads)
        audits = Audits(transport, state, on_fault, guests, lambda: exchange.current, proofs)
        stall_s, upload_mbps = run.round.stall_timeout_s, settings.upload_mbps
        transfer = Transfer(transport, rpc, state.run_id, state.reference, stall_s, on_fault, guests, upload_mbps)
        rendezvous = Rendezvous(
            rpc,
            state,
            door.vet_statement,
            is_blind=lambda: discovery.company.is_blind,
            on_called=lambda round_number: listener.notify(Called(round_number)),
        )
        self._token_count = TokenCount(rpc, state, announcer, lambda: rendezvous.gathering)
        catching_up = CatchingUp(state, transfer, discovery.refresh)
        rounds = self._rounds = SyncRounds(state, rendezvous, exchange, audits, transfer, announcer, listener)
        self.commands = RunCommandHandler(door, discovery, self._token_count, catching_up, rounds)
        self._connect_callers(rpc, proofs)

    def _connect_callers(self, rpc: Rpc, proofs: Proofs) -> None:
        """Connects what exists before the services that it needs: the door, and the calls, which outlive a run."""
        state, door = self.state, self._dht.door
        door.present = lambda: [view.peer_id for view in state.roster.present()]
        door.electorate = lambda: list(filter(state.roster.reputation.is_member, door.present()))
        door.on_refusal = proofs.ask_about_me
        rpc.admission, rpc.is_member = state.settings.admission, state.is_member
        rpc.on_contact = lambda peer: state.roster.reputation.note_answer(peer) if door.admits(peer) else None

    async def start(self) -> None:
        """Synchronises the clock with the swarm, joins the DHT and registers the services."""
        settings, run_id, initial_peers = self.state.settings, self.state.run_id, self.state.initial_peers
        vet = self._dht.door.vet_record
        validator = RunRecordValidator(run_id, self._dht.now, self._is_known, vet)
        await self._rounds.audits.start()  # before anybody is asked: it reads whom proofs exclude
        await self._dht.join(
            settings.initial_peers,
            validator,
            lambda connected: initial_peers or connected,
            client_mode=settings.client_mode,
        )
        writer = RecordWriter(self._dht.node, self.state.identity, run_id)
        self.announcer.open(writer)
        known_records = self._known_records = KnownRecords(
            self._dht.node,
            self._rpc,
            validator,
            run_id,
            self._dht.now,
            self._is_known,
            vet,
            members=self._whom_to_ask,
            near=lambda: writer.near & {view.peer_id for view in self.state.roster.answering()},
        )
        writer.on_write = known_records.take
        self._discovery.open(known_records)
        await self._dht.serve()
        await known_records.start()
        await self.greeter.start()
        await self._token_count.start()
        await self._rounds.exchange.start()
        await self._rounds.transfer.start()
        await self._rounds.rendezvous.start()
        await self._discovery.refresh()
        self.repeat(self.announcer.announce, 0.3)  # a burst of events needs only one record
        self.repeat(self._refresh_view, REFRESH_S)
        self.repeat(self._keep_time, 0.0)
        self.repeat(self._reunite, REFRESH_S)

    async def leave(self) -> None:
        """Releases the lease, announces that this peer is leaving, and leaves the DHT."""
        for task in self._tasks:
            task.cancel()
        self._discovery.stop()
        if self._known_records is not None:  # otherwise this peer has not joined the DHT
            self._known_records.stop()
        self._rounds.audits.end(keep=False)
        await self._rounds.lasting_records.close()
        await self._rounds.audits.proofs.stop()
        await self.announcer.say_goodbye()
        await self._dht.leave()

    def describe(self) -> Iterator[str]:
        """What the services of the run are doing, in lines for the log."""
        yield from self._rounds.rendezvous.describe()
        yield from self._rounds.exchange.describe()
        yield from roster_lines(self.state.roster)

    def _on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """Reports a fault to the trainer and, by its kind only, in the next progress record."""
        self.announcer.faults.note(error.kind)
        self.state.tracks.conduct.note_fault(peer_id, error.kind)
        self._listener.on_fault(peer_id, error)

    def _is_known(self, peer_id: str) -> bool:
        """Returns True if this peer has been in contact with another one, so that a process is behind its records."""
        me, reputation = self.state.identity.peer_id, self.state.roster.reputation
        return peer_id == me or reputation.has_answered(peer_id) or self._dht.has_met(peer_id)

    def _whom_to_ask(self) -> list[str]:
        """Members that can tell what is new: those whose work is in a commit, while there are any."""
        roster = self.state.roster
        trusted, answering = (
            [view.peer_id for view in views if view.progress.reachable]
            for views in (roster.electorate(), roster.answering())
        )
        return trusted or answering

    # What is repeated while the run is open.

    def repeat(self, action: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
        """Repeats an action while the run is open. An unexpected error is reported and does not end the loop."""

        async def run() -> None:
            logged = ""
            while True:
                try:
                    await action()
                except Exception as exc:  # any error: a peer that stops publishing or reading would split the swarm
                    detail = f"{exc!r}{where_to_read()}"
                    if detail != logged:  # the same one every second would drive all else out of the log
                        _LOGGER.exception("%s failed", action.__qualname__)
                        logged = detail
                    self._on_fault(self.state.identity.peer_id, ProtocolError("internal", detail))
                await asyncio.sleep(pause_s)

        self._tasks.append(asyncio.create_task(run()))

    async def _refresh_view(self) -> None:
        self._dht.door.read_file()
        try:
            await self._discovery.refresh()
        finally:
            self._listener.notify(self._discovery.view())

    async def _keep_time(self) -> None:
        if await self._dht.check_time(self._clock_electorate) > 0:
            self.announcer.announce_soon()  # to peers that were ahead, this peer's records had expired

    def _clock_electorate(self, connected: set[str]) -> Collection[str]:
        # Includes peers that are merely connected: to a peer whose clock is ahead, the others' records have expired.
        peers = {*self._dht.door.present(), *connected}
        return self.state.roster.reputation.clock_electorate(peers, time.monotonic())

    async def _reunite(self) -> None:
        live = {self.state.identity.peer_id, *self._dht.door.present()}
        if await self.greeter.known_peers.reunite(live, self._daemon, self._dht.node):
            assert self._known_records is not None
            self._known_records.search_soon()

    # Reachability; see connectivity.py.

    def set_reach(self, reachable: bool, address: str | None) -> None:
        """Sets whether this peer announces that it can be reached, and where others got through; None: nowhere."""
        if self.state.reachable != reachable:
            self.state.reachable = reachable
            self.announcer.announce_soon()
        maddr = f"{address}/p2p/{self.state.identity.peer_id}"
        if address is not None and maddr not in self._dht.own_maddrs:
            self._dht.own_maddrs.append(maddr)

    def _own_maddrs(self) -> list[str]:
        """This peer's addresses, as other peers get them; none while it cannot be reached."""
        return self._dht.own_maddrs if self.state.reachable else []

    def neighbours(self) -> list[Neighbour]:
        """The other live peers."""
        return [Neighbour(view.peer_id, view.progress.reachable) for view in self.state.roster.present()]
