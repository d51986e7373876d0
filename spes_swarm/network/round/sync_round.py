"""One synchronisation round from this peer's side, from top to bottom.

A sparse all-reduce: members state what they contribute, agree on a group and so on a plan, push their differences to
the reducers of the parts, pull the results, and move the reference. See docs/architecture.md for the overview.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass
from functools import partial

from spes_swarm.base.errors import NoLeaderError, ProtocolError, RoundError
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.metrics import events
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.round.audits import Audits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.round.lasting_records import LastingRecords
from spes_swarm.network.round.rendezvous import Rendezvous
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.port.commands import Listener
from spes_swarm.port.messages import RoundReport
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.lineage import BRANCH, Lineage
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.protocol.rounds.outcome import Bounds, CommitReport
from spes_swarm.protocol.rounds.own_statement import Work, difference_rms, make_statement
from spes_swarm.protocol.rounds.plan import Plan, common_lineage, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import NONCE_BYTES, Group, Statement
from spes_swarm.protocol.rounds.vouchers import without_duty

_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class SyncRounds:
    """Runs the rounds of one run, one at a time."""

    run_state: RunState
    rendezvous: Rendezvous
    exchange: Exchange
    audits: Audits
    transfer: Transfer
    announcer: Announcer
    listener: Listener

    def __post_init__(self) -> None:
        state, run = self.run_state, self.run_state.run
        self._clock = RoundClock.of(run)
        self._codec = get_codec(run.round.codec)
        self._last_round = ScheduleEnd(run).last_round  # which no other round could follow to complete the work
        self._result_codec = get_codec(run.round.codec_of_results)
        self._ignored: set[str] = set()  # members whose work did not count in the last commit
        self.lasting_records = LastingRecords(state.run_id, state.tracks, state.settings.track_records)
        self._bounds = Bounds.of(run.round.clip, run.round.max_update_rms)
        self._make_plan = partial(
            make_plan,
            layout=self.run_state.settings.layout,
            max_part_elements=run.round.part_elements,
            clip=run.round.clip,
            warmup_rounds=self._clock.round_at(run.training.warmup_steps),
            most_of_newcomers=run.most_of_newcomers,
        )

    async def run(
        self, target_round: int, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport:
        """Runs one round for `target_round`; see port.commands.RunCommands for the other arguments.

        Raises:
            RoundError: nothing was committed, and reference and contribution are unchanged.
        """
        started = time.monotonic()
        statement = await self._statement(target_round, tokens, routed, leaving, loss_rose)
        try:
            group = await self.rendezvous.join(statement)
        except NoLeaderError:
            self.run_state.roster.reputation.stop_following()
            raise
        self.run_state.group = frozenset(member.peer_id for member in group.members)
        grouped = time.monotonic()
        plan = self._make_plan(
            group, experts=self._clock.synchronises_experts(group.round), may_return=group.round != self._last_round
        )
        self.listener.notify(events.Group(round=group.round, peers=len(group.members)))
        commit = await self._all_reduce(group, plan)
        experts = self._reassign(group, plan, leaving)
        if not commit.keeps_work:
            self.announcer.has_contributed(tokens)
        if plan.taken_back is None:
            self.run_state.swarm_tokens.add(round(sum(claim.tokens for claim in plan.claims)))
        report = RoundReport(
            commit,
            grouped - started,
            time.monotonic() - grouped,
            self.run_state.reference.digest.hex(),
            experts,
            self.run_state.swarm_tokens.count,
        )
        self.lasting_records.committed()
        self.announcer.round_seconds = report.group_seconds + report.exchange_seconds
        _LOGGER.info(
            "committed with %d members, %d of %d parts missing; group %.2f s, exchange %.2f s, digest %s",
            len(commit.members),
            commit.parts_missing,
            commit.parts_total,
            report.group_seconds,
            report.exchange_seconds,
            report.digest,
        )
        return report

    async def _statement(
        self, target_round: int, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None
    ) -> Statement:
        """Makes this peer's statement, which goes into the plan of all members."""
        run = self.run_state
        await self.lasting_records.recall(target_round)
        held = run.leases.held
        rms = await asyncio.to_thread(difference_rms, run.reference, run.contribution_N, held)
        return make_statement(
            Work(target_round, held, tokens, routed, rms, leaving, loss_rose),
            run.reference,
            run.lineage,
            run.leases,
            run.tracks,
            bandwidth_mbps=run.settings.bandwidth_mbps,
            reachable=run.reachable,
            certificate=run.certificate,
            nonce=secrets.token_bytes(NONCE_BYTES),
            before=run.previous.digest(run.reference),
            admission=run.settings.admission,
        )

    async def _all_reduce(self, group: Group, plan: Plan) -> CommitReport:
        """Moves the reference to the weighted mean of the members' contributions, part by part."""
        run = self.run_state
        me = group.index_of(run.identity.peer_id)
        assert me is not None
        if group.round != run.reference.round + 1:
            run.swarm_tokens.missed_commits()
        state = RoundState(
            group,
            plan,
            me,
            run.reference,
            run.contribution_N,
            self._codec,
            self._bounds,
            run.key,
            run.tracks,
            self._result_codec,
            run.previous,
        )
        # Nobody has waited for peers whose records or first answers come during the exchange.
        absent = run.roster.absent({member.peer_id for member in group.members})
        for peer_id in filter(run.roster.reputation.is_member, absent):  # a newcomer may just not be ready yet
            run.roster.lose(peer_id)
        self.audits.end(keep=plan.taken_back is not None)
        on_late = partial(self.listener.report, "the exchange has exceeded its first deadline")
        try:
            with self.transfer.round_under_way():
                commit = await self.exchange.run(state, run.roster.reputation.grace_s, on_late)
        except RoundError:
            self.rendezvous.spend(group)
            self._note_failure(group, state)
            raise
        finally:
            self.listener.on_round_over()
        self._note_members(group, state, absent)
        self.audits.begin(state)
        lineage = common_lineage(group.members)
        if (lost := run.replaced_lineage.lost_in(lineage)) is not None:
            what = f"rounds {lost[0]} to {lost[1]} of this peer are not in the run: the others went on without them"
            self.exchange.on_fault(run.identity.peer_id, ProtocolError(BRANCH, what))
        run.lineage, run.replaced_lineage = lineage.after(group.round, group.id), Lineage({})
        return commit

    def _note_failure(self, group: Group, state: RoundState) -> None:
        """Records who delivered nothing in an exchange that failed.

        Among three or more peers, this peer may just be cut off from the others; but strangers prove nothing. A peer
        whose work is in earlier rounds is left out only if it is alone with this one, which could never commit again.
        """
        run, reputation = self.run_state, self.run_state.roster.reputation
        others = {member.peer_id for member in group.members} - {run.identity.peer_id}
        failed = state.failed_reducers()
        run.tracks.reducers_failed(group.round, failed)
        reputation.exchanged((), {peer for peer in failed if len(others) == 1 or not reputation.is_member(peer)})

    def _note_members(self, group: Group, state: RoundState, absent: set[str]) -> None:
        """Records which members have delivered: this decides whose claims count later."""
        run, taken_back = self.run_state, state.plan.taken_back
        ids = [member.peer_id for member in group.members]
        if taken_back is None:
            delivered = {ids[i] for i in state.results.contributors}
            idle = {m.peer_id for m in group.members if m.statement.tokens} - delivered
            idle -= {ids[i] for i in state.plan.ignored}  # nothing was asked of them
            reputation = run.roster.reputation
            owing = {peer for peer in state.failed_reducers() | idle if not reputation.is_member(peer)}
            reputation.exchanged(delivered, owing - {run.identity.peer_id})
            run.roster.committed(delivered, absent | idle)
            state.record_commit(run.tracks)
            run.tracks.conduct.note_commit({ids[part.reducer] for part in state.plan.parts})
        else:  # nobody has contributed, so nobody becomes a member by it
            run.roster.committed(list(filter(run.roster.reputation.is_member, ids)), absent)
            run.tracks.reducers_failed(group.round, state.failed_reducers())
            run.tracks.conduct.note_return(group.round, group.id, taken_back.round)
            _LOGGER.info("most members' loss has risen: round %d is taken back", taken_back.round)
        self._note_duties(group, state.plan)
        said = {member.peer_id: member.statement.proven for member in group.members}
        run.tracks.conduct.exclusions.agreed(group.round, said, {ids[i] for i in state.plan.trusted})
        for member in group.members:
            run.tracks.conduct.note_key(member.peer_id, member.signer.key)
        if (alarm := run.tracks.standstill()) is not None:
            self.exchange.on_fault(run.identity.peer_id, alarm)
        staying = [member.peer_id for member in group.members if not member.statement.leaving]
        run.roster.vouch(staying, for_s=run.run.round.progress_ttl_s)

    def _note_duties(self, group: Group, plan: Plan) -> None:
        """Notes who has no duty, and says so when that changes."""
        reputation, tracks = self.run_state.roster.reputation, self.run_state.tracks
        before = reputation.without_duty
        ids, vouched = [m.peer_id for m in group.members], [m.vouched for m in group.members]
        absent = [view.peer_id for view in self.run_state.roster.present() if view.peer_id not in ids]
        now = without_duty(ids, vouched, absent)
        reputation.without_duty = {peer_id: before.get(peer_id, plan.round) for peer_id in sorted(now)}
        ignored, self._ignored = self._ignored, {ids[i] for i in plan.ignored}
        for peer_id in (now - before.keys()) | (self._ignored - ignored):
            own = ", ".join(tracks.conduct.doubts(peer_id, plan.round)) or "nothing"
            what = f"most members doubt it: it reduces nothing and leads no round (faults seen here: {own})"
            if peer_id in self._ignored:
                what += "; its work does not count: it is hidden, next to nothing, or the opposite of the others'"
            self.exchange.on_fault(peer_id, ProtocolError("duty", what))
        for peer_id in before.keys() - now - set(tracks.conduct.exclusions.culprits):
            _LOGGER.info("%s has its duties again", peer_id)

    def _reassign(self, group: Group, plan: Plan, leaving: bool) -> ExpertChange:
        """Determines which experts this peer trains from now on."""
        experts = self.run_state.leases.after_commit(group, plan)
        if (experts.gained or experts.lost) and not leaving:
            self.announcer.renew_lease_soon()
        return experts
