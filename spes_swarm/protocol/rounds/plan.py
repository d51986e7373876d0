"""The plan of a round: who sends what to whom, as a pure function of the members' statements.

Every member computes the same plan on its own, so nothing is negotiated. Blocks are cut into parts; each part has one
reducer, which gathers the contributors' differences, averages them and sends out the result.

The base that a block's differences refer to is decided by plurality: the (version, digest) that most members report. A
member that reports another one is sent full values. What it contributes depends on its lineage (see lineage.py). A late
member has a base that the swarm has moved on from: its difference to that old base is its work. A member from the other
side of a partition has continued training with others: it contributes full values, so that the work of its side since
the split counts with the weight of its tokens.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from statistics import median_low

from spes_swarm.protocol.averaging.clipping import (
    MAX_STRETCH,
    USUAL_SHARE,
    Stated,
    believed_tokens,
    limits,
    median_rms,
    scale,
    usual_rms,
)
from spes_swarm.protocol.averaging.weights import Weights, within_share_together, within_shares
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.rounds.statement import Group, Member
from spes_swarm.protocol.rounds.taking_back import Return, choose_return
from spes_swarm.protocol.rounds.vouchers import (
    MAX_EARNED_RATIO,
    granted_ratios,
    ignored,
    may_reduce,
    measured_rates,
    newcomers,
    resting,
    without_duty,
)

# A part has its frame, its signature's path and its recipe: about 1 ms of CPU at each receiver, however small it is. So
# blocks are not cut into smaller parts than this,
MIN_PART_ELEMENTS = 1 << 13
# nor into more of them than this per possible reducer. With 4, what a member reduces of a large block follows its
# upload rate to within a quarter of an equal share.
PARTS_PER_MEMBER = 4
# No member reduces more than this many times an equal share, however fast it is, if another one can; and one whose
# upload rate the others have not measured, no more than an equal share.
MAX_REDUCING_SHARE = 2.0
# A claim above this many times the median tokens is absurd; honest ones reach it at most in a round called early.
_ABSURD_RATIO = 1e4


class Form(IntEnum):
    """What the values of a message are."""

    DELTA = 0  # a difference to the sender's base (push) or to the plan's base (result), in the run's codec
    FULL = 1  # the values themselves, in fp32


@dataclass(frozen=True, slots=True)
class Contribution:
    """One member's contribution to a block's average."""

    member: int
    weight: float
    form: Form
    # RMS of the difference over the whole block: as stated, and the largest that counts in full; see clipping.py. The
    # stated RMS is that of the difference to the member's own base: it does not apply to full values.
    stated_rms: float = math.inf
    limit_rms: float = math.inf

    @property
    def scale(self) -> float:
        """The factor by which the reducer multiplies a difference."""
        return scale(self.stated_rms, self.limit_rms) if self.form is Form.DELTA else 1.0

    @property
    def bound_rms(self) -> float:
        """Upper bound on the RMS of the difference that goes into the average."""
        return min(self.stated_rms, self.limit_rms) if self.form is Form.DELTA else self.limit_rms


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """The plan for one block."""

    block: int
    base_version: int
    in_base: frozenset[int]  # members that hold the base
    contributions: tuple[Contribution, ...]
    median_rms: float = 0.0  # lower median of the differences' bound_rms
    usual_rms: float = 0.0  # see clipping.usual_rms
    restored: bool = False  # to its values before the last commit: the base, which only `in_base` holds

    @property
    def stretch(self) -> float:
        """Ratio of the usual length of contributions to that in this round, at least 1; see clipping.USUAL_SHARE."""
        stretch = USUAL_SHARE * self.usual_rms / self.median_rms if self.median_rms > 0 else 1.0
        return min(max(1.0, stretch), MAX_STRETCH)

    def receives(self, member: int) -> bool:
        """Returns True if a member wants this block's results: the block changes, or the member has another base."""
        return bool(self.contributions) or member not in self.in_base

    def result_form(self, member: int) -> Form:
        """The form in which a member gets the result."""
        return Form.DELTA if member in self.in_base else Form.FULL

    def new_version(self, round_number: int) -> int:
        """Version after the commit."""
        return round_number if self.contributions or self.restored else self.base_version


@dataclass(frozen=True, slots=True)
class Part:
    """A range of one block with its reducer."""

    index: int
    block: int
    start: int  # first element in the flat vector
    size: int
    reducer: int  # member index


