"""How many parts each member audits, and which.

A member draws its parts after the results are fixed, and keeps them secret until then, so a reducer cannot know which
of its results are going to be examined. An audit that nobody answers, not even when others ask, finds nothing; what
follows then is a matter of conduct (see protocol/rounds/conduct.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Final

from spes_swarm.protocol.averaging.commitments import digest

CONFIDENCE: Final = 0.99
IDLE_SHARE: Final = 0.25  # of the members, which may not audit: they lie together, or are too slow
# (share of its parts in which a reducer lies, rounds within which that is proven)
GOALS: Final = ((0.5, 4), (0.1, 20))


def num_audits(num_members: int) -> int:
    """The number of parts that each member audits in a round.

    Each of N members reduces the same number of parts. A reducer that lies in a share s of its own is hit by an audit
    of another member with probability s / (N - 1), since parts are drawn from those that the N - 1 others reduce. Of
    the N members, A = N - max(1, floor(N / 4)) audit. In R rounds they make n = A k R audits, and all of them miss with
    a probability of at most (1 - s / (N - 1))^n; an auditor that draws without replacement misses less often. For this
    to be at most 1 - CONFIDENCE,

        k >= log(1 - CONFIDENCE) / (A R log(1 - s / (N - 1))).

    For many members, this is 3.07: the number does not grow with the swarm, because both the parts and the auditors
    are proportional to N.

    The formula holds for two members as well. The one that audits needs nobody's agreement to leave, and those that
    join later can read its proof. A lone member has nobody to audit.
    """
    if num_members < 2:
        return 0
    auditors = num_members - max(1, math.floor(IDLE_SHARE * num_members))
    return max(
        math.ceil(math.log(1 - CONFIDENCE) / (auditors * rounds * math.log1p(-share / (num_members - 1))))
        for share, rounds in GOALS
    )


def draw(candidates: Sequence[int], count: int, random: Random) -> list[int]:
    """Draws `count` different candidates, or all if there are fewer."""
    return random.sample(candidates, min(count, len(candidates)))


def shared_out(parts: Sequence[int], num_members: int, me: int, group_id: bytes) -> list[int]:
    """The parts that a member audits if all members together audit all of them; each part has one auditor.

    All members pass the same parts, in any order. They are shuffled by their digests, and dealt out in turn.
    """
    return sorted(sorted(parts, key=lambda part: digest(group_id, part.to_bytes(8, "big")))[me::num_members])
