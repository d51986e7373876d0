"""The other peers of a run: reads their records, greets them, and sums up for the trainer what they say."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

from spes_swarm.network.announcer import Announcer
from spes_swarm.network.link.door import Door
from spes_swarm.network.link.known_records import KnownRecords
from spes_swarm.network.link.peer_greeter import PeerGreeter
from spes_swarm.network.link.wire import FaultSink
from spes_swarm.network.round.company import Company
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.run_state import RunState
from spes_swarm.port.messages import SwarmView
from spes_swarm.protocol.members.election import periods_to_wait
from spes_swarm.protocol.members.records import Lease, Progress, Volunteer
from spes_swarm.protocol.members.twin import twin_fault

REFRESH_S = 1.0  # how often other peers' records are read


@dataclass(eq=False)
class Discovery:
    """Keeps the roster, the table of leases and the list of volunteers up to date."""

    run_state: RunState
    door: Door
    greeter: PeerGreeter
    announcer: Announcer
    proofs: Proofs
    on_fault: FaultSink
    company: Company = field(init=False)
    _records: KnownRecords | None = field(default=None, init=False)
    _volunteers: dict[str, Volunteer] = field(default_factory=dict, init=False)
    _twin_report: asyncio.Task[None] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._roster = self.run_state.roster
        self.company = Company(self._roster, self.run_state.run.round.progress_ttl_s, self.refresh_quietly)

    def open(self, records: KnownRecords) -> None:
        """Sets where records are read; `refresh` follows."""
        self._records = records

    def stop(self) -> None:
        """Ends what is under way, as this peer leaves."""
        if self._twin_report is not None:
            self._twin_report.cancel()

    async def refresh(self) -> None:
        """Reads other peers' records and greets new peers, so that connections exist before the first round."""
        assert self._records is not None
        await self._records.refresh()
        progress = self._records.of("progress", Progress)
        new = self._roster.update(progress)
        if self.announcer.has_twin(progress):
            self._twin_report = asyncio.create_task(self._report_twin())
        self.run_state.leases.update(self._records.of("leases", Lease))
        self.proofs.compare(progress)
        self.company.note_read()
        self.announcer.learn_swarm_tokens()
        if self.announcer.volunteering is not None:
            volunteers, has_answered = self._records.of("publishers", Volunteer), self._roster.reputation.has_answered
            self._volunteers = {peer: record for peer, record in volunteers.items() if has_answered(peer)}
        self.greeter.greet_soon(new)

    async def refresh_quietly(self) -> None:
        """As `refresh`; errors are reported where it is repeated."""
        with suppress(Exception):
            await self.refresh()

    async def refresh_leases(self) -> None:
        """Reads all leases in the DHT."""
        assert self._records is not None
        await self._records.search("leases")
        self.run_state.leases.update(self._records.of("leases", Lease))

    async def _report_twin(self) -> None:
        me, seen = self.run_state.identity.peer_id, await self.greeter.own_endpoints()
        self.on_fault(me, twin_fault(me, self.greeter.own_maddrs(), seen))

    def view(self) -> SwarmView:
        """What the trainer needs to know about the other peers, by the records as they were read last."""
        roster, own_round, me = self._roster, self.run_state.reference.round, self.run_state.identity.peer_id
        volunteering = self.announcer.volunteering
        answering, electorate = roster.answering(), roster.electorate()
        ready = tuple(view.peer_id for view in answering if view.progress.state in ("waiting", "training"))
        dead_votes, reports = roster.dead_votes()
        held = {e for view in answering for e in view.progress.experts} | set(self.run_state.leases.held)
        return SwarmView(
            num_peers=len(answering),
            num_ready=len(ready),
            num_training=sum(view.progress.state == "training" for view in answering),
            tokens_per_step=roster.tokens_per_step(self.announcer.tokens_per_step),
            tokens=roster.tokens_since_commit(own_round, self.run_state.run.round.progress_ttl_s),
            tokens_per_second=sum(view.progress.tokens_per_second for view in electorate),
            at=time.monotonic(),
            swarm_round=roster.swarm_round(own_round),
            experts_covered=len(held),
            ready=ready,
            data=roster.data_positions(),
            routing_reports=reports,
            dead_votes=dead_votes,
            excluded=self.run_state.tracks.conduct.exclusions.excluded,
            without_duty=tuple(roster.reputation.without_duty),
            out=self.door.why_out(me),
            publishing_periods=periods_to_wait(self._volunteers, volunteering[0], me) if volunteering else 0,
        )