@dataclass(frozen=True, slots=True)
class Claim:
    """How a member's statement compares with the others'."""

    tokens: float  # that it is believed to have trained on
    tokens_ratio: float  # claimed tokens over the lower median
    absurd: bool  # more tokens than any member can have trained on
    excess: float  # its longest difference over its limit, if the tokens were true; at most 1: within bounds
    clipped: tuple[int, float] | None  # the block where it is scaled down most, and the factor; None if nowhere


@dataclass(frozen=True)
class Plan:
    """The plan for all blocks of a round."""

    round: int
    num_members: int
    blocks: dict[int, BlockPlan]  # only the blocks that have parts
    parts: tuple[Part, ...]
    claims: tuple[Claim, ...] = ()  # one per member
    # See clipping.median_rms. None for the experts: this round does not synchronise them.
    median_rms: tuple[float, float | None] = (0.0, 0.0)
    # Experts that this round does not synchronise: their holders' work since the last synchronisation is not in the
    # reference, and stays in their live weights.
    deferred: frozenset[int] = frozenset()
    trusted: frozenset[int] = frozenset()  # members that may reduce; see vouchers.may_reduce
    without_duty: frozenset[int] = frozenset()  # members that most doubt; see vouchers.without_duty
    ignored: frozenset[int] = frozenset()  # of them, those whose work does not count; see vouchers.ignored
    pace: float = 0.0  # seconds that a member usually takes for 10^6 values that it sends; 0 if unknown
    taken_back: Return | None = None  # this round takes back a commit, and nobody contributes

    def block_of(self, part: Part) -> BlockPlan:
        """The plan of the part's block."""
        return self.blocks[part.block]

    def contributed(self, member: int, reducer: int) -> list[tuple[Part, Contribution]]:
        """The parts with a reducer to which a member contributes, in order."""
        return [
            (part, contribution)
            for part in self.parts
            if part.reducer == reducer
            for contribution in self.block_of(part).contributions
            if contribution.member == member
        ]

    def pushes(self, sender: int, reducer: int) -> list[Part]:
        """The parts that `sender` pushes to `reducer`, in order."""
        return [part for part, _ in self.contributed(sender, reducer)] if sender != reducer else []

    @property
    def unites(self) -> bool:
        """True if at least a quarter of the trusted members contribute full values: they have trained apart."""
        apart = {c.member for block in self.blocks.values() for c in block.contributions if c.form is Form.FULL}
        return 4 * len(apart & self.trusted) >= max(len(self.trusted), 1)

    @cached_property
    def sent_elements(self) -> Counter[int]:
        """By member: number of values that it sends to other members that reduce them."""
        sizes: Counter[int] = Counter()
        own: Counter[tuple[int, int]] = Counter()
        for part in self.parts:
            sizes[part.block] += part.size
            own[part.block, part.reducer] += part.size
        sent: Counter[int] = Counter()
        for index, block in self.blocks.items():
            for contribution in block.contributions:
                sent[contribution.member] += sizes[index] - own[index, contribution.member]
        return sent

    @property
    def usual_s(self) -> float:
        """How long a member usually takes to send its contributions in such a round, in seconds; 0 if unknown."""
        return self.pace * 1e-6 * max(self.sent_elements.values(), default=0)

    def wanted(self, member: int) -> list[Part]:
        """The parts whose results a member wants."""
        return [part for part in self.parts if self.block_of(part).receives(member)]


def make_plan(
    group: Group,
    layout: Layout,
    max_part_elements: int,
    *,
    clip: float = 0.0,
    warmup_rounds: int = 0,
    most_of_newcomers: float = 1.0,
    experts: bool = True,
    may_return: bool = True,
) -> Plan:
    """Derives the plan from the members' statements.

    Args:
        group: the members of the round.
        layout: of the model.
        max_part_elements: of the run's configuration.
        clip: bound on contributions, see `RoundConfig.clip`; 0 for none.
        warmup_rounds: rounds in which the learning rate rises, so differences grow with the square of the steps.
        most_of_newcomers: the largest share of an average that new identities have together.
        experts: whether all experts take part. Otherwise only those do whose work would be lost: that a member holds
            that is leaving or has another base. The other holders of such an expert contribute, too.
        may_return: whether it may take back the last commit.
    """
    members = group.members
    lineages = [member.statement.lineage for member in members]
    bounds = _Bounds(members, clip, 2 if group.round <= warmup_rounds else 1, most_of_newcomers)
    deferred: set[int] = set()
    reducers = _Reducers(members)
    taken_back = choose_return(members, reducers.trusted) if may_return else None
    if taken_back is None:
        block_plans = [
            _plan_block(members, lineages, block.index, bounds, None if experts or block.expert is None else deferred)
            for block in layout.blocks
        ]
    else:
        block_plans = [_plan_return(members, block.index, taken_back) for block in layout.blocks]
        deferred = set(range(layout.num_experts))
    planned = [block_plan for block_plan in block_plans if block_plan is not None]
    parts = _cut(planned, layout, reducers, max_part_elements)
    with_parts = {part.block for part in parts}
    blocks = {block_plan.block: block_plan for block_plan in planned if block_plan.block in with_parts}
    made: defaultdict[int, list[tuple[int, Contribution]]] = defaultdict(list)
    for index, block_plan in blocks.items():
        for contribution in block_plan.contributions:
            made[contribution.member].append((index, contribution))
    claims = tuple(bounds.claim(i, made[i], blocks.get(SHARED_BLOCK)) for i in range(len(members)))
    shared_rms, expert_rms = median_rms(bounds.stated)
    lengths = shared_rms, expert_rms if experts else None
    pace = _usual_pace([members[i] for i in reducers.trusted])
    duties = reducers.trusted, reducers.without_duty, frozenset(bounds.ignored), pace, taken_back
    return Plan(group.round, len(members), blocks, parts, claims, lengths, frozenset(deferred), *duties)


