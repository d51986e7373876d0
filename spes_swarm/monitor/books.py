"""What is written down of a round while its peers report it, and what one monitor leaves to the next."""

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

# No honest figure comes near (tokens per second, losses, seconds); a sum over thousands of peers stays finite.
_MAX_FIGURE: Final = 1e12
# In place of a peer id: those that nobody has seen for so long that they share one line.
FORGOTTEN: Final = ""


def count(value: int) -> int:
    """A count as it may be shown and stored."""
    return min(max(value, 0), MAX_COUNT)


def bounded(value: float) -> float:
    """A figure that is not negative, as it may be added up."""
    return min(max(value, 0.0), _MAX_FIGURE) if math.isfinite(value) else _MAX_FIGURE


def superfluous(rounds: Collection[int]) -> list[int]:
    """Rounds to be left out of a history that is too long: every second one of the older half."""
    ordered = sorted(rounds)
    return ordered[1 : len(ordered) // 2 : 2]


@dataclass(frozen=True, kw_only=True)
class Known:
    """What an earlier monitor of the same run has written down."""

    round: int = 0
    alive_at: float | None = None  # swarm time of the last sign of anybody
    points: tuple[HistoryPoint, ...] = ()
    tokens: dict[str, int] = field(default_factory=dict)  # by peer id
    names: dict[str, str] = field(default_factory=dict)  # by peer id, harmless
    trained_in: dict[int, int] = field(default_factory=dict)  # expert -> round
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class _Entry:
    """A peer's last word on a round."""

    progress: Progress
    train_loss: float | None
    eval_loss: float | None
    eval_loss_stderr: float | None
    experts: frozenset[int]  # a peer that says goodbye holds none any more, but has trained them


class RoundBook:
    """One round, as its peers tell it: first their digests, a little later losses and bytes.

    Attributes:
        number: the round.
        tokens: what all peers had trained on by then; None: not noted yet.
    """

    def __init__(self, number: int, now: float) -> None:
        self.number = number
        self.tokens: int | None = None
        self._first_seen = now
        self._entries: dict[str, _Entry] = {}

    def enter(self, peer_id: str, progress: Progress, train_loss: float | None) -> None:
        """Notes a peer's newest record of this round."""
        before = self._entries.get(peer_id)
        if before is not None and before.progress is progress:
            return
        evaluated: Progress | _Entry = progress if progress.eval_loss is not None or before is None else before
        experts = frozenset(progress.experts) or (before.experts if before is not None else frozenset())
        self._entries[peer_id] = _Entry(progress, train_loss, evaluated.eval_loss, evaluated.eval_loss_stderr, experts)

    @property
    def consensus(self) -> str | None:
        """The digest (hex) that most peers have; of equally many the smaller one."""
        votes = Counter(entry.progress.digest for entry in self._entries.values())
        if not votes:
            return None
        return min(votes, key=lambda digest: (-votes[digest], digest)).hex()

    def point(self, num_experts: int) -> HistoryPoint:
        """The round as a point of the history.

        Losses are medians: a mean could be moved by one peer's word alone.
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
