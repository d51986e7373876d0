"""Records of a round while its peers report it, and what one monitor hands over to the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from spes_swarm.monitor.state import MAX_COUNT, Fault, HistoryPoint
from spes_swarm.protocol.members.round_metrics import RoundMetrics, metrics_of

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


def metrics_of_record(
    record: Progress, before: Mapping[str, float | None], *, same_round: bool
) -> dict[str, float | None]:
    """The round metrics of a record; those that it does not report are carried over from the same peer's last ones."""
    values: dict[str, float | None] = {}
    for name, metric in metrics_of(RoundMetrics).items():
        reported = clamped(getattr(record, name))
        missing = getattr(record, metric.measured_with or name) is None
        values[name] = before.get(name, reported) if missing and (same_round or metric.kept) else reported
    return values


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


@dataclass(frozen=True)
class _Entry:
    """A peer's latest report of a round."""

    progress: Progress
    metrics: dict[str, float | None]  # digests come first, losses a little later
    experts: frozenset[int]  # a leaving peer reports none, but has trained those that it reported before

    def figure(self, name: str) -> float | None:
        return self.metrics[name] if name in self.metrics else clamped(getattr(self.progress, name))


class RoundBook:
    """The peers' reports of one round."""

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.tokens: int | None = None  # what all peers had trained on by then; None: not recorded yet
        self._first_seen = now
        self._entries: dict[str, _Entry] = {}

    def enter(self, peer_id: str, progress: Progress) -> None:
        """Records a peer's newest report of this round."""
        before = self._entries.get(peer_id)
        if before is not None and before.progress is progress:
            return
        metrics = metrics_of_record(progress, before.metrics if before is not None else {}, same_round=True)
        experts = frozenset(progress.experts) or (before.experts if before is not None else frozenset())
        self._entries[peer_id] = _Entry(progress, metrics, experts)

    @property
    def consensus(self) -> str | None:
        """The most common digest (hex), the smaller one on a tie; None without reports."""
        votes = Counter(entry.progress.digest for entry in self._entries.values())
        if not votes:
            return None
        return min(votes, key=lambda digest: (-votes[digest], digest)).hex()

    def point(self, num_experts: int) -> HistoryPoint:
        """The round as a point of the history."""
        entries = list(self._entries.values())
        combined: dict[str, Any] = {}
        for name, metric in metrics_of(HistoryPoint).items():
            if metric.over_peers is not None:
                figures = [entry.figure(metric.reported_as or name) for entry in entries]
                combined[name] = clamped(metric.over_peers([value for value in figures if value is not None]))
        covered = {expert for e in entries for expert in e.experts if expert < num_experts}
        return HistoryPoint(
            round=self.number,
            time=self._first_seen,
            tokens=self.tokens or 0,
            peers=len(entries),
            experts_covered=len(covered),
            **combined,
        )