def _cut(planned: Sequence[BlockPlan], layout: Layout, reducers: _Reducers, max_part_elements: int) -> tuple[Part, ...]:
    """Cuts the blocks into parts and chooses their reducers; a block that nobody can reduce has no parts."""
    pieces: dict[int, list[tuple[int, int, int]]] = {}
    reducers.expect(sum(layout.blocks[block_plan.block].size for block_plan in planned))
    # Experts first: their reducers are fixed (their holders); the shared parts then level the loads.
    for block_plan in sorted(planned, key=lambda block_plan: block_plan.block == SHARED_BLOCK):
        block = layout.blocks[block_plan.block]
        candidates = reducers.candidates(block_plan, prefer_contributors=block.expert is not None)
        if not candidates:
            continue
        pieces[block.index] = []
        part_elements = _part_elements(block.size, len(candidates), max_part_elements)
        for start in range(block.start, block.stop, part_elements):
            size = min(part_elements, block.stop - start)
            pieces[block.index].append((start, size, reducers.choose(candidates, size)))
    cut = [(index, *piece) for index in sorted(pieces) for piece in pieces[index]]
    return tuple(Part(number, *piece) for number, piece in enumerate(cut))


def _usual_pace(members: Sequence[Member]) -> float:
    """Lower median of the stated paces; 0 if no more than half of these members state one."""
    paces = [member.statement.pace for member in members if member.statement.pace > 0]
    return median_low(paces) if 2 * len(paces) > len(members) else 0.0


class _Bounds:
    """How much one member may weigh and move, from all members' statements."""

    def __init__(self, members: Sequence[Member], clip: float, growth: int, most_of_newcomers: float) -> None:
        statements = [member.statement for member in members]
        ids, vouched = [m.peer_id for m in members], [m.vouched for m in members]
        without_weight, new = ignored(ids, vouched), newcomers(ids, vouched) if most_of_newcomers < 1 else set()
        self.ignored = {i for i, peer_id in enumerate(ids) if peer_id in without_weight}
        self._new = {i for i, peer_id in enumerate(ids) if peer_id in new}
        self._most_of_newcomers = most_of_newcomers
        self._most = {i: member.most_weight for i, member in enumerate(members)}
        claimed = [0 if i in self.ignored else statement.tokens for i, statement in enumerate(statements)]
        positive = [tokens for tokens in claimed if tokens > 0]
        self._median_tokens = median_low(positive) if positive else 1
        self._clip = clip
        self._growth = growth  # differences grow at most with this power of the steps
        self.ratios = granted_ratios(ids, vouched)
        self.tokens = believed_tokens(claimed, self.ratios)
        self._claimed = claimed
        self.holders: defaultdict[int, list[int]] = defaultdict(list)  # of each expert, in order
        for i, statement in enumerate(statements):
            for expert in statement.held:
                self.holders[expert].append(i)
        self._rms = [(s.rms[0], dict(zip(s.held, s.rms[1:], strict=True))) for s in statements]
        self.stated = [
            Stated(tokens, shared, experts, (s.usual_rms[0], s.usual_rms[1]))
            for tokens, (shared, experts), s in zip(self.tokens, self._rms, statements, strict=True)
        ]

    def stated_rms(self, member: int, block: int) -> float:
        """The RMS that a member states of its difference."""
        shared, experts = self._rms[member]
        return shared if block == SHARED_BLOCK else experts[block - 1]

    def limits(self, contributors: Collection[int], block: int) -> dict[int, float]:
        """See clipping.limits."""
        return limits(self.stated, contributors, None if block == SHARED_BLOCK else block - 1, self._clip)

    def usual_rms(self, block: int) -> float:
        """See clipping.usual_rms."""
        return usual_rms(self.stated, None if block == SHARED_BLOCK else block - 1)

    def share(self, weights: Weights) -> Weights:
        """Lowers weights to the shares that their members may have; see averaging/weights.py."""
        weights = within_shares(weights, self._most)
        return within_share_together(weights, self._new, self._most_of_newcomers)

    def claim(self, member: int, made: Sequence[tuple[int, Contribution]], shared: BlockPlan | None) -> Claim:
        """A member's claims, compared with the others'."""
        ratio = self._claimed[member] / self._median_tokens
        believed = self.tokens[member] / self._median_tokens
        more = max(1.0, min(ratio, MAX_EARNED_RATIO) ** self._growth / max(believed, 1.0))
        excess, clipped = 0.0, None
        for block, contribution in made:
            if contribution.form is not Form.DELTA:
                continue
            if contribution.stated_rms > 0:
                excess = max(excess, contribution.stated_rms / (contribution.limit_rms * more))
            if contribution.scale < (clipped[1] if clipped else 1.0):
                clipped = block, contribution.scale
        absurd = self._claimed[member] > _ABSURD_RATIO * self._median_tokens
        # A late member brings the work of several rounds: it is scaled down like any other, but not reported.
        late = shared is not None and member not in shared.in_base
        return Claim(self.tokens[member], ratio, absurd, excess, None if late else clipped)


