"""The results of a round: how they follow from its plan, and what a member checks before it takes one in.

A reducer encodes each result once for all members, and a member that scaled it would diverge from the others. So a
result that cannot be the mean of the planned contributions, since it is too long, is dropped, and its part stays at the
old reference. All members that received the same results drop the same ones.

Shape: N elements of one part.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from spes_swarm.base.arrays import FloatArray, scratch
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.wording import plural
from spes_swarm.protocol.averaging.clipping import FREE_DEVIATION, MAX_ROUNDS_APART, EnergyBudget
from spes_swarm.protocol.averaging.commitments import RESULT, Commitment, Exchange, Opening, SigningKey, batches
from spes_swarm.protocol.averaging.recipe import Recipe, Share
from spes_swarm.protocol.averaging.signed_result import SignedResult, decode, encode, head_of
from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.consensus.codec import EXACT, Codec
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.outcome import RoundInputs
from spes_swarm.protocol.rounds.plan import BlockPlan, Contribution, Form, Part, Plan
from spes_swarm.protocol.rounds.taking_back import Return


@dataclass(frozen=True, slots=True)
class Result:
    """The encoded result of one part."""

    form: Form
    data: bytes
    included: frozenset[int]  # members whose contribution is in it
    energy: float = 0.0  # sum of squares of its difference to the base, if this peer holds the base
    signed: SignedResult | None = None  # by its reducer; None if it is not a difference, or not signed yet


def difference_of_full(part: Part, payload: bytes, reference: Reference) -> FloatArray:
    """How far full values are from a reference, which must hold no NaN or infinity for the result to have none."""
    with np.errstate(over="ignore"):  # an infinite difference fails the check of its norm
        return EXACT.decode(payload, part.size) - reference.values_N[part.start : part.start + part.size]


@dataclass(frozen=True)
class Averaging:
    """How the results of an exchange follow from its plan."""

    plan: Plan
    peer_ids: tuple[str, ...]  # of the members
    keys: tuple[bytes, ...]  # with which they sign
    codec: Codec
    result_codec: Codec  # of the results of parts with several contributions
    bounded: bool  # contributions must meet the plan's limits
    # By block, elements, and members.
    _recipes: dict[tuple[int, int, frozenset[int]], Recipe] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def block_sizes(self) -> Counter[int]:
        """Elements of each block that has parts."""
        sizes: Counter[int] = Counter()
        for part in self.plan.parts:
            sizes[part.block] += part.size
        return sizes

    def codec_of_result(self, part: Part) -> Codec:
        """The codec of a part's result.

        A part with one contribution keeps the codec of contributions: its rounding error stays with the contributor.
        """
        return self.result_codec if len(self.plan.block_of(part).contributions) > 1 else self.codec

    def most_energy(self, part: Part, contribution: Contribution) -> float:
        """The largest sum of squares that a contribution to a part may have."""
        if not self.bounded or contribution.form is not Form.DELTA:
            return math.inf
        budget = EnergyBudget(contribution.stated_rms, self.block_sizes[part.block], 0)
        return budget.most_of_part(part.size)

    def recipe(self, part: Part, included: Collection[int]) -> Recipe:
        """How the result of a part follows from the contributions of the members that it includes."""
        # The parts of a block differ only in their numbers, but for the last one, which is shorter.
        key = part.block, part.size, frozenset(included)
        if (similar := self._recipes.get(key)) is None:
            similar = self._recipes[key] = self._new_recipe(part, included)
        return similar if similar.part == part.index else replace(similar, part=part.index)

    def _new_recipe(self, part: Part, included: Collection[int]) -> Recipe:
        block_plan = self.plan.block_of(part)
        shares = [
            Share(
                self.peer_ids[c.member],
                self.keys[c.member],
                c.weight,
                c.scale,
                self.most_energy(part, c),
                full=c.form is not Form.DELTA,
            )
            for c in sorted(block_plan.contributions, key=lambda c: c.member)
            if c.member in included
        ]
        free_rms = FREE_DEVIATION * block_plan.median_rms if self.bounded else math.inf
        names = self.codec.name, self.codec_of_result(part).name
        return Recipe(part.index, part.size, *names, free_rms, block_plan.stretch, tuple(shares))

    def sign(
        self, key: SigningKey, exchange: Exchange, results: Sequence[tuple[Part, bytes, dict[int, Commitment]]]
    ) -> list[SignedResult]:
        """Signs results; each is a part, its encoded result, and the roots of those that are in it, by member."""
        signed = []
        for indices in batches([part.size for part, _, _ in results]):
            heads, roots = [], []
            for part, payload, commitments in (results[i] for i in indices):
                roots.append(tuple(commitments[member] for member in sorted(commitments)))
                heads.append(head_of(part.index, self.recipe(part, commitments).digest, payload, roots[-1]))
            openings = key.commit(RESULT, exchange, [head.leaf for head in heads])
            signed += [SignedResult(*each) for each in zip(heads, openings, roots, strict=True)]
        return signed


_PART_S = 1e-3  # about what a commit takes for one part


class Results:
    """The results of a round that one member holds: reduced here, or received.

    Attributes:
        known: by part.
        excessive: those that have arrived and were refused, by part.
        wanted: the parts of which this member needs the result.
        misquoted: parts whose results include work in this member's name that is not its own.
        committed: the reference contains them.
        applied: the parts of which the reference has the new values.
        applying: the part that is next; -1: there is none.
        payload_bytes: received.

    Methods may be called from several threads.
    """

    def __init__(self, inputs: RoundInputs, averaging: Averaging, own: Mapping[int, Commitment]) -> None:
        """`own`: the roots that this member has signed for its contributions, by part."""
        self.plan, self.me = inputs.plan, inputs.me
        self._inputs, self._averaging, self._own = inputs, averaging, own
        self.known: dict[int, Result] = {}
        self.excessive: dict[int, Result] = {}
        self.wanted = {part.index: part for part in inputs.plan.wanted(inputs.me)}
        self.misquoted: list[int] = []
        self.committed = False
        self.applying = -1  # the part that the reference is being given the new values of
        self.applied: set[int] = set()
        self.is_restored = False  # the commit that the round takes back has been taken back
        self._lock = threading.Lock()  # while parts are added, or signed
        self.payload_bytes = 0
        self._unsigned: list[tuple[Part, bytes, dict[int, Commitment]]] = []

    def add_reduced(self, part: Part, result: Result, commitments: dict[int, Commitment]) -> None:
        """Adds the result of a part that is reduced here; `commitments` are the roots of the contributions in it."""
        with self._lock:
            self.known[part.index] = result
            if commitments:
                self._unsigned.append((part, result.data, commitments))

    def is_unsigned(self, index: int) -> bool:
        """Returns True if `sign` will sign the result of a part."""
        result = self.known.get(index)
        return result is not None and result.form is Form.DELTA and bool(result.included) and result.signed is None

    def sign(self) -> None:
        """Signs the results that are not signed yet."""
        with self._lock:
            unsigned, self._unsigned = self._unsigned, []
            for signed in self._averaging.sign(self._inputs.key, self._inputs.group.exchange, unsigned):
                index = signed.head.part
                self.known[index] = replace(self.known[index], signed=signed)

    def frame(self, index: int, member: int, sent: dict[Commitment, int] | None = None) -> Frame | None:
        """The message that carries a result to a member; None if it is not held here in a usable form.

        `sent`: see signed_result.encode; None: the message stands alone.
        """
        if self.is_unsigned(index):  # otherwise those that come are signed together, later
            self.sign()
        result = self.known.get(index)
        if result is None:
            return None
        form, data = result.form, result.data
        block_plan = self.plan.block_of(self.plan.parts[index])
        if form is Form.DELTA and block_plan.result_form(member) is Form.FULL:
            if self.me not in block_plan.in_base:
                return None
            form, data = Form.FULL, self._encoded(self.plan.parts[index], result)
        if form is Form.DELTA and result.signed is not None:
            extra = encode(result.included, self.plan.num_members, result.signed, {} if sent is None else sent)
        else:
            extra = bitmap(result.included, self.plan.num_members)
        return Frame(FrameKind.DATA, form, index, 0.0, extra, data)

    def missed(self, taken_back: Return) -> bool:
        """Returns True if this peer's reference is still the one before a commit."""
        return self._inputs.reference.digest == taken_back.before

    def base(self, part: Part) -> FloatArray:
        """Values of the plan's base, which this peer holds."""
        where, taken_back = slice(part.start, part.start + part.size), self.plan.taken_back
        if taken_back is None or not self.plan.block_of(part).restored or self.is_restored or self.missed(taken_back):
            return self._inputs.reference.values_N[where]
        return self._inputs.previous.values(where, part.block, self._inputs.reference)

    def _encoded(self, part: Part, result: Result) -> bytes:
        """The values of a part after the commit, which may be under way in another thread."""
        while True:
            was_applied = part.index in self.applied
            data = EXACT.encode(self.new_values(part, result))
            if self.applying != part.index and was_applied == (part.index in self.applied):
                return data
            time.sleep(_PART_S)

    def new_values(self, part: Part, result: Result) -> FloatArray:
        """Values of a part after the commit of a result, maybe in scratch memory."""
        base_N = self._inputs.reference.values_N[part.start : part.start + part.size]
        if part.index in self.applied:
            return base_N
        if result.form is Form.FULL:
            return EXACT.decode(result.data, part.size)
        out_N = scratch("new values", part.size)
        self._averaging.codec_of_result(part).decode(result.data, part.size, out_N)
        new_N: FloatArray = np.add(base_N, out_N, out=out_N)
        return new_N

    def store(self, frame: Frame, known: list[Commitment] | None = None) -> None:
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
        if part.index in self.known:
            return
        if not included <= {c.member for c in block_plan.contributions}:
            raise ProtocolError("malformed", f"the result for part {frame.part} names members that do not contribute")
        energy, signed = 0.0, None
        if form is Form.DELTA:
            energy = self._averaging.codec_of_result(part).energy(frame.payload, part.size)
            self._inputs.bounds.check_energy(energy, part.size)
            signed = self._check_signed(part, frame.payload, included, opening, roots)
        else:  # from another base, any distance may be right
            difference_of_full(part, frame.payload, self._inputs.reference)
        with self._lock:
            if part.index not in self.known:
                self.known[part.index] = Result(form, frame.payload, included, energy, signed)
                self.payload_bytes += len(frame.payload)

    def _check_signed(
        self, part: Part, payload: bytes, included: frozenset[int], opening: Opening, roots: tuple[Commitment, ...]
    ) -> SignedResult:
        head = head_of(part.index, self._averaging.recipe(part, included).digest, payload, roots)
        self._inputs.group.members[part.reducer].signer.commitment(
            RESULT, self._inputs.group.exchange, head.leaf, opening
        )
        own = self._own.get(part.index)
        if self.me in included and roots[sorted(included).index(self.me)] != own:
            self.misquoted.append(part.index)
        return SignedResult(head, opening, roots)

    def arrived(self) -> list[tuple[Part, Result]]:
        """Wanted parts that have a result, with it."""
        with self._lock:
            return [(part, self.known[index]) for index, part in self.wanted.items() if index in self.known]

    @property
    def contributors(self) -> set[int]:
        """The members whose work is in a result that has arrived."""
        with self._lock:
            return set[int]().union(*(result.included for result in self.known.values()))

    def missing(self) -> list[int]:
        """Wanted parts whose results have not arrived."""
        return [index for index in self.wanted if index not in self.known]

    def refuse_excessive(self) -> list[tuple[int, ProtocolError]]:
        """Drops results longer than their contributions can explain, as if missing; returns (reducer, fault) pairs."""
        if not self._inputs.bounds.bounded:
            return []
        with self._lock:
            known = {index: (result.included, result.energy) for index, result in self.known.items()}
        errors = []
        for excess in excessive_results(self.plan, self.me, known):
            with self._lock:
                self.excessive.update({index: self.known.pop(index) for index in excess.parts})
            results = plural(len(excess.parts), "result")
            what = f"{results} of block {excess.block} longer than the contributions can explain"
            errors.append((excess.reducer, ProtocolError("norm", what)))
        return errors


