"""Records of a round while its peers report it, and what one monitor hands over to the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_high, median_low
from typing import TYPE_CHECKING, Any, Final

from spes_swarm.monitor.state import Fault, HistoryPoint
from spes_swarm.protocol.members.round_metrics import MAX_COUNT, PeerMetrics, RoundFigures, RoundMetrics, metrics_of

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
    """The metrics of a record; those of a round that it does not report are carried over from the peer's last ones."""
    reported = {name: clamped(getattr(record.metrics, name)) for name in metrics_of(PeerMetrics)}
    carried = {
        name: before[name]
        for name, metric in metrics_of(RoundMetrics).items()
        if name in before and reported[metric.measured_with or name] is None and (same_round or metric.kept)
    }
    return reported | carried


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


class RoundBook:
    """The peers' reports of one round.

    A peer's progress record may pass over a round, and come before its losses: which figures a monitor finds there
    depends on when it reads. Its record of rounds has all of them, and they do not change, so once each member's are
    there, all monitors show the same values. Progress counts only until that record is there.
    """

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.first_seen = now
        self.is_written = False  # to the history
        self.tokens: int | None = None  # what all peers had trained on by then; None: not recorded yet
        self._digests: dict[str, bytes] = {}
        self._experts: dict[str, frozenset[int]] = {}
        self._figures: dict[str, Mapping[str, float | None]] = {}  # by peer
        self._reports: dict[str, RoundFigures] = {}  # the final ones, by peer

    def enter(self, peer_id: str, progress: Progress, *, reports: bool) -> None:
        """Records a peer's newest progress in this round; `reports` says whether it writes a record of rounds."""
        self._digests[peer_id] = progress.digest
        # A leaving peer reports no experts, but has trained those that it reported before.
        self._experts[peer_id] = frozenset(progress.experts) or self._experts.get(peer_id, frozenset())
        if not reports:
            metrics = metrics_of_record(progress, self._figures.get(peer_id, {}), same_round=True)
            self._figures[peer_id] = {**metrics, "tokens_per_second": bounded(progress.tokens_per_second)}

    def report(self, peer_id: str, figures: RoundFigures) -> None:
        """Records a peer's final report."""
        self._reports[peer_id] = figures
        self._figures[peer_id] = {name: clamped(getattr(figures, name)) for name in _REPORTED}

    @property
    def consensus(self) -> str | None:
        """The most common digest (hex), the smaller one on a tie; None without reports."""
        votes = Counter(self._digests.values())
        if not votes:
            return None
        return min(votes, key=lambda digest: (-votes[digest], digest)).hex()

    def has_losses_of(self, peer_id: str) -> bool:
        """Returns True if a peer has reported its losses."""
        return peer_id in self._reports or self._figures.get(peer_id, {}).get("train_loss") is not None

    def is_complete(self, num_present: int, num_ended: int = 0) -> bool:
        """Returns True if all members of the commit have reported it, and as many as most of the present peers.

        `num_ended` is the number of members that may be missing, since their reports ended before this round.
        """
        members = [report.peers for report in self._reports.values() if report.peers]
        num_reports = len(self._reports)
        return bool(members) and num_reports + num_ended >= median_high(members) and num_reports > num_present // 2

    def point(self, num_experts: int, now: float) -> HistoryPoint:
        """The round as a point of the history."""
        figures, reports = list(self._figures.values()), list(self._reports.values())
        combined: dict[str, Any] = {}
        for name, metric in metrics_of(HistoryPoint).items():
            if metric.over_peers is not None:
                values = [known for of in figures if (known := of.get(metric.reported_as or name)) is not None]
                combined[name] = clamped(metric.over_peers(values))
        covered = {expert for experts in self._experts.values() for expert in experts if expert < num_experts}
        times = [report.time for report in reports if report.time]
        tokens = [report.swarm_tokens for report in reports if report.swarm_tokens]
        experts = [report.experts_covered for report in reports if report.experts_covered]
        return HistoryPoint(
            round=count(self.number),
            time=min(median_low(times), now) if times else self.first_seen,
            tokens=count(median_low(tokens)) if tokens else self.tokens or 0,
            peers=len(figures),
            experts_covered=min(median_low(experts), num_experts) if experts else len(covered),
            **combined,
        )


# What a point takes from each peer.
_REPORTED: Final = {
    metric.reported_as or name for name, metric in metrics_of(HistoryPoint).items() if metric.over_peers is not None
}