def _part_elements(block_size: int, num_reducers: int, maximum: int) -> int:
    if num_reducers == 1:
        return maximum  # there is nothing to share out
    num_parts = max(block_size // MIN_PART_ELEMENTS, 1)
    if num_parts > num_reducers:  # the same number for each of them
        num_parts = num_reducers * min(num_parts // num_reducers, PARTS_PER_MEMBER)
    return min(math.ceil(block_size / num_parts), maximum)


def common_lineage(members: Sequence[Member], among: Collection[int] | None = None) -> Lineage:
    """The lineage of most members (or of most at the indices `among`); ties go to the one with the newest head."""
    by_head: defaultdict[tuple[int, bytes], list[Lineage]] = defaultdict(list)
    for i in sorted(among) if among is not None else range(len(members)):
        lineage = members[i].statement.lineage
        by_head[lineage.head].append(lineage)
    head = max(by_head, key=lambda head: (len(by_head[head]), head))
    # Honest members with the same head have the same history; most of the dishonest ones agree with no other.
    behind = Counter(lineage.to_lists()[1] for lineage in by_head[head])
    most = max(behind, key=lambda marks: (behind[marks], marks))
    return next(lineage for lineage in by_head[head] if lineage.to_lists()[1] == most)


def _plan_block(
    members: Sequence[Member], lineages: Sequence[Lineage], block: int, bounds: _Bounds, deferred: set[int] | None
) -> BlockPlan | None:
    """The plan of one block; None if there is nothing to do.

    With a set of `deferred` experts, the block is an expert's that takes part only if work would be lost; otherwise it
    is added to the set.
    """
    version, in_base = _choose_base(members, block)
    weights = bounds.share(_weights(members, block, bounds))
    if deferred is not None and all(i in in_base and not members[i].statement.leaving for i, _ in weights):
        deferred.add(block - 1)
        weights = []
    # Lineages matter only for members with another base, and there are few of these.
    others = [i for i, _ in weights if i not in in_base]
    base_lineage = common_lineage(members, in_base) if others else None

    def went_another_way(i: int) -> bool:
        assert base_lineage is not None
        return members[i].statement.versions[block] >= version or not lineages[i].leads_to(base_lineage)

    limit_of = bounds.limits([i for i, _ in weights], block)
    contributions = tuple(
        Contribution(
            i,
            weight,
            Form.FULL if i not in in_base and went_another_way(i) else Form.DELTA,
            bounds.stated_rms(i, block),
            limit_of[i],
        )
        for i, weight in weights
    )
    if not contributions and len(in_base) == len(members):
        return None
    lengths = [c.bound_rms for c in contributions if c.form is Form.DELTA]
    median = median_low(lengths) if lengths else 0.0
    return BlockPlan(block, version, in_base, contributions, median, bounds.usual_rms(block))


def _choose_base(members: Sequence[Member], block: int) -> tuple[int, frozenset[int]]:
    """Version of the base of a block, and the members that hold it."""
    bases = [(member.statement.versions[block], member.statement.digests[block]) for member in members]
    num_holders = Counter(bases)
    if len(num_holders) == 1:
        return bases[0][0], frozenset(range(len(members)))
    reachable = {base for base, member in zip(bases, members, strict=True) if member.statement.reachable}
    base = max(num_holders, key=lambda base: (base in reachable, num_holders[base], *base))
    return base[0], frozenset(i for i, each in enumerate(bases) if each == base)


def _plan_return(members: Sequence[Member], block: int, taken_back: Return) -> BlockPlan | None:
    """The plan of one block in a round that takes back a commit; None if no member needs values from another one."""
    version, in_base = _choose_base(members, block)
    restored = block in taken_back.blocks
    if restored:
        version, in_base = taken_back.round, taken_back.keepers
    return None if len(in_base) == len(members) else BlockPlan(block, version, in_base, (), restored=restored)


def _weights(members: Sequence[Member], block: int, bounds: _Bounds) -> Weights:
    """Contributors to a block and their weights: all tokens for shared, tokens routed to the expert for its holders."""
    if block == SHARED_BLOCK:
        return [(i, tokens) for i, tokens in enumerate(bounds.tokens) if tokens > 0]
    expert = block - 1
    raw = {
        i: members[i].statement.routed[members[i].statement.held.index(expert)]
        for i in bounds.holders[expert]
        if i not in bounds.ignored
    }
    # After a round without experts, a member that has done no step since still has work on them.
    raw = {i: count for i, count in raw.items() if count > 0 or members[i].statement.tokens > 0}
    if not any(raw.values()):  # no token was routed to this expert, but weight decay and merges changed it
        return [(i, 1.0) for i in raw]
    # The lower median: with two members the larger claim must not be its own measure.
    median = median_low([count for count in raw.values() if count > 0])
    return [(i, min(float(count), bounds.ratios[i] * median)) for i, count in raw.items() if count > 0]


class _Reducers:
    """Chooses the reducers of parts, so that loads follow the measured upload rates within MAX_REDUCING_SHARE.

    A declared bandwidth only lowers a rate, and stands for it at a member that nobody has measured yet.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        ids, vouched = [m.peer_id for m in members], [m.vouched for m in members]
        idle = without_duty(ids, vouched)
        self.without_duty = frozenset(i for i, peer_id in enumerate(ids) if peer_id in idle)
        self.trusted = frozenset(i for i, may in enumerate(may_reduce(ids, vouched)) if may) - self.without_duty
        self._reachable = frozenset(i for i, member in enumerate(members) if member.statement.reachable)
        rest = resting(ids, vouched)
        self._ready = frozenset(i for i in self.trusted if ids[i] not in rest)
        self._measured = measured_rates(ids, vouched)
        self._rate = [
            min(member.statement.bandwidth_mbps, math.inf if rate is None else rate)
            for member, rate in zip(members, self._measured, strict=True)
        ]
        self._elements = [0] * len(members)  # that each member reduces
        self._most = [0.0] * len(members)

    def expect(self, num_elements: int) -> None:
        """Takes the number of elements of all parts, from which each member's limit follows."""
        equal_share = num_elements / max(len(self._ready & self._reachable), 1)
        self._most = [equal_share * (1.0 if rate is None else MAX_REDUCING_SHARE) for rate in self._measured]

    def candidates(self, block_plan: BlockPlan, *, prefer_contributors: bool) -> list[int]:
        """Members that may reduce a block: reachable, trusted, not resting and holding the base; for an expert its
        contributors, if any can. If no such member holds the base, all trusted ones may, or else all that hold it.
        """
        able = block_plan.in_base & self._reachable
        able = able & self._ready or able & self.trusted or able
        if prefer_contributors:
            able = able & {c.member for c in block_plan.contributions if c.form is Form.DELTA} or able
        return sorted(able)

    def choose(self, candidates: Sequence[int], size: int) -> int:
        """The candidate that would be done first with a part of so many elements."""
        fitting = [m for m in candidates if self._elements[m] + size <= self._most[m]]
        open_to = fitting or [m for m in candidates if self._elements[m] < self._most[m]] or candidates
        done = {m: (self._elements[m] + size) / self._rate[m] for m in open_to}
        reducer = min(open_to, key=lambda m: (done[m], self._members[m].peer_id))
        self._elements[reducer] += size
        return reducer
