"""The learning rate against a schedule that is written down another way."""

from __future__ import annotations

import cmath
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.config.run import TrainingConfig
from spes_swarm.config.schedule import learning_rate

PEAK = 0.004


def schedule(warmup_steps: int, total_steps: int, ratio: float = 0.1, start: float = 0.0) -> TrainingConfig:
    return TrainingConfig(
        sequence_length=8,
        batch_size=1,
        learning_rate=PEAK,
        warmup_steps=warmup_steps,
        warmup_start_ratio=start,
        total_steps=total_steps,
        min_learning_rate_ratio=ratio,
    )


schedules = st.integers(0, 300).flatmap(
    lambda warmup: st.builds(
        schedule, st.just(warmup), st.integers(warmup + 1, warmup + 300), st.floats(0, 1), st.floats(0, 1)
    )
)


def expected_rate(step: int, training: TrainingConfig) -> float:
    """Warm-up as a weighted mean; the decay as the height of a point that goes half around a circle."""
    warmup_steps, total_steps = training.warmup_steps, training.total_steps
    ratio = training.min_learning_rate_ratio
    if step < warmup_steps:
        done = (1 + step) / warmup_steps
        return PEAK * done + PEAK * training.warmup_start_ratio * (1 - done)
    minimum = ratio * PEAK
    turn = cmath.rect(1.0, math.pi * (min(step, total_steps) - warmup_steps) / (total_steps - warmup_steps))
    return (PEAK + minimum) / 2 + (PEAK - minimum) / 2 * turn.real


@pytest.mark.slow
@given(schedules, st.integers(0, 700))
def test_every_step_has_the_expected_rate(training: TrainingConfig, step: int) -> None:
    assert learning_rate(step, training) == pytest.approx(expected_rate(step, training), rel=1e-9, abs=1e-15)


def test_points_of_a_schedule_worked_out_by_hand() -> None:
    training = schedule(warmup_steps=4, total_steps=104, ratio=0.1)
    rates = {step: learning_rate(step, training) for step in (0, 1, 3, 4, 54, 104, 10**9)}
    assert rates == pytest.approx(
        {0: PEAK / 4, 1: PEAK / 2, 3: PEAK, 4: PEAK, 54: 0.55 * PEAK, 104: 0.1 * PEAK, 10**9: 0.1 * PEAK}
    )


def test_a_warm_up_that_starts_at_a_tenth_rises_from_there_in_equal_steps() -> None:
    training = schedule(warmup_steps=9, total_steps=100, start=0.1)
    rates = [learning_rate(step, training) / PEAK for step in range(10)]
    assert rates == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0])


def test_by_default_the_warm_up_starts_at_nothing() -> None:
    default = TrainingConfig(sequence_length=8, batch_size=1, learning_rate=PEAK, warmup_steps=7, total_steps=9)
    # The same bits as before the setting existed.
    assert [learning_rate(step, default) for step in range(7)] == [PEAK * (step + 1) / 7 for step in range(7)]


@pytest.mark.slow
@given(schedules)
def test_it_rises_to_the_peak_and_then_falls_to_the_minimum(training: TrainingConfig) -> None:
    rates = [learning_rate(step, training) for step in range(training.total_steps + 10)]
    peak_at = training.warmup_steps
    rising, falling = rates[: peak_at + 1], rates[peak_at:]
    assert all(before <= after + 1e-15 for before, after in itertools.pairwise(rising))
    assert all(before >= after - 1e-15 for before, after in itertools.pairwise(falling))
    assert max(rates) == pytest.approx(PEAK)
    assert 0 < rates[0] <= PEAK * (1 + 1e-12)
    assert rates[-10:] == pytest.approx([training.min_learning_rate_ratio * PEAK] * 10)


def test_without_warm_up_it_begins_at_the_peak() -> None:
    assert learning_rate(0, schedule(warmup_steps=0, total_steps=10)) == PEAK
