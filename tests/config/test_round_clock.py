"""H as a schedule, against a clock that counts round by round."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.manifest import found_run, open_manifest
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import ScheduleEnd
from tests.helpers.config_values import with_value
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity

Pairs = list[tuple[int, int]]


def counted(first: int, later: Pairs, num_rounds: int) -> tuple[list[int], list[int]]:
    """(steps done after each round, H of the round after it), one round at a time."""
    steps, lengths = [0], []
    for _ in range(num_rounds + 1):
        length = first
        for from_step, inner_steps in later:
            if steps[-1] >= from_step:
                length = inner_steps
        lengths.append(length)
        steps.append(steps[-1] + length)
    return steps[: num_rounds + 1], lengths


schedules = st.builds(
    lambda steps, lengths: list(zip(sorted(steps), lengths, strict=False)),
    st.sets(st.integers(1, 200), max_size=5),
    st.tuples(*[st.integers(1, 30)] * 5),
)


@given(st.integers(1, 30), schedules)
def test_it_agrees_with_counting(first: int, later: Pairs) -> None:
    clock = RoundClock(first, tuple(later))
    steps, lengths = counted(first, later, 60)
    assert [clock.step_of(number) for number in range(61)] == steps
    assert [clock.inner_steps_after(number) for number in range(61)] == lengths
    for step in range(steps[-1]):
        assert clock.round_at(step) == next(number for number in itertools.count() if steps[number] >= step)


def test_without_a_schedule_all_rounds_are_alike() -> None:
    clock = RoundClock(7)
    assert [clock.step_of(number) for number in (0, 1, 2, 10**9)] == [0, 7, 14, 7 * 10**9]
    assert [clock.round_at(step) for step in (0, 1, 7, 8, 7 * 10**9)] == [0, 1, 1, 2, 10**9]
    assert {clock.inner_steps_after(number) for number in (0, 1, 10**9)} == {7}


def test_a_round_is_not_cut_short_when_its_length_changes() -> None:
    clock = RoundClock(5, ((12, 10), (40, 20)))
    assert [clock.step_of(number) for number in range(7)] == [0, 5, 10, 15, 25, 35, 45]
    assert [clock.inner_steps_after(number) for number in range(7)] == [5, 5, 5, 10, 10, 10, 20]


def test_the_run_ends_with_the_round_that_completes_its_steps() -> None:
    """100 steps: 8 rounds of 5 steps, 6 of 10."""
    changes = {"inner_steps": 5, "inner_steps_later": [[40, 10]]}
    end = ScheduleEnd(run_config(round=changes, training={"total_steps": 100, "at_end": "stop"}))
    assert end.last_round == 14


def test_all_experts_take_part_in_every_so_many_rounds_and_in_the_last_one() -> None:
    every = {"inner_steps": 5, "expert_every": 3}
    clock = RoundClock.of(run_config(round=every, training={"total_steps": 50, "at_end": "stop"}))
    assert [number for number in range(11) if clock.synchronises_experts(number)] == [0, 3, 6, 9, 10]
    assert [clock.last_expert_round(number) for number in range(11)] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 10]
    endless = RoundClock.of(run_config(round=every, training={"total_steps": 50}))
    assert not endless.synchronises_experts(10)
    assert all(RoundClock(5).synchronises_experts(number) for number in range(11))


def test_it_travels_in_the_manifest() -> None:
    run = RunConfig.from_dict(with_value("round.inner_steps_later", [[800, 10], [1200, 20]]), "f")
    received = open_manifest(found_run(run, "layout digest", identity(0)).to_wire(), "peer").run
    assert received == run
    assert RoundClock.of(received) == RoundClock(5, ((800, 10), (1200, 20)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (20, ": found 20, expected a list"),
        ([800, 10], ".0: found 800, expected a list"),
        ([[800, 10, 5]], ".0: found 3 values, expected 2"),
        ([[800]], ".0: found 1 value, expected 2"),
        ([[800, "10"]], ".0.1: found '10', expected a whole number, at least 1"),
        ([[800, 0]], ".0.1: found 0, expected a whole number, at least 1"),
        ([[0, 10]], ".0.0: found 0, expected a whole number, at least 1"),
        ([[800, 10], [800, 20]], ".1.0: found 800, expected more than in the pair before (800)"),
    ],
)
def test_a_wrong_schedule_is_refused(value: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(with_value("round.inner_steps_later", value), "f")
    assert f"f: run.round.inner_steps_later{message}" in str(caught.value)
