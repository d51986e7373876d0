"""One round as one member sees it: what it sends, reduces, receives and commits, without any I/O.

`Exchange` moves the bytes. The reference changes only in `RoundState.commit`.

Shapes: N elements of one part.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.protocol.averaging import clipping
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.consensus.reference import Table
from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.contributions import Contributions, contribution_of
from spes_swarm.protocol.rounds.error_feedback import ErrorFeedback
from spes_swarm.protocol.rounds.outcome import CommitReport, RoundInputs
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.results import Averaging, Result, Results
from spes_swarm.protocol.rounds.track_record import TrackRecords


@dataclass(frozen=True, slots=True)
class Applied:
    """What remains of a commit once the values have changed."""

    table: Table
    report: CommitReport


@dataclass(eq=False)
class RoundState(RoundInputs):
    """One round as one member sees it.

    Attributes:
        averaging: how results follow from the plan.
        contributions: what this member sends.
        results: what it has of all parts.
        reduction: what it reduces.
        ended: reducers that have ended their streams in order.
        finished: no more results will arrive from reducers.
        unreliable: members that have not delivered all the results that they were asked for.
        unserved: members that have not been sent all results that they can get here, and are not gone.
        payload_bytes_sent: so far.
    """

    # What does the work: the tests put in classes that lie.
    reduce_by: ClassVar[type[Reduction]] = Reduction
    results_by: ClassVar[type[Results]] = Results

    def __post_init__(self) -> None:
        plan, me = self.plan, self.me
        self.ended: set[int] = set()
        self.finished = False
        self.unreliable: set[int] = set()
        reduced = [plan.block_of(part) for part in plan.parts if part.reducer == me]
        self.unserved = {i for i in range(plan.num_members) if i != me and any(b.receives(i) for b in reduced)}
        self.payload_bytes_sent = 0
        self._feedback = ErrorFeedback()
        ids, keys = zip(*((member.peer_id, member.signer.key) for member in self.group.members), strict=True)
        self.averaging = Averaging(plan, ids, keys, self.codec, self.result_codec or self.codec, self.bounds.bounded)
        exchange = self.group.exchange
        self.contributions = Contributions(plan, me, self.codec, self.key, exchange, self.values, self._feedback)
        self.results = self.results_by(self, self.averaging, self.contributions.commitments)
        self.reduction = self.reduce_by(self, self.averaging, self.contributions, self.results, self._feedback)

    @property
    def payload_bytes_received(self) -> int:
        """Of contributions and results."""
        return self.reduction.payload_bytes + self.results.payload_bytes

    def served(self, member: int) -> None:
        """Notes that a member has been sent all results that it can get here, or is gone."""
        self.unserved.discard(member)

    def record_commit(self, tracks: TrackRecords) -> None:
        """Adds this round's commit to the track records of its members."""
        seen = self.results.contributors
        left = self.reduction.agreements.deviations_left()
        aside = {member for member in left if left[member] < round_faults.MATERIAL_DEVIATION}
        honoured = {
            i for i, claim in enumerate(self.plan.claims) if i in seen and claim.excess <= 1 and not claim.absurd
        }
        ids = [member.peer_id for member in self.group.members]
        in_order = {ids[i] for i in honoured - aside - self.reduction.refused}
        for i in left:
            if not tracks.is_new(ids[i]):
                tracks.note_agreement(ids[i], left[i])
        for i, found in self.reduction.agreements.opposition(self.plan.claims).items():
            tracks.conduct.note_opposition(ids[i], self.plan.round, found)
        ratios = [(ids[i], claim.tokens_ratio) for i, claim in enumerate(self.plan.claims) if i != self.me]
        deliveries = {"delivered": {ids[i] for i in seen - {self.me}}, "failed": self.failed_reducers()}
        stalled = any(self.results.wanted[index].block == SHARED_BLOCK for index in self.results.missing())
        tracks.committed(self.plan.round, ratios, in_order, self.plan.median_rms, stalled=stalled, **deliveries)

    def failed_reducers(self) -> set[str]:
        """The members that have not delivered parts that they reduce, or whose results were refused."""
        lacking = [self.results.wanted[index] for index in self.results.missing()]
        failed = round_faults.failed_reducers(self.plan, self.me, lacking, self.ended, self.results.excessive)
        return {self.group.members[i].peer_id for i in failed}

    def commit(self) -> CommitReport:
        """Applies the outcome of the round to the reference, and to `live_N` as the new live weights."""
        return self.finish(self.apply())

    def apply(self) -> Applied:
        """The part of a commit that takes seconds: changes the values. `finish` follows."""
        held = self.group.members[self.me].statement.held
        trained = {block.index for block in self.reference.layout.trained_blocks(held)}
        arrived = self.results.arrived()  # what is averaged later, after a timeout, is only for others
        missing = [self.results.wanted[index] for index in self.results.wanted.keys() - {p.index for p, _ in arrived}]
        changed, incomplete = {part.block for part, _ in arrived}, {part.block for part in missing}
        taken_back = self.plan.taken_back
        keeps_work = taken_back is not None and self.results.missed(taken_back)
        self.reference.changing = frozenset(changed | (taken_back.blocks if taken_back is not None else set()))
        if taken_back is None:
            # What this member contributed is shown in audits, even if no result of a block has arrived.
            own = {i for i, b in self.plan.blocks.items() if any(c.member == self.me for c in b.contributions)}
            self.previous.keep(self.reference, self.live_N, changed | own, trained)
        elif self.me in taken_back.keepers:
            changed |= taken_back.blocks  # of one that has missed the commit, only the versions
            if not keeps_work:
                self.previous.restore(taken_back.blocks, self.reference, self.live_N, trained)
            self.results.is_restored = True
        carried = self._carried(arrived)
        for part, result in arrived:
            new_N = self.results.new_values(part, result)
            if part.block in trained:
                self._update_target(part, result, new_N, carried)
            self.results.applying = part.index
            self.reference.values_N[part.start : part.start + part.size] = new_N
            self.results.applied.add(part.index)
            self.results.applying = -1
        self.results.is_restored = True
        self._feedback.clear()  # a round is kept until the next one; its rounding errors need not be
        versions = [(index, self._version(index, incomplete)) for index in sorted(changed)]
        covered = {e for i, m in enumerate(self.group.members) if i not in self.plan.ignored for e in m.statement.held}
        report = CommitReport(
            round=self.plan.round,
            members=tuple(m.peer_id for m in self.group.members),
            parts_total=len(self.results.wanted),
            parts_missing=len(missing),
            changed_blocks=tuple(sorted(changed)),
            experts_covered=len(covered),
            deferred_experts=self.plan.deferred,
            unites=self.plan.unites,
            taken_back=None if taken_back is None else taken_back.round,
            keeps_work=keeps_work,
        )
        return Applied(self.reference.rehashed(self.plan.round, versions), report)

    def finish(self, applied: Applied) -> CommitReport:
        """Makes a commit valid, all at once."""
        self.reference.install(applied.table)
        self.results.committed = True
        if self.plan.taken_back is None:
            self.previous.committed(self.reference)
        return applied.report

    def _version(self, block: int, incomplete: Collection[int]) -> int:
        """The version of a changed block after the commit."""
        block_plan = self.plan.blocks.get(block)
        if block_plan is None:  # all members have restored it
            return self.plan.round
        # A block that could not be healed in full keeps its old version: it is late, not a fork.
        healed = self.me in block_plan.in_base or block not in incomplete
        return block_plan.new_version(self.plan.round) if healed else self.reference.versions[block]

    def _carried(self, arrived: Sequence[tuple[Part, Result]]) -> dict[int, float]:
        """By block, how much of this member's work that its reducers have left out goes into its next difference."""
        used: defaultdict[int, float] = defaultdict(float)  # shares of the largest sums of squares that may
        for part, result in arrived:
            own = contribution_of(self.plan, part, self.me)
            if own is not None and self.me not in result.included:
                most = self.averaging.block_sizes[part.block] * (clipping.CARRIED_SHARE * own.limit_rms) ** 2
                used[part.block] += sum_of_squares(self.own_difference(part)) / max(most, 1e-300)
        return {block: 1 / math.sqrt(max(1.0, share)) for block, share in used.items()}

    def _update_target(self, part: Part, result: Result, new_N: FloatArray, carried: dict[int, float]) -> None:
        """Sets the live weights that a trained part must have after the commit."""
        where = slice(part.start, part.start + part.size)
        block_plan, own = self.plan.block_of(part), contribution_of(self.plan, part, self.me)
        included = self.me in result.included
        whole = own is not None and len(block_plan.contributions) == 1 and own.scale == 1 and included
        if (part.block != 0 or self.codec.error_feedback) and self.me in block_plan.in_base and whole:
            # The only contributor keeps its live weights: the codec's rounding error stays in its next difference. If
            # its work was scaled down, they are replaced: the excess would make its next difference too long again.
            return
        if own is not None and not included:  # it is carried over to the new reference
            most = clipping.CARRIED_PART_RATIO * own.stated_rms if self.bounds.bounded else math.inf
            carried_N = clipping.shortened(self.own_difference(part), most)
            self.live_N[where] = new_N + np.float32(carried[part.block]) * carried_N
        else:
            residual_N = self._feedback.residual(part.index, self.own_difference(part)) if included else None
            self.live_N[where] = new_N if residual_N is None else new_N + residual_N
