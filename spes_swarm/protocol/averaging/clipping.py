"""How far one member can move the others in a round: bounds relative to the group, as pure functions.

Honest members that train the same model at the same rate move it about equally far: with AdamW the root mean squares
(RMS) of their differences lie within a few per cent of each other for the shared layers, within 20 % for experts. So a
statement carries the RMS of its writer's differences, and the plan derives from all of them a limit for each. A
difference beyond its limit is scaled down to it.

More tokens make a longer difference. Within a round its length grows at most in proportion to the steps, so another
member's RMS, times the ratio of tokens or `clip`, whichever is larger, predicts how far a member may have moved. Token
counts are claims, too: they are believed up to twice the group's lower median, or up to what most of the other members
vouch for because earlier commits have borne it out (see track_record.py). A round that is called early finds most
members after a step or two, and would clip members that have done more. So a difference of the length that is usual in
earlier rounds is never too long.

Lower medians are used throughout: with two members, the larger claim is not its own measure.

Contributions must match what was stated. Agreement (averaging/agreement.py) bounds what no length shows: a contribution
that points in another direction than the others'.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.protocol.averaging.agreement import MIN_TO_AGREE

# No member weighs more than this many times the median, unless earlier commits bear it out.
MAX_WEIGHT_RATIO = 2.0
# Bound on the RMS of one part over that of its block. At most 2.1 was measured, in parts of 1,100 values. Rows of a
# large embedding that no token has touched make it larger for all other parts.
MAX_PART_RATIO = 8.0
# Bound on the energy per value in the parts that one reducer sees, over that in the block.
MAX_SHARE_RATIO = 4.0
# Allows for the rounding of codecs.
TOLERANCE = 1.02
# A member from the other side of a partition may be this many rounds away from the swarm's base.
MAX_ROUNDS_APART = 8
# Work that reducers have left out takes up no more than this share of what counts in full in the next difference of its
# block, and of a part no more than so many times the length that its member has stated. Otherwise a reducer that always
# drops the same member's work would make that member's differences too long, for itself or for the next reducer.
CARRIED_SHARE, CARRIED_PART_RATIO = 0.5, 1.8
# Deviations below this share of the block's median RMS are never shortened, however well the others agree: on embedding
# rows that only one member's tokens have touched, no other member agrees with it.
FREE_DEVIATION = 0.5
# A contribution is scaled by no less than this, and the usual length of contributions counts for no more than so many
# times that in a round. Nobody states such figures honestly.
LEAST_SCALE, MAX_STRETCH = 1e-12, 1e6
# Contributions with at least this share of the usual length count as usual: the shortfall is chance.
USUAL_SHARE = 0.8


@dataclass(frozen=True)
class Stated:
    """The inputs to the bounds from one member."""

    tokens: float
    shared_rms: float  # of its difference for the shared block
    expert_rms: Mapping[int, float]  # and for each held expert
    usual_rms: tuple[float, float] = (0.0, 0.0)  # shared, expert: in the rounds that it took part in

    @cached_property
    def largest_expert_rms(self) -> float:
        """The largest RMS of its experts, because experts that no token was routed to hardly move; 0 without any."""
        return max(self.expert_rms.values(), default=0.0)


def believed_tokens(claimed: Sequence[int], earned: Sequence[float]) -> list[float]:
    """The tokens that count for weights and limits, by member: what it claims, up to the multiple of the median that it
    has `earned`, at least MAX_WEIGHT_RATIO.
    """
    positive = [tokens for tokens in claimed if tokens > 0]
    median = median_low(positive) if positive else 0
    return [min(float(tokens), ratio * median) for tokens, ratio in zip(claimed, earned, strict=True)]


def limits(
    stated: Sequence[Stated], contributors: Collection[int], expert: int | None, clip: float
) -> dict[int, float]:
    """The largest RMS of a block's difference that counts in full, by contributor.

    `stated` has all members, with believed tokens; `expert` is None for the shared block. For equal tokens, a
    difference may be `clip` times as long as the lower median; 0 means no limits.
    """
    if clip == 0:
        return dict.fromkeys(contributors, math.inf)
    if expert is not None and len(contributors) < MIN_TO_AGREE:
        # One or two holders have no majority of their own: all members' experts are the measure.
        measure = [(s.largest_expert_rms, s.tokens) for s in stated]
    else:
        measure = [(_block_rms(stated[i], expert), stated[i].tokens) for i in contributors]
    known = [(rms, tokens) for rms, tokens in measure if rms > 0 and tokens > 0]
    if not known:
        return dict.fromkeys(contributors, math.inf)
    least = clip * usual_rms(stated, expert)
    rms_K, tokens_K = np.array(known).T
    middle = (len(known) - 1) // 2

    def limit(own_tokens: float) -> float:
        predicted_K = rms_K * np.maximum(clip, own_tokens / tokens_K)
        return max(least, float(np.partition(predicted_K, middle)[middle]))  # the lower median

    return {i: limit(stated[i].tokens) for i in contributors}


def usual_rms(stated: Sequence[Stated], expert: int | None) -> float:
    """The usual RMS of a block's differences: lower median of what members remember; 0 if none remembers any."""
    remembered = [rms for s in stated if (rms := s.usual_rms[0 if expert is None else 1]) > 0]
    return median_low(remembered) if remembered else 0.0


