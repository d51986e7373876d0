"""The figures of a round: medians and sums of what its peers claim, within bounds; and those of earlier rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median_high, median_low
from typing import TYPE_CHECKING, Any, Final

from spes_swarm.monitor.state import Excluded, Fault, HistoryPoint, WithoutDuty
from spes_swarm.protocol.members.round_metrics import MAX_COUNT, RoundFigures, metrics_of

if TYPE_CHECKING:
    from spes_swarm.protocol.members.records import Progress

# Far above any honest figure (tokens per second, losses, seconds); a sum over thousands of peers stays finite.
_MAX_FIGURE: Final = 1e12
# In place of a peer id: peers that have been gone for so long that they share one entry.
FORGOTTEN: Final = ""


def count(value: int) -> int:
    """Clamps a count to the range that can be shown and stored."""
    return min(max(value, 0), MAX_COUNT)


def bounded(value: float) -> float:
    """Clamps a figure to a finite range that starts at 0; NaN and inf become its upper end."""
    return min(max(value, 0.0), _MAX_FIGURE) if math.isfinite(value) else _MAX_FIGURE


def clamped(value: float | None) -> float | None:
    """Clamps a claim of a peer, by its type."""
    return value if value is None else count(value) if isinstance(value, int) else bounded(value)


def superfluous(rounds: Collection[int]) -> list[int]:
    """Rounds to drop from a history that is too long: every second one of its older half."""
    ordered = sorted(rounds)
    return ordered[1 : len(ordered) // 2 : 2]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What earlier monitors of the same run have recorded."""

    round: int = 0
    alive_at: float | None = None  # swarm time of the newest record of any peer
    points: tuple[HistoryPoint, ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)  # by peer id
    names: dict[str, str] = field(default_factory=dict)  # by peer id, sanitised
    trained_in: dict[int, int] = field(default_factory=dict)  # expert -> round
    faults: tuple[Fault, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    without_duty: tuple[WithoutDuty, ...] = ()


class RoundAggregate:
    """The peers' reports of one round.

    A peer's record of rounds has them all, and their figures do not change: once each member's are there, all monitors
    show the same values.
    """

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.first_seen = now
        self.is_written = False  # to the history
        self.tokens: int | None = None  # what all peers had trained on by then; None: not recorded yet
        self.reports: dict[str, RoundFigures] = {}  # by peer
        self._digests: dict[str, bytes] = {}
        self._experts: dict[str, frozenset[int]] = {}

    def enter(self, peer_id: str, progress: Progress) -> None:
        """Records a peer's newest progress in this round."""
        self._digests[peer_id] = progress.digest
        # A leaving peer reports no experts, but has trained those that it reported before.
        self._experts[peer_id] = frozenset(progress.experts) or self._experts.get(peer_id, frozenset())

    @property
    def consensus(self) -> str | None:
        """The most common digest (hex), the smaller one on a tie; None without reports."""
        votes = Counter(self._digests.values())
        if not votes:
            return None
        return min(votes, key=lambda digest: (-votes[digest], digest)).hex()

    def is_complete(self, num_present: int, num_ended: int = 0) -> bool:
        """Returns True if all members of the commit have reported it, and as many as most of the present peers.

        `num_ended` is the number of members that may be missing, since their reports ended before this round.
        """
        members = [report.peers for report in self.reports.values() if report.peers]
        num_reports = len(self.reports)
        return bool(members) and num_reports + num_ended >= median_high(members) and num_reports > num_present // 2

    def point(self, num_experts: int, now: float) -> HistoryPoint:
        """The round as a point of the history."""
        reports = list(self.reports.values())
        combined: dict[str, Any] = {}
        for name, metric in metrics_of(HistoryPoint).items():
            if metric.over_peers is not None:
                reported = (clamped(getattr(report, metric.reported_as or name)) for report in reports)
                combined[name] = clamped(metric.over_peers([value for value in reported if value is not None]))
        covered = {expert for experts in self._experts.values() for expert in experts if expert < num_experts}
        times = [report.time for report in reports if report.time]
        tokens = [report.swarm_tokens for report in reports if report.swarm_tokens]
        experts = [report.experts_covered for report in reports if report.experts_covered]
        return HistoryPoint(
            round=count(self.number),
            time=min(median_low(times), now) if times else self.first_seen,
            tokens=count(median_low(tokens)) if tokens else self.tokens or 0,
            peers=len(reports),
            experts_covered=min(median_low(experts), num_experts) if experts else len(covered),
            **combined,
        )
