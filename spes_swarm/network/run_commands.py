"""Executes the trainer's commands that need an open run."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import InvitationError, RoundError, TransferError
from spes_swarm.base.log import where_to_read
from spes_swarm.network.discovery import REFRESH_S, Discovery
from spes_swarm.network.link.clock import steady_clock
from spes_swarm.network.link.door import Door
from spes_swarm.network.round.sync_round import SyncRounds
from spes_swarm.network.round.token_count import TokenCount
from spes_swarm.network.transfer.catching_up import CatchingUp
from spes_swarm.port.commands import RunCommands
from spes_swarm.port.messages import CaughtUp, Presence, RoundReport, SwarmView, TokenCounts, TransferReport
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable

_ROUND_REFRESH_S = 1.0  # how long a round waits for the newest records
_FRESH_S = 0.5  # it does not wait for records if some were read so recently
_SHORT_ROUND_S = 1.0  # rounds that take longer are announced while they are under way
_MAX_CHANGES = 8  # of a claim; 32 peers that start together need at most 5
_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class RunCommandHandler(RunCommands):
    """Executes commands with the services of the run; port.commands.RunCommands describes them."""

    door: Door
    discovery: Discovery
    token_count: TokenCount
    catching_up: CatchingUp
    rounds: SyncRounds
    _round_task: asyncio.Task[Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._state, self._announcer = self.rounds.run_state, self.rounds.announcer
        self._transfer, self._listener = self.rounds.transfer, self.rounds.listener

    # The reference.

    async def adopt(self, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int = 0) -> str:
        """See RunCommands."""
        self._state.lineage = lineage
        self._state.swarm_tokens.count = swarm_tokens
        self._state.reference.finish(table_round, list(enumerate(versions)))
        self._transfer.open()
        return self._state.reference.digest.hex()

    async def download(self, if_newer: bool, partial: Path | None = None) -> TransferReport | None:
        """See RunCommands."""
        report = await self.catching_up.download(if_newer, partial, self._listener.notify)
        if report is not None:
            _LOGGER.info("fetched the reference: %s", report)
            self._state.replaced_lineage = self._state.lineage
            self._state.roster.reputation.follow()
            self._state.swarm_tokens.missed_commits()
            self._announcer.learn_swarm_tokens()
        return report

    async def swarm_table(self) -> ReferenceTable | None:
        """See RunCommands."""
        return await self.catching_up.swarm_table()

    async def table(self) -> ReferenceTable:
        """See RunCommands."""
        return self._state.reference.table

    async def lineage(self) -> tuple[list[int], bytes]:
        """See RunCommands."""
        return self._state.lineage.to_lists()

    async def swarm_tokens(self) -> int:
        """See RunCommands."""
        return self._state.swarm_tokens.count

    # Other peers.

    async def peer_maddrs(self) -> list[str]:
        """See RunCommands."""
        peers = [view.peer_id for view in self._state.roster.answering()]
        return self.discovery.greeter.known_peers.of(peers)

    async def view(self) -> SwarmView:
        """See RunCommands."""
        await self.discovery.refresh()
        await self.discovery.greeter.first_answers()  # or a peer that leaves could take itself for the only one
        return self.discovery.view()

    async def count_tokens(self) -> TokenCounts:
        """See RunCommands."""
        return await self.token_count.others()

    async def set_presence(self, presence: Presence) -> None:
        """See RunCommands."""
        self._announcer.set_presence(presence)

    async def volunteer(self, target: bytes | None, publishing: bool) -> None:
        """See RunCommands."""
        self._announcer.volunteering = (target, publishing) if target is not None else None
        self._announcer.announce_soon()

    # Experts.

    async def claim(self, experts: tuple[int, ...] | int, room: int, fixed: bool) -> tuple[int, ...]:
        """See RunCommands."""
        most, leases = self.door.terms(self._state.identity.peer_id).experts, self._state.leases
        if most is not None:
            room, experts = min(room, most), experts[:most] if isinstance(experts, tuple) else min(experts, most)
        leases.room, leases.fixed = room, fixed
        await self.discovery.refresh()
        await self.rounds.audits.proofs.fetched()  # before its first round, a newcomer knows whom a proof excludes
        if isinstance(experts, tuple):
            leases.held = experts
            await self._announcer.publish_lease()
            return experts
        leases.choose(experts)
        await self._announcer.publish_lease()
        # Peers that start together make the same choice; look again until the choices have settled. If others change
        # theirs again and again, the last one stands, and the next commits resolve what is left.
        quiet = changes = 0
        while quiet < 2 and changes < _MAX_CHANGES:
            await asyncio.sleep(REFRESH_S)
            await self.discovery.refresh_leases()
            if leases.resolve():
                quiet += 1
            else:
                quiet, changes = 0, changes + 1
                await self._announcer.publish_lease()
        return leases.held

    # Rounds.

    async def run_round(
        self, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport | CaughtUp:
        """See RunCommands."""
        if (reason := self.door.why_out(self._state.identity.peer_id)) is not None:
            raise InvitationError(reason)
        self._round_task = asyncio.current_task()
        self._announcer.in_round = True
        # Writing a record slows a short round, which is over before others could read it.
        announcement = asyncio.get_running_loop().call_later(_SHORT_ROUND_S, self._announcer.announce_soon)
        try:
            outcome: RoundReport | CaughtUp | None = await self._catch_up()
            if outcome is None:
                target = self._state.target_round()
                outcome = await self.rounds.run(target, tokens, routed, leaving, loss_rose)
            self.door.members.confirm({self._state.identity.peer_id, *self.door.electorate()})
            self._listener.notify(self.discovery.view())  # the trainer's is from before the commit
            return outcome
        except (RoundError, TransferError) as exc:
            self._announcer.faults.note("round")
            self._listener.report(f"the round has failed: {exc}")
            raise
        except Exception as exc:  # one failed round must not end the session; its work is in the next difference
            _LOGGER.exception("the round has failed")
            raise RoundError(f"unexpected error: {exc!r}{where_to_read()}") from exc
        finally:
            announcement.cancel()
            self._announcer.in_round = False
            self._announcer.announce_soon()

    async def _catch_up(self) -> CaughtUp | None:
        """Looks at the swarm before a round; fetches its reference if no round could bring this peer's up to date."""
        # A frozen node slows the DHT for seconds while the other peers wait; records are read all the time anyway. All
        # peers begin a round at the same time, so a search by each delays short rounds.
        company = self.discovery.company
        if steady_clock() - company.read_at > _FRESH_S:
            await asyncio.wait({asyncio.create_task(self.discovery.refresh_quietly())}, timeout=_ROUND_REFRESH_S)
        await company.find_again()
        await company.await_beginners()
        caught_up = await self.catching_up.resync_if_diverged()
        if caught_up is not None:
            if caught_up.complete:
                self._state.lineage = Lineage({})  # no block of its old lineage is left, as for a newcomer
                self._state.roster.reputation.follow()
            self._state.swarm_tokens.missed_commits()
            self._state.ahead = 0
            self.rounds.rendezvous.reset()
            self._state.roster.reputation.without_duty = {}  # as of a group that others have left behind
        return caught_up

    async def cancel_round(self) -> None:
        """See RunCommands."""
        if self._round_task is not None and not self._round_task.done():
            self._round_task.cancel()
            await asyncio.wait({self._round_task})

    async def traffic(self) -> tuple[int, int]:
        """See RunCommands."""
        with self._transfer.round_under_way():  # other members still fetch their results from here
            self._announcer.set_traffic(*await self.rounds.exchange.traffic())
        return self._announcer.traffic