@dataclass(frozen=True, slots=True)
class Excess:
    """Parts of one block for which a reducer sent results that are too long."""

    reducer: int
    block: int
    parts: tuple[int, ...]


def mean_bound_rms(block_plan: BlockPlan, included: frozenset[int]) -> float:
    """The largest RMS over the whole block that the mean of these members' contributions can have."""
    entries = [
        (c.weight, c.limit_rms * (1 + MAX_ROUNDS_APART) if c.form is Form.FULL else c.bound_rms)
        for c in block_plan.contributions
        if c.member in included
    ]
    total = sum(weight for weight, _ in entries)
    return sum(weight / total * rms for weight, rms in entries) if entries else math.inf


def excessive_results(plan: Plan, me: int, results: Mapping[int, tuple[frozenset[int], float]]) -> list[Excess]:
    """Finds the results of other reducers that the member `me` must drop.

    A result is given as the included members and the sum of squares of its difference to the plan's base. Blocks whose
    base this member does not hold are skipped: it cannot compute the difference.
    """
    of_reducer: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for part in plan.parts:
        block_plan = plan.block_of(part)
        if part.reducer != me and me in block_plan.in_base and block_plan.contributions:
            of_reducer[part.reducer, part.block].append(part.index)
    block_elements: defaultdict[int, int] = defaultdict(int)
    for part in plan.parts:
        block_elements[part.block] += part.size
    excess: list[Excess] = []
    for (reducer, block), indices in of_reducer.items():
        elements = sum(plan.parts[index].size for index in indices)
        budgets: dict[frozenset[int], EnergyBudget] = {}
        dropped = []
        for index in indices:
            if index not in results:
                continue
            included, energy = results[index]
            if included not in budgets:
                bound_rms = mean_bound_rms(plan.blocks[block], included)
                budgets[included] = EnergyBudget(bound_rms, block_elements[block], elements)
            budget = budgets[included]
            size = plan.parts[index].size
            if not (budget.allows_part(energy, size) and budget.spend(energy, size)):
                dropped.append(index)
        if dropped:
            excess.append(Excess(reducer, block, tuple(dropped)))
    return excess
