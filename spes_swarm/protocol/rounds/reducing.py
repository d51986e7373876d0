"""What a reducer does with the contributions to its parts.

Shape: N elements of one part.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import median_low

import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.agreement import Agreement
from spes_swarm.protocol.averaging.clipping import MAX_ROUNDS_APART, EnergyBudget, shortened
from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, Commitment, Opening
from spes_swarm.protocol.averaging.recipe import mean
from spes_swarm.protocol.averaging.signed_result import contribution_leaf
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.rounds import round_faults
from spes_swarm.protocol.rounds.contributions import Contributions, contribution_of
from spes_swarm.protocol.rounds.error_feedback import ErrorFeedback
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.outcome import RoundInputs
from spes_swarm.protocol.rounds.plan import Claim, Contribution, Form, Part
from spes_swarm.protocol.rounds.results import Averaging, Result, Results, difference_of_full

# A contribution is next to nothing if it is shorter than this share of what the others' lengths let expect. An honest
# one of few steps with large batches is longer: steps that follow each other add up to less than their sum.
_LEAST_LENGTH = 0.1
_NOTHING_N = np.empty(0, dtype=np.float32)


@dataclass(slots=True)
class Accumulator:
    """The contributions to one part, at its reducer."""

    outstanding: set[int]  # contributors that have neither delivered nor been given up
    arrived: set[int] = field(default_factory=set)  # those whose contributions are being checked, or have been
    differences: dict[int, FloatArray] = field(default_factory=dict)  # (N,), scaled, of each that has delivered
    weights: dict[int, float] = field(default_factory=dict)
    commitments: dict[int, Commitment] = field(default_factory=dict)
    result: Result | None = None  # already known

    def add(self, contribution: Contribution, commitment: Commitment, difference_N: FloatArray) -> None:
        """Takes in a contribution."""
        member = contribution.member
        self.differences[member] = difference_N
        self.weights[member] = contribution.weight
        self.commitments[member] = commitment
        self.outstanding.discard(member)


def opposition(part: Part, members: Sequence[int], agreement: Agreement, me: int) -> dict[int, float]:
    """How far the contributions of other members to a part point against most others', as member `me` sees it.

    Empty if it cannot tell. Only the shared layers count: an expert has too few holders for most of them to agree.
    """
    if part.block != SHARED_BLOCK or me not in members:
        return {}
    found = agreement.opposition(members.index(me))
    return {} if found is None else {i: value for i, value in zip(members, found, strict=True) if i != me}


class Agreements:
    """How the members of a round agree, in the parts that one of them reduces. May be used from several threads."""

    def __init__(self, me: int) -> None:
        self._me = me
        self._lock = threading.Lock()
        self._factors: defaultdict[int, list[float]] = defaultdict(list)
        # By member, in the shared layers.
        self._opposition: defaultdict[int, list[float]] = defaultdict(list)
        self._energy: defaultdict[int, float] = defaultdict(float)
        self._elements: Counter[int] = Counter()

    def note(self, part: Part, members: Sequence[int], agreement: Agreement, full: Collection[int] = ()) -> None:
        """Notes a part with the contributions of these members.

        `full`: those of them that sent full values. These include all progress that either side has missed, with the
        opposite sign, so they say nothing about a member's work.
        """
        seen = {} if self._me in full else opposition(part, members, agreement, self._me)
        with self._lock:
            for member, factor in zip(members, agreement.factors_M.tolist(), strict=True):
                self._factors[member].append(factor)
            for member in seen.keys() - full:
                self._opposition[member].append(seen[member])
            if part.block == SHARED_BLOCK and agreement.energy_M.any():
                for member, energy in zip(members, agreement.energy_M.tolist(), strict=True):
                    if member not in full:
                        self._energy[member] += energy
                        self._elements[member] += part.size

    def opposition(self, claims: Sequence[Claim]) -> dict[int, list[float]]:
        """What `opposition` has found of other members, by part; 1 throughout for one that contributes next to nothing.

        That takes a share of the average and holds the others back, like an opposite that is clipped.
        """
        with self._lock:
            empty = self._empty(claims)
            return {i: [1.0] * len(found) if i in empty else list(found) for i, found in self._opposition.items()}

    def empty(self, claims: Sequence[Claim]) -> set[int]:
        """The members whose contributions are far shorter than most, for their tokens.

        All parts are judged together, since text in another script leaves many rows of an embedding untouched.
        """
        with self._lock:
            return self._empty(claims)

    def _empty(self, claims: Sequence[Claim]) -> set[int]:
        tokens = [claim.tokens for claim in claims]
        rms = {i: math.sqrt(energy / self._elements[i]) for i, energy in self._energy.items()}

        def expected(i: int) -> float:
            # Fewer tokens are fewer steps: while the learning rate rises, lengths grow with the square of the steps.
            return median_low([rms[j] * min(1.0, tokens[i] / tokens[j]) ** 2 for j in rms])

        return {i for i in rms if rms[i] < _LEAST_LENGTH * expected(i)}

    def deviations_left(self) -> dict[int, float]:
        """The share of each member's deviation that clipping left, averaged over the parts."""
        with self._lock:
            return {member: sum(factors) / len(factors) for member, factors in self._factors.items()}


