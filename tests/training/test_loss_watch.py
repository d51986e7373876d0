"""A peer's judge of commits, on made-up losses of known level and scatter."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.training.health.loss_watch import LossWatch

LEVEL, SCATTER = 2.0, 0.1  # of the losses, in nats
seeds = st.integers(0, 2**32 - 1)
inner_steps = st.integers(4, 80)


class Losses:
    """Draws the losses of steps, with equal seeds the same ones."""

    def __init__(self, seed: int, scatter: float = SCATTER) -> None:
        self._random, self._scatter = random.Random(seed), scatter

    def steps(self, watch: LossWatch, count: int, level: float = LEVEL) -> None:
        """Adds steps of a round at this level."""
        for _ in range(count):
            watch.add_step(self._random.gauss(level, self._scatter))

    def rounds(self, watch: LossWatch, count: int, steps: int, level: float = LEVEL, slope: float = 0.0) -> None:
        """Adds whole rounds, each after a commit; the level moves by `slope` with each."""
        for number in range(count):
            watch.committed()
            self.steps(watch, steps, level + number * slope)


def verdict_of(watch: LossWatch) -> bool | None:
    """Returns the verdict; mypy would take a property that was None before to be None still."""
    return watch.verdict


def healthy(losses: Losses, steps: int, rounds: int = 8) -> LossWatch:
    """Returns a judge that has seen some rounds of constant level, and the next commit."""
    watch = LossWatch()
    losses.rounds(watch, rounds, steps)
    watch.committed()
    return watch


@settings(max_examples=60)
@given(seeds, inner_steps, st.integers(4, 40))
def test_a_jump_in_every_step_is_detected_and_the_reason_says_by_how_much(seed: int, steps: int, rounds: int) -> None:
    losses = Losses(seed)
    watch = healthy(losses, steps, rounds)
    losses.steps(watch, steps, LEVEL + 5 * SCATTER)
    assert verdict_of(watch) is True
    assert "rose" in watch.reason
    assert "\n" not in watch.reason


@settings(max_examples=60)
@given(seeds, inner_steps, st.floats(0, 2), st.floats(0.001, 0.2))
def test_a_falling_loss_is_no_rise(seed: int, steps: int, fall: float, scatter: float) -> None:
    losses = Losses(seed, scatter)
    watch = healthy(losses, steps)
    losses.steps(watch, steps, LEVEL - fall - 2 * scatter)
    assert verdict_of(watch) is False


@pytest.mark.parametrize("steps", [3, 5, 20])
def test_noise_alone_is_rarely_taken_for_harm(steps: int) -> None:
    losses, watch, told = Losses(0), LossWatch(), []
    for _ in range(3000):
        losses.rounds(watch, 1, steps)
        told.append(verdict_of(watch))
    # 0.02 % of normal draws exceed 3.5 standard errors. There are three comparisons, their scatter is estimated, and
    # alarms come several in a row.
    assert told.count(True) <= 0.002 * len(told)
    assert told.count(None) < 10


def test_noise_that_the_steps_of_a_window_share_is_rarely_taken_for_harm() -> None:
    alarms = rounds = 0
    for seed in range(3):
        losses, watch, levels = Losses(seed), LossWatch(), random.Random(seed)
        for _ in range(300):
            losses.rounds(watch, 1, 50, levels.gauss(LEVEL, SCATTER / 2))
            alarms += watch.verdict is True
            rounds += 1
    # The scatter of at most 19 levels is not known well.
    assert alarms < 0.02 * rounds


def test_one_harm_of_before_does_not_hide_the_next() -> None:
    losses = Losses(0)
    watch = healthy(losses, 10, rounds=6)
    losses.steps(watch, 10, LEVEL + 1)  # it is not taken back
    losses.rounds(watch, 8, 10, LEVEL + 1)
    assert verdict_of(watch) is False
    losses.rounds(watch, 1, 10, LEVEL + 1.3)
    assert verdict_of(watch) is True


def bad_steps(watch: LossWatch, count: int) -> None:
    """Adds steps whose loss is NaN."""
    for _ in range(count):
        watch.add_bad_step()


def test_three_steps_with_nan_losses_are_a_verdict() -> None:
    losses = Losses(0)
    watch = healthy(losses, 10)
    bad_steps(watch, 2)
    losses.steps(watch, 10)
    assert verdict_of(watch) is False
    bad_steps(watch, 1)
    assert verdict_of(watch) is True
    assert watch.ruined
    assert "NaN" in watch.reason
    losses.steps(watch, 10, LEVEL - 1)
    assert verdict_of(watch) is True


@pytest.mark.parametrize("next_round", [LossWatch.committed, LossWatch.returned])
def test_a_restart_keeps_the_verdict_on_nan_losses_until_the_next_round(
    next_round: Callable[[LossWatch], None],
) -> None:
    losses = Losses(0)
    watch = healthy(losses, 10)
    bad_steps(watch, 5)
    watch.restart()
    assert verdict_of(watch) is True
    losses.steps(watch, 10)
    watch.restart()
    assert watch.ruined
    assert "NaN" in watch.reason
    next_round(watch)
    assert verdict_of(watch) is None
    assert not watch.ruined


def test_nan_losses_blame_no_commit_that_is_not_judged_or_has_nothing_before_it() -> None:
    losses, watch = Losses(0), LossWatch()
    bad_steps(watch, 5)
    assert verdict_of(watch) is None
    watch.committed()
    bad_steps(watch, 5)  # as before
    assert verdict_of(watch) is None
    begins: list[Callable[[], None]] = [partial(watch.committed, judged=False), watch.returned, watch.restart]
    for begin in begins:
        losses.rounds(watch, 8, 10)
        begin()
        bad_steps(watch, 5)
        assert verdict_of(watch) is None
        assert not watch.ruined


def test_a_loss_that_never_changes_has_not_risen() -> None:
    losses, watch = Losses(0, 0.0), LossWatch()
    losses.rounds(watch, 30, 5)
    assert verdict_of(watch) is False


@settings(max_examples=40)
@given(seeds, st.integers(10, 60))
def test_a_certain_but_tiny_rise_does_not_count(seed: int, steps: int) -> None:
    losses = Losses(seed, scatter=1e-4)
    watch = healthy(losses, steps)
    losses.steps(watch, steps, 1.01 * LEVEL)
    assert verdict_of(watch) is False
    watch = healthy(losses, steps)
    losses.steps(watch, steps, 1.05 * LEVEL)
    assert verdict_of(watch) is True


@settings(max_examples=40)
@given(seeds, st.integers(10, 40), st.floats(0.3, 1))
def test_the_drift_within_a_round_is_no_rise_at_the_next_commit(seed: int, steps: int, drift: float) -> None:
    draw, watch = random.Random(seed), LossWatch()
    for _ in range(9):  # with text of its own, a peer's loss falls within a round, and the commit undoes it
        watch.committed()
        for step in range(steps):
            watch.add_step(draw.gauss(LEVEL - drift * step / steps, 0.01))
        short = verdict_of(watch)
    assert short is False
    watch.committed()
    for step in range(steps // 2):  # the statement is made early: these steps have the highest loss
        watch.add_step(draw.gauss(LEVEL - drift * step / steps, 0.01))
    assert verdict_of(watch) is False


def test_it_cannot_tell_from_few_steps_or_without_a_round_to_compare_with() -> None:
    losses, watch = Losses(0), LossWatch()
    assert verdict_of(watch) is None
    losses.steps(watch, 50)
    assert verdict_of(watch) is None  # nothing was committed
    watch.committed()
    assert verdict_of(watch) is None
    losses.steps(watch, 1, LEVEL + 9)
    assert verdict_of(watch) is None
    assert "1 step " in watch.reason
    losses.steps(watch, 5, LEVEL + 9)
    assert verdict_of(watch) is True


def test_the_scatter_of_two_short_rounds_is_not_known() -> None:
    losses, watch = Losses(0), LossWatch()
    losses.rounds(watch, 2, 5)
    assert verdict_of(watch) is None


def test_rounds_of_one_or_two_steps_have_no_verdict() -> None:
    losses, watch = Losses(0), LossWatch()
    losses.rounds(watch, 15, 2)
    losses.rounds(watch, 1, 10, LEVEL + 9)
    assert verdict_of(watch) is None


def test_a_commit_that_is_not_judged_has_no_verdict_and_sets_a_new_level() -> None:
    losses, watch = Losses(0), LossWatch()
    losses.rounds(watch, 8, 10)
    watch.committed(judged=False)
    losses.steps(watch, 10, LEVEL + 1)
    assert verdict_of(watch) is None
    losses.rounds(watch, 1, 10, LEVEL + 1)
    assert verdict_of(watch) is False
    losses.rounds(watch, 1, 10, LEVEL + 2)
    assert verdict_of(watch) is True


def test_the_round_that_takes_harm_back_has_no_verdict_and_later_ones_are_measured_by_the_healthy() -> None:
    losses = Losses(0)
    watch = healthy(losses, 10)
    losses.steps(watch, 10, LEVEL + 5)
    assert verdict_of(watch) is True
    watch.returned()
    assert verdict_of(watch) is None
    losses.steps(watch, 10)
    assert verdict_of(watch) is None
    # A smaller harm than the first stands out only if that is not part of the measure.
    losses.rounds(watch, 1, 10, LEVEL + 0.3)
    assert verdict_of(watch) is True
    watch.returned()
    losses.steps(watch, 10)
    losses.rounds(watch, 1, 10)
    assert verdict_of(watch) is False


def test_a_return_that_does_not_help_blames_no_commit_and_sets_a_new_level() -> None:
    losses = Losses(0)
    watch = healthy(losses, 10)
    losses.steps(watch, 10, LEVEL + 1)  # all peers have come to other text, say
    assert verdict_of(watch) is True
    watch.returned()
    losses.steps(watch, 10, LEVEL + 1)
    losses.rounds(watch, 1, 10, LEVEL + 1)
    assert verdict_of(watch) is False
    losses.rounds(watch, 1, 10, LEVEL + 2)
    assert verdict_of(watch) is True


def test_after_a_restart_nothing_of_before_counts() -> None:
    losses = Losses(0)
    watch = healthy(losses, 10)
    watch.add_evaluation(1.0, 0.01)
    watch.restart()
    losses.steps(watch, 10, LEVEL + 5)
    assert verdict_of(watch) is None
    watch.committed()
    watch.add_evaluation(9.0, 0.01)
    losses.steps(watch, 10, LEVEL + 5)
    assert verdict_of(watch) is None  # of one earlier round of ten steps, the scatter is not known
    losses.rounds(watch, 4, 10, LEVEL + 5)
    assert verdict_of(watch) is False


def test_evaluations_after_two_commits_in_succession_are_compared() -> None:
    watch = LossWatch()
    watch.committed()
    watch.add_evaluation(2.0, 0.03)
    assert verdict_of(watch) is None
    watch.committed()
    watch.add_evaluation(2.2, 0.03)
    # The errors add up to 0.042: this is more than four of them.
    assert verdict_of(watch) is True
    assert "held-out" in watch.reason
    watch.committed()
    watch.add_evaluation(2.36, 0.03)
    assert verdict_of(watch) is False
    watch.committed()
    watch.committed()
    watch.add_evaluation(9.0, 0.03)  # no evaluation of the commit before
    assert verdict_of(watch) is None
    watch.committed()
    watch.add_evaluation(19.0, None)  # of one sequence: nobody knows how precise
    assert verdict_of(watch) is None


def test_a_return_is_the_measure_of_the_next_evaluation() -> None:
    watch = LossWatch()
    for mean in (2.0, 3.0):
        watch.committed()
        watch.add_evaluation(mean, 0.03)
    assert verdict_of(watch) is True
    watch.returned()
    watch.add_evaluation(2.0, 0.03)
    assert verdict_of(watch) is None
    watch.committed()
    watch.add_evaluation(2.5, 0.03)
    assert verdict_of(watch) is True


def slow_alarm(watch: LossWatch, play: Callable[[], None], rounds: int) -> int | None:
    """Returns after how many rounds the verdict is True first because of many rounds."""
    for number in range(rounds):
        play()
        if verdict_of(watch) and "median" in watch.reason:
            return number
    return None


def test_a_slow_rise_is_found_and_after_a_return_not_at_once_again() -> None:
    losses, watch, level = Losses(0), LossWatch(), LEVEL

    def creep() -> None:
        nonlocal level
        level += 0.01  # a sixth of the standard error of a window of three steps
        losses.rounds(watch, 1, 3, level)

    losses.rounds(watch, 25, 3)
    assert slow_alarm(watch, creep, 60) is not None
    watch.returned()
    losses.steps(watch, 3, level)
    again = slow_alarm(watch, creep, 60)
    assert again is not None
    assert again >= 18


@settings(max_examples=20)
@given(seeds, st.integers(1, 20))
def test_a_slow_fall_is_no_slow_rise(seed: int, steps: int) -> None:
    losses, watch = Losses(seed, scatter=0.0), LossWatch()
    losses.rounds(watch, 60, steps, slope=-0.01)
    assert verdict_of(watch) is not True


def test_its_memory_is_bounded() -> None:
    losses, watch = Losses(0), LossWatch()
    losses.rounds(watch, 40, 100)
    size = len(pickle.dumps(watch))
    losses.rounds(watch, 100, 1000)
    for _ in range(100):
        watch.returned()
        losses.steps(watch, 1000)
        losses.rounds(watch, 1, 1000)
        watch.committed(judged=False)
    assert len(pickle.dumps(watch)) <= size


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from(["committed", "unjudged", "returned", "restart", "step", "step", "step", "evaluate", "bad"])
    )
)
def test_no_order_of_calls_makes_it_fail_and_only_a_judged_commit_has_a_verdict(calls: list[str]) -> None:
    watch, judged = LossWatch(), False
    for number, call in enumerate(calls):
        match call:
            case "step":
                watch.add_step(2.0 + number % 3)
            case "bad":
                watch.add_bad_step()
            case "evaluate":
                watch.add_evaluation(2.0 + number % 5, 0.1)
            case "unjudged":
                watch.committed(judged=False)
            case _:
                getattr(watch, call)()
        judged = judged if call in ("step", "evaluate", "bad") else call == "committed"
        assert verdict_of(watch) is None or judged or watch.ruined
        assert verdict_of(watch) is True or not watch.ruined
        assert watch.reason
