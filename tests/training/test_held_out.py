"""When the loss on held-out text is measured, and how far it can be trusted."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch

from spes_swarm.training.health.held_out import HeldOutText, held_out_loss


def text(every_rounds: int, num_batches: int = 1) -> HeldOutText:
    batches = [np.zeros((2, 8), dtype=np.int64)] * num_batches
    return HeldOutText(batches, every_rounds, torch.device("cpu"), contextlib.nullcontext)


def test_every_so_many_rounds_and_at_both_ends_of_a_stay() -> None:
    five = text(5)
    assert [n for n in range(1, 21) if five.due(n, first=False, last=False)] == [5, 10, 15, 20]
    assert five.due(7, first=True, last=False)
    assert five.due(7, first=False, last=True)


@pytest.mark.parametrize("never", [text(0), text(5, num_batches=0)])
def test_never_where_it_is_off_or_nothing_is_held_out(never: HeldOutText) -> None:
    assert not any(never.due(n, first=True, last=True) for n in range(1, 11))


def test_mean_and_standard_error_worked_out_by_hand() -> None:
    """Of 1, 2, 3, 4: variance 5/3, error of the mean sqrt(5/3 / 4)."""
    found = held_out_loss([1.0, 2.0, 3.0, 4.0])
    assert found.mean == 2.5
    assert found.stderr == pytest.approx(math.sqrt(5 / 12))
    assert held_out_loss([1.5]).stderr is None
    assert held_out_loss([1.5, 1.5]).stderr == 0.0


def test_the_interval_of_two_standard_errors_holds_the_truth_nineteen_times_of_twenty() -> None:
    rng = np.random.default_rng(0)
    split = rng.gamma(9.0, 0.15, 2000)  # losses of sequences: positive, and skewed as those of text are
    hits = 0
    for _ in range(400):
        found = held_out_loss(rng.choice(split, 128).tolist())
        assert found.stderr is not None
        hits += abs(found.mean - split.mean()) < 1.96 * found.stderr
    assert 0.92 < hits / 400 < 0.98


def test_every_target_counts_the_same_in_sequences_of_unequal_numbers() -> None:
    """A mean of 2 over 3 targets and one of 6 over 1 target: 12 / 4; a sequence without any has no say."""
    assert held_out_loss([2.0, math.nan, 6.0], [3, 0, 1]).mean == 3.0
    assert held_out_loss([1.0, 2.0, 4.0], [7, 7, 7]) == held_out_loss([1.0, 2.0, 4.0])
    assert math.isnan(held_out_loss([math.nan], [0]).mean)


def test_the_interval_holds_the_truth_with_unequal_numbers_of_targets_too() -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 40, 2000)
    losses = rng.gamma(9.0, 0.15, 2000) + 0.02 * counts  # long answers are harder
    truth = (losses * counts).sum() / counts.sum()
    hits = 0
    for _ in range(400):
        chosen = rng.integers(0, 2000, 128)
        found = held_out_loss(losses[chosen].tolist(), counts[chosen].tolist())
        assert found.stderr is not None
        hits += abs(found.mean - truth) < 1.96 * found.stderr
    assert 0.92 < hits / 400 < 0.98
