"""One round as one member sees it: what it sends, reduces, receives and commits, without any I/O.

`Exchange` moves the bytes. The reference changes only in `RoundState.commit`.

Shapes: N elements of one part.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.wording import plural
from spes_swarm.protocol.averaging import clipping
from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, RESULT, Commitment, Opening, SigningKey
from spes_swarm.protocol.averaging.recipe import mean
from spes_swarm.protocol.averaging.signed_result import SignedResult, contribution_leaf, decode, encode, head_of
from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.consensus.codec import EXACT, Codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.contributions import Contributions
from spes_swarm.protocol.rounds.error_feedback import ErrorFeedback
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.outcome import Bounds, CommitReport, Result
from spes_swarm.protocol.rounds.plan import Contribution, Form, Part, Plan
from spes_swarm.protocol.rounds.reducing import Accumulator, Agreements, Averaging
from spes_swarm.protocol.rounds.result_bounds import excessive_results
from spes_swarm.protocol.rounds.statement import Group
from spes_swarm.protocol.rounds.taking_back import Previous, Return
from spes_swarm.protocol.rounds.track_record import TrackRecords


@dataclass(eq=False)
class RoundState:
    """One round as one member sees it."""

    group: Group
    plan: Plan
    me: int
    reference: Reference
    live_N: FloatArray  # this member's live weights: the shared and held blocks, which alone are read and changed
    codec: Codec
    bounds: Bounds
    key: SigningKey
    tracks: TrackRecords = field(default_factory=TrackRecords)  # this peer's record of the others
    result_codec: Codec | None = None  # of the results of parts with several contributions; None: `codec`
    previous: Previous = field(default_factory=Previous)  # what this peer keeps to take this commit back, or the last

    def __post_init__(self) -> None:
        plan, me = self.plan, self.me
        self.results: dict[int, Result] = {}
        self.excessive: dict[int, Result] = {}  # results that have arrived and were refused, by part
        self.reduced: list[int] = []  # parts reduced here, in the order of completion
        self.on_reduced: Callable[[], None] = lambda: None  # called when a part has been reduced here
        self.ended: set[int] = set()  # reducers that have ended their streams in order
        self.finished = False  # no more results will arrive from reducers
        self.committed = False
        self.unreliable: set[int] = set()  # members that have not delivered all the results that they were asked for
        reduced = [plan.block_of(part) for part in plan.parts if part.reducer == me]
        self.unserved = {i for i in range(plan.num_members) if i != me and any(b.receives(i) for b in reduced)}
        self.payload_bytes_sent = self.payload_bytes_received = 0
        self.wanted = {part.index: part for part in plan.wanted(me)}
        self.misquoted: list[int] = []  # parts whose results include work in this member's name that is not its own
        self._exchange = self.group.exchange
        ids, keys = zip(*((member.peer_id, member.signer.key) for member in self.group.members), strict=True)
        self.averaging = Averaging(plan, ids, keys, self.codec, self.result_codec or self.codec, self.bounds.bounded)
        self.contributions = Contributions(plan, me, self.codec, self.key, self._exchange)
        self._ready: dict[int, dict[int, Frame]] = {}  # of the batch under way, by reducer and part
        self._unsigned: list[tuple[Part, bytes, dict[int, Commitment]]] = []  # results
        self._reduced_sizes: Counter[int] = Counter()  # how many elements of each block are reduced here
        for part in plan.parts:
            self._reduced_sizes[part.block] += part.size if part.reducer == me else 0
        self._budgets: dict[tuple[int, int], clipping.EnergyBudget] = {}  # of contributions, by (member, block)
        self.agreements = Agreements(self.me)
        self._feedback = ErrorFeedback()
        self._accumulators: dict[int, Accumulator] = {}
        for part in plan.parts:
            if part.reducer == me:
                self._accumulators[part.index] = Accumulator({c.member for c in plan.block_of(part).contributions})
        self.num_to_reduce = len(self._accumulators)
        self.given_up: set[int] = set()  # members whose contributions are no longer awaited
        self.refused: set[int] = set()  # members whose contributions were refused
        self.own_faults: list[ProtocolError] = []  # why parts of this member's own work are not in its averages
        for part, contribution in self.contributions.to(me):
            # Checked like all others: with a NaN of its own, a reducer would send out unusable results.
            try:
                self._check_norm(self.own_difference(part))
                self._take(part, contribution, self.push_frame(part))
            except ProtocolError as exc:
                self._accumulators[part.index].outstanding.discard(me)
                self.own_faults.append(exc)
        for index in list(self._accumulators):
            self._complete_if_ready(index)

    def served(self, member: int) -> None:
        """Notes that a member has been sent all results that it can get here, or is gone."""
        self.unserved.discard(member)

    # What this member sends.

    def own_difference(self, part: Part) -> FloatArray:
        """This member's difference to its own reference."""
        live_N, base_N = self._values(part)
        return live_N - base_N

    def push_frame(self, part: Part) -> Frame:
        """The message that carries this member's contribution to a part."""
        frames = self._ready.get(part.reducer, {})
        if part.index not in frames:
            frames = self._ready[part.reducer] = self.contributions.batch(part, self._values)
        frame = frames.pop(part.index)
        own = self._contribution(part, self.me)
        if own is not None and own.form is Form.DELTA and own.scale == 1:
            self._feedback.note_sent(part.index, self.codec, frame.payload)
        return frame

    def _values(self, part: Part) -> tuple[FloatArray, FloatArray]:
        where = slice(part.start, part.start + part.size)
        return self.live_N[where], self.reference.values_N[where]

    # What the reducer does.

    def _contribution(self, part: Part, member: int) -> Contribution | None:
        return next((c for c in self.plan.block_of(part).contributions if c.member == member), None)

    def accept(self, member: int, frame: Frame) -> None:
        """Takes in a contribution.

        Raises:
            ProtocolError: it does not match the plan, or its values are not acceptable. Nothing has changed, except
                that a wrong form, weight or value makes the part complete without this member.
        """
        accumulator = self._accumulators.get(frame.part)
        if accumulator is None or member in self.given_up:
            if 0 <= frame.part < len(self.plan.parts) and self.plan.parts[frame.part].reducer == self.me:
                return  # it arrived too late
            raise ProtocolError("part", f"part {frame.part} is not reduced here")
        part = self.plan.parts[frame.part]
        contribution = self._contribution(part, member)
        if contribution is None:
            raise ProtocolError("part", f"the sender does not contribute to part {frame.part}")
        if member not in accumulator.outstanding:
            raise ProtocolError("duplicate", f"part {frame.part} arrived twice")
        try:
            self._take(part, contribution, frame)
        except ProtocolError:
            # The member has no second attempt: the part completes without it.
            self.refused.add(member)
            accumulator.outstanding.discard(member)
            self._complete_if_ready(frame.part)
            raise
        self.payload_bytes_received += len(frame.payload)
        self._complete_if_ready(frame.part)

    def _take(self, part: Part, contribution: Contribution, frame: Frame) -> None:
        if frame.form != contribution.form:
            raise ProtocolError("form", f"part {frame.part} has form {frame.form}, not {contribution.form}")
        if frame.weight != contribution.weight:
            raise ProtocolError("weight", f"weight {frame.weight}, but {contribution.weight} was stated")
        if contribution.form is Form.FULL:
            difference_N = self._shortened(contribution, self._difference_of_full(part, frame.payload))
        else:
            difference_N = self.codec.decode(frame.payload, part.size)
        energy = self._check_norm(difference_N)
        leaf = contribution_leaf(part.index, frame.payload)
        signer, opening = self.group.members[contribution.member].signer, Opening.from_wire(frame.extra)
        commitment = signer.commitment(CONTRIBUTION, self._exchange, leaf, opening)
        if contribution.form is Form.DELTA:
            self._check_stated(part, contribution, energy)
        if contribution.scale < 1:
            difference_N = difference_N * np.float32(contribution.scale)
        self._accumulators[part.index].add(contribution, commitment, difference_N)

    def _shortened(self, contribution: Contribution, difference_N: FloatArray) -> FloatArray:
        """Scales down full values' difference to the base to the length that the number of rounds apart can explain.

        Its RMS was not stated, so it is measured part by part. A member cannot be further apart than the rounds since
        its last commit with this peer.
        """
        if not self.bounds.bounded or not math.isfinite(contribution.limit_rms):
            return difference_N
        peer_id = self.group.members[contribution.member].peer_id
        since = self.tracks.rounds_since(peer_id, self.plan.round)
        # The last commit with it may have been of a later round, before this peer went back to the swarm's reference.
        apart = min(since, clipping.MAX_ROUNDS_APART) if since is not None and since > 0 else clipping.MAX_ROUNDS_APART
        limit = contribution.limit_rms * (1 + apart)
        return clipping.shortened(difference_N, limit)

    def _check_stated(self, part: Part, contribution: Contribution, energy: float) -> None:
        """Refuses a difference longer than stated: the stated RMS decides how a member is scaled."""
        if not self.bounds.bounded:
            return
        sizes = self.averaging.block_sizes[part.block], self._reduced_sizes[part.block]
        budget = self._budgets.setdefault(
            (contribution.member, part.block), clipping.EnergyBudget(contribution.stated_rms, *sizes)
        )
        if not (budget.allows_part(energy, part.size) and budget.spend(energy, part.size)):
            raise ProtocolError("norm", f"part {part.index} exceeds the stated RMS of {contribution.stated_rms:.3g}")

    def _difference_of_full(self, part: Part, payload: bytes) -> FloatArray:
        base_N = self.reference.values_N[part.start : part.start + part.size]
        with np.errstate(over="ignore"):  # an infinite difference fails _check_norm
            return EXACT.decode(payload, part.size) - base_N

    def _check_norm(self, difference_N: FloatArray) -> float:
        energy = sum_of_squares(difference_N)  # which is returned
        rms = math.sqrt(energy / len(difference_N))
        if not rms <= self.bounds.max_update_rms:
            raise ProtocolError("norm", f"a difference of RMS {rms:.3g} exceeds {self.bounds.max_update_rms:.3g}")
        return energy

    def give_up(self, member: int) -> int:
        """Stops waiting for a contributor; returns the number of parts that it still owed."""
        self.given_up.add(member)
        awaited = [i for i, a in self._accumulators.items() if member in a.outstanding]
        for index in awaited:
            self._accumulators[index].outstanding.discard(member)
            self._complete_if_ready(index)
        return len(awaited)

    def outstanding(self) -> dict[int, list[int]]:
        """The parts that contributors still owe to this reducer, by member."""
        owed: dict[int, list[int]] = {}
        for index, accumulator in self._accumulators.items():
            for member in accumulator.outstanding:
                owed.setdefault(member, []).append(index)
        return owed

    def _complete_if_ready(self, index: int) -> None:
        accumulator = self._accumulators[index]
        if accumulator.outstanding:
            return
        del self._accumulators[index]
        part = self.plan.parts[index]
        if accumulator.differences:
            codec = self.averaging.codec_of_result(part)
            mean_N = self._mean(part, accumulator)
            encoded = codec.encode(mean_N)
            decoded_N = codec.decode(encoded, part.size)
            self.results[index] = Result(
                Form.DELTA, encoded, frozenset(accumulator.differences), sum_of_squares(decoded_N)
            )
            self._unsigned.append((part, encoded, accumulator.commitments))
            own = self._contribution(part, self.me)
            several = len(self.plan.block_of(part).contributions) > 1  # a sole contributor keeps its live weights
            if several and own is not None and own.scale == 1 and self.me in accumulator.differences:
                share = own.weight / sum(accumulator.weights.values())
                own_N = accumulator.differences[self.me]
                self._feedback.note_result(index, codec, mean_N - decoded_N, own_N, share)
        elif not self.plan.block_of(part).contributions:
            # Nobody contributes to this block; members with another base still need its values.
            self.results[index] = Result(Form.FULL, EXACT.encode(self._base(part)), frozenset())
        self.reduced.append(index)
        self.on_reduced()

    def _mean(self, part: Part, accumulator: Accumulator) -> FloatArray:
        """The weighted mean, with deviations from the common direction clipped; see averaging/agreement.py."""
        members = sorted(accumulator.differences)
        recipe = self.averaging.recipe(part, members)
        differences = [accumulator.differences[member] for member in members]
        mean_N, agreement = mean(differences, [s.weight for s in recipe.shares], recipe.free_rms, recipe.stretch)
        if self.bounds.bounded:
            full = {member for member, share in zip(members, recipe.shares, strict=True) if share.full}
            self.agreements.note(part, members, agreement, full)
        return mean_N

    def _sign_results(self) -> None:
        """Signs the results that are not signed yet."""
        unsigned, self._unsigned = self._unsigned, []
        for signed in self.averaging.sign(self.key, self._exchange, unsigned):
            index = signed.head.part
            self.results[index] = dataclasses.replace(self.results[index], signed=signed)

    def clipped(self) -> list[tuple[int, ProtocolError]]:
        """The members whose contributions were shortened; see round_faults.clipped."""
        if not self.bounds.bounded:
            return []
        ids = [member.peer_id for member in self.group.members]
        new = {i for i, peer_id in enumerate(ids) if self.tracks.may_deviate(peer_id, self.plan.round)}
        left = self.agreements.deviations_left()
        known = {i: self.tracks.agreement(ids[i], value) for i, value in left.items() if i not in new}
        return round_faults.clipped(self.plan, left | known, new)

    def record_commit(self, tracks: TrackRecords) -> None:
        """Adds this round's commit to the track records of its members."""
        seen = set[int]().union(*(result.included for result in self.results.values()))
        left = self.agreements.deviations_left()
        aside = {member for member in left if left[member] < round_faults.MATERIAL_DEVIATION}
        honoured = {
            i for i, claim in enumerate(self.plan.claims) if i in seen and claim.excess <= 1 and not claim.absurd
        }
        ids = [member.peer_id for member in self.group.members]
        in_order = {ids[i] for i in honoured - aside - self.refused}
        for i in left:
            if not tracks.is_new(ids[i]):
                tracks.note_agreement(ids[i], left[i])
        for i, found in self.agreements.opposition(self.plan.claims).items():
            tracks.conduct.note_opposition(ids[i], self.plan.round, found)
        ratios = [(ids[i], claim.tokens_ratio) for i, claim in enumerate(self.plan.claims) if i != self.me]
        deliveries = {"delivered": {ids[i] for i in seen - {self.me}}, "failed": self.failed_reducers()}
        stalled = any(self.wanted[index].block == SHARED_BLOCK for index in self.missing())
        tracks.committed(self.plan.round, ratios, in_order, self.plan.median_rms, stalled=stalled, **deliveries)

    def failed_reducers(self) -> set[str]:
        """The members that have not delivered parts that they reduce, or whose results were refused."""
        lacking = [self.wanted[index] for index in self.missing()]
        failed = round_faults.failed_reducers(self.plan, self.me, lacking, self.ended, self.excessive)
        return {self.group.members[i].peer_id for i in failed}

    # Results.

    def result_frame(self, index: int, member: int, sent: dict[Commitment, int] | None = None) -> Frame | None:
        """The message that carries a result to a member; None if it is not held here in a usable form.

        `sent`: see signed_result.encode; None: the message stands alone.
        """
        self._sign_results()
        result = self.results.get(index)
        if result is None:
            return None
        form, data = result.form, result.data
        block_plan = self.plan.block_of(self.plan.parts[index])
        if form is Form.DELTA and block_plan.result_form(member) is Form.FULL:
            if self.me not in block_plan.in_base:
                return None
            form, data = Form.FULL, EXACT.encode(self._new_values(self.plan.parts[index], result))
        if form is Form.DELTA and result.signed is not None:
            extra = encode(result.included, self.plan.num_members, result.signed, {} if sent is None else sent)
        else:
            extra = bitmap(result.included, self.plan.num_members)
        return Frame(FrameKind.DATA, form, index, 0.0, extra, data)

    def _missed(self, taken_back: Return) -> bool:
        """Returns True if this peer's reference is still the one before a commit."""
        return self.reference.digest == taken_back.before

    def _base(self, part: Part) -> FloatArray:
        """Values of the plan's base, which this peer holds."""
        where, taken_back = slice(part.start, part.start + part.size), self.plan.taken_back
        if taken_back is None or not self.plan.block_of(part).restored or self.committed or self._missed(taken_back):
            return self.reference.values_N[where]
        return self.previous.values(where, part.block, self.reference)

    def _new_values(self, part: Part, result: Result) -> FloatArray:
        base_N = self.reference.values_N[part.start : part.start + part.size]
        if self.committed:
            return base_N
        if result.form is Form.FULL:
            return EXACT.decode(result.data, part.size)
        return base_N + self.averaging.codec_of_result(part).decode(result.data, part.size)

    def store_result(self, frame: Frame, known: list[Commitment] | None = None) -> None:
        """Takes in a result; `known`: see signed_result.decode.

        Raises:
            ProtocolError: it does not match the plan, its values are not acceptable, or its reducer has not signed it;
                nothing has changed.
        """
        part = self.wanted.get(frame.part)
        if part is None:
            raise ProtocolError("part", f"result for part {frame.part}, which this peer does not need")
        block_plan, num_members = self.plan.block_of(part), self.plan.num_members
        form = block_plan.result_form(self.me)
        if frame.form != form:
            raise ProtocolError("form", f"result for part {frame.part} has form {frame.form}, not {form}")
        if form is Form.DELTA:
            included, opening, roots = decode(frame.extra, num_members, [] if known is None else known)
        else:
            included = frozenset(members_of(frame.extra, num_members))
        if part.index in self.results:
            return
        if not included <= {c.member for c in block_plan.contributions}:
            raise ProtocolError("malformed", f"the result for part {frame.part} names members that do not contribute")
        energy, signed = 0.0, None
        if form is Form.DELTA:
            difference_N = self.averaging.codec_of_result(part).decode(frame.payload, part.size)
            energy = self._check_norm(difference_N)
            signed = self._check_signed(part, frame.payload, included, opening, roots)
        else:  # from another base, any distance may be right
            self._difference_of_full(part, frame.payload)
        self.results[part.index] = Result(form, frame.payload, included, energy, signed)
        self.payload_bytes_received += len(frame.payload)

    def _check_signed(
        self, part: Part, payload: bytes, included: frozenset[int], opening: Opening, roots: tuple[Commitment, ...]
    ) -> SignedResult:
        head = head_of(part.index, self.averaging.recipe(part, included).digest, payload, roots)
        self.group.members[part.reducer].signer.commitment(RESULT, self._exchange, head.leaf, opening)
        own = self.contributions.commitments.get(part.index)
        if self.me in included and roots[sorted(included).index(self.me)] != own:
            self.misquoted.append(part.index)
        return SignedResult(head, opening, roots)

    def missing(self) -> list[int]:
        """Wanted parts whose results have not arrived."""
        return [index for index in self.wanted if index not in self.results]

    # Commit.

    def refuse_excessive(self) -> list[tuple[int, ProtocolError]]:
        """Drops results longer than their contributions can explain, as if missing; returns (reducer, fault) pairs."""
        if not self.bounds.bounded:
            return []
        known = {index: (result.included, result.energy) for index, result in self.results.items()}
        errors = []
        for excess in excessive_results(self.plan, self.me, known):
            for index in excess.parts:
                self.excessive[index] = self.results.pop(index)
            results = plural(len(excess.parts), "result")
            what = f"{results} of block {excess.block} longer than the contributions can explain"
            errors.append((excess.reducer, ProtocolError("norm", what)))
        return errors

    def commit(self) -> CommitReport:
        """Applies the outcome of the round to the reference, and to `live_N` as the new live weights."""
        held = self.group.members[self.me].statement.held
        trained = {block.index for block in self.reference.layout.trained_blocks(held)}
        changed = {part.block for part in self.wanted.values() if part.index in self.results}
        incomplete = {self.wanted[index].block for index in self.missing()}
        taken_back = self.plan.taken_back
        keeps_work = taken_back is not None and self._missed(taken_back)
        if taken_back is None:
            # What this member contributed is shown in audits, even if no result of a block has arrived.
            own = {i for i, b in self.plan.blocks.items() if any(c.member == self.me for c in b.contributions)}
            self.previous.keep(self.reference, self.live_N, changed | own, trained)
        elif self.me in taken_back.keepers:
            changed |= taken_back.blocks  # of one that has missed the commit, only the versions
            if not keeps_work:
                self.previous.restore(taken_back.blocks, self.reference, self.live_N, trained)
        arrived = [(part, self.results[index]) for index, part in self.wanted.items() if index in self.results]
        carried = self._carried(arrived)
        for part, result in arrived:
            new_N = self._new_values(part, result)
            if part.block in trained:
                self._update_target(part, result, new_N, carried)
            self.reference.values_N[part.start : part.start + part.size] = new_N
        self.committed = True
        self._feedback = ErrorFeedback()  # a round is kept until the next one; its rounding errors need not be
        self.reference.finish(self.plan.round, [(index, self._version(index, incomplete)) for index in sorted(changed)])
        if taken_back is None:
            self.previous.committed(self.reference)
        covered = {e for i, m in enumerate(self.group.members) if i not in self.plan.ignored for e in m.statement.held}
        return CommitReport(
            round=self.plan.round,
            members=tuple(m.peer_id for m in self.group.members),
            parts_total=len(self.wanted),
            parts_missing=len(self.missing()),
            changed_blocks=tuple(sorted(changed)),
            experts_covered=len(covered),
            deferred_experts=self.plan.deferred,
            unites=self.plan.unites,
            taken_back=None if taken_back is None else taken_back.round,
            keeps_work=keeps_work,
        )

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
            own = self._contribution(part, self.me)
            if own is not None and self.me not in result.included:
                most = self.averaging.block_sizes[part.block] * (clipping.CARRIED_SHARE * own.limit_rms) ** 2
                used[part.block] += sum_of_squares(self.own_difference(part)) / max(most, 1e-300)
        return {block: 1 / math.sqrt(max(1.0, share)) for block, share in used.items()}

    def _update_target(self, part: Part, result: Result, new_N: FloatArray, carried: dict[int, float]) -> None:
        """Sets the live weights that a trained part must have after the commit."""
        where = slice(part.start, part.start + part.size)
        block_plan, own = self.plan.block_of(part), self._contribution(part, self.me)
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
