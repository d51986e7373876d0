"""What a reducer does with the contributions to its parts, and the recipe by which everybody can repeat it.

Shape: N elements of one part.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median_low

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.averaging.agreement import Agreement
from spes_swarm.protocol.averaging.clipping import FREE_DEVIATION, EnergyBudget
from spes_swarm.protocol.averaging.commitments import RESULT, Commitment, Exchange, SigningKey, batches
from spes_swarm.protocol.averaging.recipe import Recipe, Share
from spes_swarm.protocol.averaging.signed_result import SignedResult, head_of
from spes_swarm.protocol.consensus.codec import Codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.protocol.rounds.plan import Claim, Contribution, Form, Part, Plan

# A contribution is next to nothing if it is shorter than this share of what the others' lengths let expect. An honest
# one of few steps with large batches is longer: steps that follow each other add up to less than their sum.
_LEAST_LENGTH = 0.1


@dataclass(slots=True)
class Accumulator:
    """The contributions to one part, at its reducer."""

    outstanding: set[int]  # contributors that have neither delivered nor been given up
    differences: dict[int, FloatArray] = field(default_factory=dict)  # (N,), scaled, of each that has delivered
    weights: dict[int, float] = field(default_factory=dict)
    commitments: dict[int, Commitment] = field(default_factory=dict)

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
    """How the members of a round agree, in the parts that one of them reduces."""

    def __init__(self, me: int) -> None:
        self._me = me
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
        for member, factor in zip(members, agreement.factors_M.tolist(), strict=True):
            self._factors[member].append(factor)
        seen = {} if self._me in full else opposition(part, members, agreement, self._me)
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
        empty = self.empty(claims)
        return {i: [1.0] * len(found) if i in empty else found for i, found in self._opposition.items()}

    def empty(self, claims: Sequence[Claim]) -> set[int]:
        """The members whose contributions are far shorter than most, for their tokens.

        All parts are judged together, since text in another script leaves many rows of an embedding untouched.
        """
        tokens = [claim.tokens for claim in claims]
        rms = {i: math.sqrt(energy / self._elements[i]) for i, energy in self._energy.items()}

        def expected(i: int) -> float:
            # Fewer tokens are fewer steps: while the learning rate rises, lengths grow with the square of the steps.
            return median_low([rms[j] * min(1.0, tokens[i] / tokens[j]) ** 2 for j in rms])

        return {i for i in rms if rms[i] < _LEAST_LENGTH * expected(i)}

    def deviations_left(self) -> dict[int, float]:
        """The share of each member's deviation that clipping left, averaged over the parts."""
        return {member: sum(factors) / len(factors) for member, factors in self._factors.items()}


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
