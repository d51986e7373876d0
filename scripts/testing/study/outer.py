"""The outer optimiser of DiLoCo (arXiv 2311.08105): Nesterov momentum on the reference.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

import numpy as np

from scripts.testing.study.arm import OuterConfig
from spes_swarm.base.arrays import FloatArray


class OuterNesterov:
    """Takes the mean difference of a round as the gradient of a step, as torch's SGD with `nesterov=True` does."""

    def __init__(self, config: OuterConfig) -> None:
        self._learning_rate, self._momentum = np.float32(config.learning_rate), np.float32(config.momentum)
        self._buffer_N: FloatArray | None = None

    def step(self, before_N: FloatArray, averaged_N: FloatArray) -> FloatArray:
        """Returns the new reference (N,)."""
        gradient_N = averaged_N - before_N  # negative: the direction of the step
        if self._buffer_N is None:
            self._buffer_N = gradient_N.copy()
        else:
            self._buffer_N *= self._momentum
            self._buffer_N += gradient_N
        gradient_N += self._momentum * self._buffer_N
        gradient_N *= self._learning_rate
        gradient_N += before_N
        return gradient_N
