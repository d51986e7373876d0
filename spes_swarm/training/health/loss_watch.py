"""Judges from a peer's own losses whether the last commit did harm.

The steps after a commit form a window. It is compared step by step with the windows of the commits before it, first
step with first step, because the loss drifts between two commits, and each commit undoes that: it falls where peers
have text of their own, and rises at a high learning rate, whose noise the average removes. A window of few steps says
little about their scatter, so it is pooled over all windows that are kept. Steps of one window may share a level, since
their text is from one file, say. So the scatter of whole windows is estimated too, and the larger error counts.

A commit that makes losses NaN leaves little to compare: a few such steps are a verdict of their own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise
from statistics import fmean, median

from spes_swarm.base.wording import plural

_MAX_STEPS = 64  # of a window that are kept: they detect a rise by half of the scatter of a step
_MIN_STEPS = 3  # of a window with a verdict: a single batch of unusual text would decide a shorter one
# Numbers of windows that a window is compared with: eight, since more would be hardly more precise, and two, since the
# loss was higher eight windows ago while it falls fast.
_LEVELS = (8, 2)
_MIN_FREEDOM = 12  # degrees of freedom from which the scatter is known well enough: three windows of five steps
# The fewest windows whose scatter is estimated. From eight on, the largest difference of two successive ones is
# dropped: it may be an earlier harm, which must not hide the next one.
_MIN_LEVELS, _MIN_TRIMMED_LEVELS = 4, 8
_BAD_STEPS = 3  # of a window with NaN or infinite values that blame the commit; mixed precision skips single ones
_CREEP_WINDOWS = 10  # on either side when a slow rise is looked for
# Standard errors that a rise must exceed. Of 13,702 honest windows 0.07 % did, those of most peers never at once:
# scripts/bench_verdicts.py in commit 51a6e5a.
_CHANCE = 3.5
_EVALUATION_CHANCE = 4.0  # all peers measure the same text, so that their errors agree
_MARGIN = 0.02  # share of the loss that a rise must exceed, however certain it is
_MEDIAN_ERROR = math.sqrt(math.pi / 2)  # standard error of the median over that of the mean


class LossWatch:
    """The losses of one peer since the last commits, and what they say about the last one."""

    def __init__(self) -> None:
        self._window: list[float] = []
        self._earlier: deque[list[float]] = deque(maxlen=2 * _CREEP_WINDOWS - 1)  # oldest first
        # How many of the newest earlier windows may be compared with this one, and looked at for a slow rise.
        self._comparable = self._creep_comparable = 0
        self._judged = False  # the last commit
        self._after_return = False
        self._num_bad_steps = 0
        self._ruined = False
        # Mean and standard error right after the last commit and right after the one before it.
        self._evaluation: tuple[float, float | None] | None = None
        self._evaluation_before: tuple[float, float | None] | None = None

    def restart(self) -> None:
        """Forgets everything, except that the last commit is `ruined`: the live weights were replaced."""
        self._earlier.clear()
        self._comparable = self._creep_comparable = 0
        self._evaluation = None
        ruined = self._ruined
        self._begin(judged=False)
        self._ruined = ruined

    def add_step(self, loss: float) -> None:
        """Notes the finite loss of a finished local step, in nats per target."""
        if len(self._window) < _MAX_STEPS:
            self._window.append(loss)

    def add_bad_step(self) -> None:
        """Notes a step whose loss or gradient is NaN or infinite."""
        self._num_bad_steps += 1
        if self._judged and self._comparable and self._num_bad_steps >= _BAD_STEPS:
            self._ruined = True

    def add_evaluation(self, mean: float, stderr: float | None) -> None:
        """Notes the loss on held-out text right after the last commit, in nats per target."""
        self._evaluation = (mean, stderr)

    def committed(self, *, judged: bool = True) -> None:
        """Begins a window: a commit was followed. Without `judged` it has no verdict, nor is it compared across."""
        if self._after_return and any(risen for risen, _ in self._against_level()):
            self._comparable = 0  # the return has not helped, so no commit is to blame, and this is the level now
        if self._window:
            self._earlier.append(self._window)
            self._comparable += 1
            self._creep_comparable += 1
        if not judged:
            self._comparable = self._creep_comparable = 0
        self._begin(judged=judged)

    def returned(self) -> None:
        """Begins a window, in place of `committed`: the last commit was taken back. Its own window is forgotten.

        This window has no verdict. What is known about a slow rise is forgotten.
        """
        self._creep_comparable = 0
        self._evaluation = None
        self._begin(judged=False, after_return=True)

    def _begin(self, *, judged: bool, after_return: bool = False) -> None:
        self._window, self._judged, self._after_return = [], judged, after_return
        self._num_bad_steps, self._ruined = 0, False
        self._evaluation_before, self._evaluation = self._evaluation, None

    @property
    def ruined(self) -> bool:
        """True if several losses or gradients since the last commit were NaN or infinite, so that `verdict` is True.

        Stays True over a `restart`. No further step changes this verdict.
        """
        return self._ruined

    @property
    def verdict(self) -> bool | None:
        """True: the loss has risen beyond chance since the last commit, or is NaN. None: unknown (yet)."""
        found = [risen for risen, _ in self._findings()]
        return any(found) if found else None

    @property
    def reason(self) -> str:
        """One line with the figures behind the verdict."""
        if not self._judged and not self._ruined:
            return "the last commit is not judged"
        found = sorted(self._findings(), key=lambda finding: not finding[0])
        return found[0][1] if found else f"cannot tell from {plural(len(self._window), 'step')} after the last commit"

    def _findings(self) -> Iterator[tuple[bool, str]]:
        """Yields (risen, why) for each comparison that can be made."""
        if self._ruined:
            yield True, f"{_BAD_STEPS} steps or more after the last commit had a NaN or infinite loss or gradient"
        if not self._judged:
            return
        if self._evaluation is not None and self._evaluation_before is not None:
            (mean, stderr), (before, stderr_before) = self._evaluation, self._evaluation_before
            if stderr is not None and stderr_before is not None:
                error = math.hypot(stderr, stderr_before)
                yield _finding("the held-out loss", mean - before, before, error, _EVALUATION_CHANCE)
        yield from self._against_level()
        if len(self._window) >= _MIN_STEPS and self._creep_comparable >= 2 * _CREEP_WINDOWS - 1:
            yield self._compare_slowly()

    def _against_level(self) -> Iterator[tuple[bool, str]]:
        """Yields the comparisons with the last few windows, if there is enough to compare."""
        freedom = sum(len(window) - 1 for window in self._earlier)
        if len(self._window) < _MIN_STEPS or freedom < _MIN_FREEDOM:
            return
        variance = sum(map(_squares, self._earlier)) / freedom
        newest = list(islice(reversed(self._earlier), self._comparable))
        level_variance = _level_variance(
            [fmean(window[: len(self._window)]) for window in newest if len(window) >= _MIN_STEPS]
        )
        for num_windows in _LEVELS:
            if earlier := [window for window in newest[:num_windows] if len(window) >= _MIN_STEPS]:
                yield self._compare(earlier, variance, level_variance)

    def _compare(self, earlier: list[list[float]], variance: float, level_variance: float) -> tuple[bool, str]:
        """Compares each step of the window with the same step of earlier windows.

        `variance` is that of a step, and `level_variance` that of the mean of a window.
        """
        # Per step: how many earlier windows have it, which is its weight.
        weights = [sum(len(window) > step for window in earlier) for step in range(len(self._window))]
        total = sum(weights)
        before = math.fsum(loss for window in earlier for loss in window[: len(self._window)]) / total
        now = math.fsum(w * loss for w, loss in zip(weights, self._window, strict=True)) / total
        error = math.sqrt(
            max(
                variance * (sum(w * w for w in weights) / total**2 + 1 / total),  # if the steps are independent
                level_variance * (1 + 1 / len(earlier)),
            )
        )
        what = f"the loss of {plural(len(self._window), 'step')}, against {plural(len(earlier), 'commit')} before,"
        return _finding(what, now - before, before, error, _CHANCE)

    def _compare_slowly(self) -> tuple[bool, str]:
        """Compares the median of the last windows with that of as many before them."""
        means = [fmean(window) for window in (*self._earlier, self._window)]
        old, new = means[:_CREEP_WINDOWS], means[_CREEP_WINDOWS:]
        variance = (_squares(old) + _squares(new)) / (_CREEP_WINDOWS * (_CREEP_WINDOWS - 1))
        error = _MEDIAN_ERROR * math.sqrt(variance)
        what = f"the median loss of {_CREEP_WINDOWS} rounds, against that of the {_CREEP_WINDOWS} before,"
        return _finding(what, median(new) - median(old), median(old), error, _CHANCE)


def _level_variance(means: list[float]) -> float:
    """Returns the variance of means of successive windows, whatever their trend; 0 if there are too few."""
    if len(means) < _MIN_LEVELS:
        return 0.0
    # The difference of two independent means has twice the variance of one.
    squares = sorted((after - before) ** 2 / 2 for before, after in pairwise(means))
    return fmean(squares[:-1] if len(means) >= _MIN_TRIMMED_LEVELS else squares)


def _squares(losses: list[float]) -> float:
    """Returns the sum of squared deviations from the mean."""
    mean = fmean(losses)
    return math.fsum((loss - mean) ** 2 for loss in losses)


def _finding(what: str, rise: float, before: float, error: float, chance: float) -> tuple[bool, str]:
    risen = rise > max(chance * error, _MARGIN * abs(before))
    verb = "rose" if risen else "did not rise beyond chance"
    return risen, f"{what} {verb}: {before:.4f} {rise:+.4f} nats, standard error {error:.4f}"
