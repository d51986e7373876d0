"""What goes into a round and comes out of it: limits, results of parts, and the report of a commit."""

from __future__ import annotations

from dataclasses import dataclass

from spes_swarm.protocol.averaging.signed_result import SignedResult
from spes_swarm.protocol.rounds.plan import Form


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on what is accepted from other members."""

    max_update_rms: float  # largest root mean square of a part's difference
    bounded: bool = True  # contributions and results must meet the plan's limits, too

    @classmethod
    def of(cls, clip: float, max_update_rms: float) -> Bounds:
        """The bounds from a run's settings `round.clip` and `round.max_update_rms`."""
        return cls(max_update_rms, bounded=clip > 0)


@dataclass(frozen=True, slots=True)
class Result:
    """The encoded result of one part."""

    form: Form
    data: bytes
    included: frozenset[int]  # members whose contribution is in it
    energy: float = 0.0  # sum of squares of its difference to the base, if this peer holds the base
    signed: SignedResult | None = None  # by its reducer; None if it is not a difference, or not signed yet


@dataclass(frozen=True)
class CommitReport:
    """What a committed round changed."""

    round: int
    members: tuple[str, ...]
    parts_total: int
    parts_missing: int
    changed_blocks: tuple[int, ...]
    experts_covered: int
    deferred_experts: frozenset[int] = frozenset()  # see Plan.deferred
    unites: bool = False  # see Plan.unites
    taken_back: int | None = None  # the round that this one takes back
    keeps_work: bool = False  # although it takes one back: this peer had missed that one, and its work is as before
