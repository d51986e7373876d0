"""The learning rate as a function of the swarm's progress."""

from __future__ import annotations

import math

from spes_swarm.config import TrainingConfig


def learning_rate(step: float, training: TrainingConfig) -> float:
    """Linear warm-up to the peak, then half a cosine down to `min_learning_rate_ratio` of it.

    Args:
        step: the global step: inner steps of all committed rounds, and of this one so far. The first one is 0 and
            already has a learning rate above 0.
        training: the schedule; `total_steps` includes the warm-up, and the rate stays at its minimum afterwards.
    """
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = (step - training.warmup_steps) / max(1, training.total_steps - training.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    floor = training.min_learning_rate_ratio
    return training.learning_rate * (floor + (1 - floor) * cosine)
