"""The faults that are reported after a round: clipped contributions and missing parts.

Faults are for people to read and for the monitor to count. Some are held against a peer; see conduct.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.wording import plural
from spes_swarm.protocol.rounds.plan import Part, Plan

# A difference more than this many times as long as its writer's tokens explain is reported. An honest member whose work
# was left out of a round brings more than one round's to the next; see clipping.CARRIED_SHARE. One that has done more
# steps than others is scaled down, but not reported.
MATERIAL_EXCESS = 2.0
# A member is reported if clipping leaves less than this share of its deviation from the common direction. Honest
# members keep 0.99 or more on average.
MATERIAL_DEVIATION = 0.75
# Newcomers move too far until their optimisers have moments. Beyond this, even a newcomer is reported.
GROSS_EXCESS = 4.0
GROSS_DEVIATION = 0.25


def clipped(plan: Plan, deviations_left: Mapping[int, float], new: Collection[int]) -> list[tuple[int, ProtocolError]]:
    """One fault (`clipped`) for each member whose contribution was materially shortened.

    `deviations_left` is the share of each member's deviation that clipping left, averaged over the parts reduced here
    and, except for `new` members (those with few commits, or back after several rounds), over this round and earlier
    ones.
    """
    faults: list[tuple[int, ProtocolError]] = []
    for member, claim in enumerate(plan.claims):
        reasons = []
        is_new = member in new
        left = deviations_left.get(member, 1.0)
        if claim.clipped is not None and claim.excess > (GROSS_EXCESS if is_new else MATERIAL_EXCESS):
            block, scale = claim.clipped
            stated = next(c for c in plan.blocks[block].contributions if c.member == member)
            reasons.append(
                f"its difference for {_name(block)} has RMS {stated.stated_rms:.3g}, above the limit of "
                f"{stated.limit_rms:.3g}: scaled by {scale:.2g}"
            )
        if claim.absurd:
            reasons.append(f"it claims {claim.tokens_ratio:.3g} times the median number of tokens")
        if left < (GROSS_DEVIATION if is_new else MATERIAL_DEVIATION):
            reasons.append(f"{1 - left:.0%} of its deviation from the common direction was clipped")
        if reasons:
            faults.append((member, ProtocolError("clipped", "; ".join(reasons))))
    return faults


def missing(plan: Plan, me: int, parts: Collection[Part], finished: Collection[int]) -> list[tuple[int, ProtocolError]]:
    """One fault for each member that is responsible for missing parts: `missing`, or `late` if it alone trains them."""
    kinds = {True: ("late", "trains"), False: ("missing", "reduces")}
    return [
        (member, ProtocolError(kinds[trains][0], f"{plural(count, 'part')} that it {kinds[trains][1]} did not arrive"))
        for (member, trains), count in sorted(responsible(plan, me, parts, finished).items())
        if member != me
    ]


def failed_reducers(
    plan: Plan, me: int, parts: Collection[Part], finished: Collection[int], refused: Collection[int]
) -> set[int]:
    """The members responsible for missing parts that they reduce, or for `refused` results (indices of parts)."""
    lacking = [part for part in parts if part.index not in refused]
    failed = {member for member, trains in responsible(plan, me, lacking, finished) if not trains}
    return (failed | {plan.parts[index].reducer for index in refused}) - {me}


def responsible(plan: Plan, me: int, parts: Collection[Part], finished: Collection[int]) -> Counter[tuple[int, bool]]:
    """Counts the missing parts that each member is responsible for: (member, True if it trains them).

    This is the reducer of a part. But a reducer that has ended its stream in order had nothing to average: then it is
    the contributor, if there is only one.
    """
    counts: Counter[tuple[int, bool]] = Counter()
    for part in parts:
        contributors = {c.member for c in plan.block_of(part).contributions}
        if part.reducer in {me, *finished} and len(contributors) == 1 and part.reducer not in contributors:
            counts[next(iter(contributors)), True] += 1
        else:
            counts[part.reducer, False] += 1
    return counts


def _name(block: int) -> str:
    return "the shared layers" if block == 0 else f"expert {block - 1}"
