"""Records of a round while its peers report it, and what one monitor hands over to the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from spes_swarm.monitor.state import MAX_COUNT, Fault, HistoryPoint

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
    train_loss: float | None
    eval_loss: float | None
    eval_loss_stderr: float | None
    experts: frozenset[int]  # a leaving peer reports none, but has trained those that it reported before


class RoundBook:
    """The peers' reports of one round: digests come first, losses and bytes a little later.

    Attributes:
        number: the round.
        tokens: what all peers had trained on by then; None: not recorded yet.
    """

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.tokens: int | None = None
        self._first_seen = now
        self._entries: dict[str, _Entry] = {}

    def enter(self, peer_id: str, progress: Progress, train_loss: float | None) -> None:
        """Records a peer's newest report of this round."""
        before = self._entries.get(peer_id)
        if before is not None and before.progress is progress:
            return
        evaluated: Progress | _Entry = progress if progress.eval_loss is not None or before is None else before
        experts = frozenset(progress.experts) or (before.experts if before is not None else frozenset())
        self._entries[peer_id] = _Entry(progress, train_loss, evaluated.eval_loss, evaluated.eval_loss_stderr, experts)

    @property
    def consensus(self) -> str | None:
        """The most common digest (hex), the smaller one on a tie; None without reports."""
        votes = Counter(entry.progress.digest for entry in self._entries.values())
        if not votes:
            return None
        return min(votes, key=lambda digest: (-votes[digest], digest)).hex()

    def point(self, num_experts: int) -> HistoryPoint:
        """The round as a point of the history.

        Losses are medians: one peer's claim alone could move a mean.
        """
        entries = list(self._entries.values())
        train = [bounded(e.train_loss) for e in entries if e.train_loss is not None]
        evaluated = [bounded(e.eval_loss) for e in entries if e.eval_loss is not None]
        errors = [bounded(e.eval_loss_stderr) for e in entries if e.eval_loss_stderr is not None]
        seconds = [bounded(e.progress.round_seconds) for e in entries if e.progress.round_seconds > 0]
        covered = {expert for e in entries for expert in e.experts if expert < num_experts}
        return HistoryPoint(
            round=self.number,
            time=self._first_seen,
            tokens=self.tokens or 0,
            train_loss=median(train) if train else None,
            eval_loss=median(evaluated) if evaluated else None,
            eval_loss_stderr=median(errors) if errors else None,
            tokens_per_second=bounded(sum(bounded(e.progress.tokens_per_second) for e in entries)),
            peers=len(entries),
            experts_covered=len(covered),
            round_seconds=median(seconds) if seconds else 0.0,
            bytes=count(sum(count(e.progress.bytes_sent) for e in entries)),
        )