def median_rms(stated: Sequence[Stated]) -> tuple[float, float]:
    """Lower medians of the members' RMS, for the shared block and for experts; 0 if there are none.

    Each member counts once, with the largest RMS of its experts, even if it alone holds most experts.
    """
    shared = [s.shared_rms for s in stated if s.tokens > 0 and s.shared_rms > 0]
    experts = [s.largest_expert_rms for s in stated if s.tokens > 0 and s.largest_expert_rms > 0]
    return median_low(shared) if shared else 0.0, median_low(experts) if experts else 0.0


def _block_rms(stated: Stated, expert: int | None) -> float:
    return stated.shared_rms if expert is None else stated.expert_rms[expert]


def scale(stated_rms: float, limit: float) -> float:
    """The factor that a contribution is multiplied by."""
    return max(LEAST_SCALE, min(1.0, limit / stated_rms)) if stated_rms > 0 else 1.0


def shortened(difference_N: FloatArray, limit: float) -> FloatArray:
    """A difference (N,), scaled down to an RMS of `limit` if it is longer."""
    rms = math.sqrt(sum_of_squares(difference_N) / len(difference_N))
    return difference_N * np.float32(limit / rms) if limit < rms < math.inf else difference_N


@dataclass(slots=True)
class EnergyBudget:
    """The sum of squares that one member may use up in the parts of a block that one reducer handles."""

    rms: float  # allowed for the block as a whole
    block_elements: int
    elements: int  # in these parts together
    used: float = 0.0

    def most_of_part(self, elements: int) -> float:
        """The largest sum of squares of one part; the same at all members, to the last bit: powers need not be."""
        rms = TOLERANCE * self.rms
        return rms * rms * min(int(MAX_PART_RATIO * MAX_PART_RATIO) * elements, self.block_elements)

    def allows_part(self, energy: float, elements: int) -> bool:
        """Returns True if one part alone is within bounds."""
        return energy <= self.most_of_part(elements)

    def spend(self, energy: float, elements: int) -> bool:
        """Uses up `energy` on a part of so many elements; returns False, and uses up nothing, if not enough is left.

        A part counts twice: of a reducer that has this one alone, the ratio to the block scatters more.
        """
        rms = TOLERANCE * self.rms
        allowed = rms * rms * min(self.block_elements, MAX_SHARE_RATIO * (self.elements + elements))
        if not self.used + energy <= allowed:
            return False
        self.used += energy
        return True
