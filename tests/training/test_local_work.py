"""What counts for a round, and what remains for the next one."""

from __future__ import annotations

import numpy as np
import pytest

from spes_swarm.training.local_work import LocalWork


def steps(work: LocalWork, *losses: float) -> None:
    for loss in losses:
        work.add_step(10, np.array([1, 2, 0]), loss)


def test_a_round_takes_what_was_done_until_it_began() -> None:
    work = LocalWork(3)
    steps(work, 4.0, 2.0)
    taken = work.contribute()
    steps(work, 1.0)
    assert work.commit(taken) == pytest.approx(3.0)
    assert (work.steps, work.tokens, work.routed_E.tolist()) == (1, 10, [1, 2, 0])
    taken = work.contribute()
    assert work.commit(taken) == pytest.approx(1.0)
    assert (work.steps, work.tokens, work.routed_E.tolist()) == (0, 0, [0, 0, 0])


def test_what_a_round_that_failed_had_taken_is_taken_by_the_next() -> None:
    work = LocalWork(3)
    steps(work, 4.0)
    work.contribute()
    steps(work, 2.0)
    taken = work.contribute()
    assert work.commit(taken) == pytest.approx(3.0)
    assert work.steps == 0


def test_tokens_of_experts_that_took_no_part_count_until_they_do() -> None:
    work = LocalWork(3)
    steps(work, 4.0)
    taken = work.contribute()
    steps(work, 2.0)
    work.commit(taken, deferred=[1])
    assert (work.tokens, work.routed_E.tolist()) == (10, [1, 4, 0])
    taken = work.contribute()
    work.commit(taken)
    assert (work.tokens, work.routed_E.tolist()) == (0, [0, 0, 0])


def test_the_loss_is_that_of_steps_whose_loss_is_known() -> None:
    """A checkpoint says how many steps were done, not how they went."""
    work = LocalWork(3)
    work.restore(5, 50, [5, 10, 0])
    taken = work.contribute()
    assert work.commit(taken) is None
    work.restore(5, 50, [5, 10, 0])
    steps(work, 2.0)
    taken = work.contribute()
    assert work.commit(taken) == pytest.approx(2.0)


def test_experts_that_change_hands_and_new_beginnings_count_from_nothing() -> None:
    work = LocalWork(3)
    steps(work, 4.0)
    work.forget_experts([1])
    assert work.routed_E.tolist() == [1, 0, 0]
    work.discard()
    assert (work.steps, work.tokens, work.routed_E.tolist()) == (0, 0, [0, 0, 0])


def test_work_on_a_commit_that_was_taken_back_counts_for_nothing() -> None:
    work = LocalWork(3)
    steps(work, 4.0)
    work.contribute()
    steps(work, 2.0)
    work.take_back([0])
    assert (work.steps, work.tokens, work.routed_E.tolist()) == (0, 0, [0, 4, 0])  # expert 1 has not gone back
    steps(work, 3.0)
    taken = work.contribute()
    assert work.commit(taken) == pytest.approx(3.0)


def test_work_that_a_round_did_not_take_is_taken_by_the_next() -> None:
    work = LocalWork(3)
    steps(work, 4.0)
    work.contribute()
    steps(work, 2.0)
    assert (work.steps, work.tokens) == (2, 20)
    taken = work.contribute()
    assert work.commit(taken) == pytest.approx(3.0)