class Reduction:
    """What one member reduces in a round: it averages each part once all its contributions have come.

    Its methods may be called from several threads. A call takes milliseconds, since it averages at most one part.

    Attributes:
        reduced: the parts that are done, in the order of completion.
        on_reduced: called when a part is done, in the thread that has averaged it.
        num_to_reduce: parts in all.
        given_up: members whose contributions are no longer awaited.
        refused: members whose contributions were refused.
        own_faults: why parts of this member's own work are not in its averages.
        agreements: how the members agree.
        payload_bytes: received.
    """

    def __init__(
        self,
        inputs: RoundInputs,
        averaging: Averaging,
        contributions: Contributions,
        results: Results,
        feedback: ErrorFeedback,
    ) -> None:
        """`contributions` are this member's; what it reduces goes into `results`."""
        plan, me = self.plan, self.me = inputs.plan, inputs.me
        self._inputs, self._averaging, self._results, self._feedback = inputs, averaging, results, feedback
        self.reduced: list[int] = []
        self.on_reduced: Callable[[], object] = lambda: None
        self.given_up: set[int] = set()
        self.refused: set[int] = set()
        self.own_faults: list[ProtocolError] = []
        self.agreements = Agreements(me)
        self.payload_bytes = 0
        self._sizes: Counter[int] = Counter()  # how many elements of each block are reduced here
        self._budgets: dict[tuple[int, int], EnergyBudget] = {}  # of contributions, by (member, block)
        self._accumulators: dict[int, Accumulator] = {}
        for part in plan.parts:
            self._sizes[part.block] += part.size if part.reducer == me else 0
            if part.reducer == me:
                self._accumulators[part.index] = Accumulator({c.member for c in plan.block_of(part).contributions})
        self.num_to_reduce = len(self._accumulators)
        self._contributions = contributions
        self._lock = threading.Lock()

    def own_parts(self) -> list[tuple[Part, Contribution]]:
        """This member's own contributions to what it reduces, in order."""
        return self._contributions.to(self.me)

    def accept_own(self, part: Part, contribution: Contribution) -> None:
        """Takes in one of these. What is wrong with it is in `own_faults`."""
        # Checked like all others: with a NaN of its own, a reducer would send out unusable results.
        with self._lock:
            if self.me not in self._outstanding(part.index):
                return
            self._accumulators[part.index].arrived.add(self.me)
        try:
            self._take(part, contribution, self._contributions.push_frame(part))
        except ProtocolError as exc:
            self.own_faults.append(exc)
        self.complete(part.index)

    def ready(self) -> list[int]:
        """Parts that no contribution is awaited for, and that are not averaged yet."""
        with self._lock:
            return [index for index, accumulator in self._accumulators.items() if not accumulator.outstanding]

    def accept(self, member: int, frame: Frame) -> None:
        """Takes in a contribution.

        Raises:
            ProtocolError: it does not match the plan, or its values are not acceptable. Nothing has changed, except
                that a wrong form, weight or value makes the part complete without this member.
        """
        with self._lock:
            accumulator = self._accumulators.get(frame.part)
            if accumulator is None or member in self.given_up:
                if 0 <= frame.part < len(self.plan.parts) and self.plan.parts[frame.part].reducer == self.me:
                    return  # it arrived too late
                raise ProtocolError("part", f"part {frame.part} is not reduced here")
            part = self.plan.parts[frame.part]
            contribution = contribution_of(self.plan, part, member)
            if contribution is None:
                raise ProtocolError("part", f"the sender does not contribute to part {frame.part}")
            if member not in accumulator.outstanding - accumulator.arrived:
                raise ProtocolError("duplicate", f"part {frame.part} arrived twice")
            accumulator.arrived.add(member)
        try:
            self._take(part, contribution, frame)
        except ProtocolError:  # after any other error, the round is to fail rather than do without the contribution
            self.refused.add(member)
            self.complete(frame.part)
            raise
        with self._lock:
            self.payload_bytes += len(frame.payload)
        self.complete(frame.part)

    def _take(self, part: Part, contribution: Contribution, frame: Frame) -> None:
        """Checks a contribution and adds it; after this, it is no longer awaited: there is no second attempt."""
        try:
            difference_N, energy, commitment = self._checked(part, contribution, frame)
            with self._lock:
                if contribution.form is Form.DELTA:
                    self._check_stated(part, contribution, energy)
                if contribution.member in self._outstanding(part.index):  # it has not been given up meanwhile
                    accumulator = self._accumulators[part.index]
                    accumulator.add(contribution, commitment, difference_N)
                    if self._is_result(part, contribution):
                        included = frozenset({contribution.member})
                        accumulator.result = Result(Form.DELTA, frame.payload, included, energy)
        finally:
            with self._lock:
                self._outstanding(part.index).discard(contribution.member)

    def _outstanding(self, index: int) -> set[int]:
        accumulator = self._accumulators.get(index)
        return set() if accumulator is None else accumulator.outstanding

    def _checked(self, part: Part, contribution: Contribution, frame: Frame) -> tuple[FloatArray, float, Commitment]:
        """The difference (N,) of a contribution, its sum of squares before it is scaled, and its signed root."""
        if frame.form != contribution.form:
            raise ProtocolError("form", f"part {frame.part} has form {frame.form}, not {contribution.form}")
        if frame.weight != contribution.weight:
            raise ProtocolError("weight", f"weight {frame.weight}, but {contribution.weight} was stated")
        bounds, codec = self._inputs.bounds, self._inputs.codec
        if contribution.form is Form.FULL:
            full_N = difference_of_full(part, frame.payload, self._inputs.reference)
            difference_N = self._shortened(contribution, full_N)
            energy = bounds.check_norm(difference_N)
        elif self._is_result(part, contribution):  # it is not averaged
            difference_N, energy = _NOTHING_N, codec.energy(frame.payload, part.size)
            bounds.check_energy(energy, part.size)
        else:
            difference_N = codec.decode(frame.payload, part.size)
            energy = bounds.check_norm(difference_N)
        leaf = contribution_leaf(part.index, frame.payload)
        signer, opening = self._inputs.group.members[contribution.member].signer, Opening.from_wire(frame.extra)
        commitment = signer.commitment(CONTRIBUTION, self._inputs.group.exchange, leaf, opening)
        if contribution.scale < 1:
            difference_N = difference_N * np.float32(contribution.scale)
        return difference_N, energy, commitment

    def _is_result(self, part: Part, contribution: Contribution) -> bool:
        """Returns True if a contribution is the mean as it is: it is the only one."""
        alone = len(self.plan.block_of(part).contributions) == 1
        return alone and contribution.scale == 1 and contribution.form is Form.DELTA

    def _shortened(self, contribution: Contribution, difference_N: FloatArray) -> FloatArray:
        """Scales down full values' difference to the base to the length that the number of rounds apart can explain.

        Its RMS was not stated, so it is measured part by part. A member cannot be further apart than the rounds since
        its last commit with this peer.
        """
        if not self._inputs.bounds.bounded or not math.isfinite(contribution.limit_rms):
            return difference_N
        peer_id = self._inputs.group.members[contribution.member].peer_id
        since = self._inputs.tracks.rounds_since(peer_id, self.plan.round)
        # The last commit with it may have been of a later round, before this peer went back to the swarm's reference.
        apart = min(since, MAX_ROUNDS_APART) if since is not None and since > 0 else MAX_ROUNDS_APART
        limit = contribution.limit_rms * (1 + apart)
        return shortened(difference_N, limit)

    def _check_stated(self, part: Part, contribution: Contribution, energy: float) -> None:
        """Refuses a difference longer than stated: the stated RMS decides how a member is scaled."""
        if not self._inputs.bounds.bounded:
            return
        sizes = self._averaging.block_sizes[part.block], self._sizes[part.block]
        budget = self._budgets.setdefault(
            (contribution.member, part.block), EnergyBudget(contribution.stated_rms, *sizes)
        )
        if not (budget.allows_part(energy, part.size) and budget.spend(energy, part.size)):
            raise ProtocolError("norm", f"part {part.index} exceeds the stated RMS of {contribution.stated_rms:.3g}")

    def give_up(self, member: int) -> int:
        """Stops waiting for a contributor; returns the number of parts that it still owed. Some may be `ready` then."""
        with self._lock:
            self.given_up.add(member)
            awaited = [a for a in self._accumulators.values() if member in a.outstanding - a.arrived]
            for accumulator in awaited:
                accumulator.outstanding.discard(member)
            return len(awaited)

    def outstanding(self) -> dict[int, list[int]]:
        """The parts that other contributors still owe to this reducer, by member."""
        owed: dict[int, list[int]] = {}
        with self._lock:
            for index, accumulator in self._accumulators.items():
                for member in accumulator.outstanding - accumulator.arrived - {self.me}:
                    owed.setdefault(member, []).append(index)
        return owed

    def complete(self, index: int) -> None:
        """Averages a part if it is ready."""
        with self._lock:
            if index not in self._accumulators or self._accumulators[index].outstanding:
                return
            accumulator = self._accumulators.pop(index)
        part = self.plan.parts[index]
        if accumulator.result is not None:
            self._note(part, list(accumulator.weights), Agreement.unbounded([1.0], part.size))
            self._results.add_reduced(part, accumulator.result, accumulator.commitments)
        elif accumulator.differences:
            codec = self._averaging.codec_of_result(part)
            mean_N = self._mean(part, accumulator)
            encoded = codec.encode(mean_N)
            decoded_N = codec.decode(encoded, part.size)
            included = frozenset(accumulator.differences)
            result = Result(Form.DELTA, encoded, included, sum_of_squares(decoded_N))
            self._results.add_reduced(part, result, accumulator.commitments)
            own = contribution_of(self.plan, part, self.me)
            several = len(self.plan.block_of(part).contributions) > 1  # a sole contributor keeps its live weights
            if several and own is not None and own.scale == 1 and self.me in accumulator.differences:
                share = own.weight / sum(accumulator.weights.values())
                own_N = accumulator.differences[self.me]
                self._feedback.note_result(index, codec, mean_N - decoded_N, own_N, share)
        elif not self.plan.block_of(part).contributions:
            # Nobody contributes to this block; members with another base still need its values.
            result = Result(Form.FULL, EXACT.encode(self._results.base(part)), frozenset())
            self._results.add_reduced(part, result, {})
        self.reduced.append(index)
        self.on_reduced()

    def _mean(self, part: Part, accumulator: Accumulator) -> FloatArray:
        """The weighted mean, with deviations from the common direction clipped; see averaging/agreement.py."""
        members = sorted(accumulator.differences)
        recipe = self._averaging.recipe(part, members)
        differences = [accumulator.differences[member] for member in members]
        mean_N, agreement = mean(differences, [s.weight for s in recipe.shares], recipe.free_rms, recipe.stretch)
        full = {member for member, share in zip(members, recipe.shares, strict=True) if share.full}
        self._note(part, members, agreement, full)
        return mean_N

    def _note(self, part: Part, members: Sequence[int], agreement: Agreement, full: Collection[int] = ()) -> None:
        if self._inputs.bounds.bounded:
            self.agreements.note(part, members, agreement, full)

    def clipped(self) -> list[tuple[int, ProtocolError]]:
        """The members whose contributions were shortened; see round_faults.clipped."""
        if not self._inputs.bounds.bounded:
            return []
        ids = [member.peer_id for member in self._inputs.group.members]
        new = {i for i, peer_id in enumerate(ids) if self._inputs.tracks.may_deviate(peer_id, self.plan.round)}
        left = self.agreements.deviations_left()
        known = {i: self._inputs.tracks.agreement(ids[i], value) for i, value in left.items() if i not in new}
        return round_faults.clipped(self.plan, left | known, new)
