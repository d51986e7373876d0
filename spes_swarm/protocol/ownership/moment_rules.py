"""Which AdamW moments a peer accepts from another one, and how they lie in shared memory.

Moments are the one thing that a peer takes from a single other one, without a vote. What it takes must therefore be
possible: with decays b1 and b2, b1^2 < b2, no sequence of gradients makes |m| larger than
(1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) * sqrt(v) (Cauchy-Schwarz on the two moving averages), so no forged pair can
make AdamW take steps larger than it could have taken by itself.

Nor may v be so large that the adopter's expert stands still. Every gradient is clipped to a norm of max_grad_norm over
all that a peer trains, so the squares of one expert's entries add up to at most max_grad_norm^2 in each step, and so do
their moving averages v. An adopted v keeps within this bound, too, since both sides clip alike. Clipping cannot be
switched off, but a run may set max_grad_norm so high that nothing is ever clipped; then only the first bound says
anything.

Shapes: N elements of one expert's block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.layout import Layout

_ROUNDING = 1.01  # moments are running sums in fp32
_EPSILON = float(np.finfo(np.float32).eps)
_TINY = 1e-12  # and squares of tiny gradients underflow


def moments_digest(moments_2N: FloatArray) -> str:
    """Names the moments of one expert in the metrics."""
    return blake3(moments_2N.astype("<f4", copy=False).view(np.uint8).data).hexdigest()


@dataclass(frozen=True, slots=True)
class MomentLimits:
    """What gradients can bring about; see the head of this file."""

    ratio: float  # largest |m| / sqrt(v); infinite where the decays do not bound it
    second: float  # largest sum of one expert's v; infinite where gradients are as good as unclipped

    @classmethod
    def of(cls, max_grad_norm: float, beta1: float, beta2: float) -> MomentLimits:
        """The limits of AdamW with these decays, where gradients are clipped to that norm."""
        return cls(largest_ratio(beta1, beta2), largest_second(max_grad_norm, beta2))


def largest_ratio(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v) that gradients can bring about."""
    if beta1 * beta1 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))


def largest_second(max_grad_norm: float, beta2: float) -> float:
    """The largest sum of one expert's second moments that clipped gradients can bring about, rounding included.

    In each step a moving average in fp32 is rounded three times, and forgets 1 - beta2 of the error so far.
    """
    return max_grad_norm * max_grad_norm * (_ROUNDING + 3 * _EPSILON / (1 - beta2))


def check_moments(moments_2N: FloatArray, limits: MomentLimits) -> None:
    """Checks first moments (the first half) and second moments that another peer sent.

    Raises:
        ProtocolError: (`moments`) no training could have led to them.
    """
    first_N, second_N = np.split(moments_2N, 2)
    if not np.isfinite(moments_2N).all() or (second_N < 0).any():
        raise ProtocolError("moments", "not finite, or a negative second moment")
    if float(second_N.sum(dtype=np.float64)) > limits.second:
        raise ProtocolError("moments", "second moments that are impossible with gradients clipped to max_grad_norm")
    ratio = limits.ratio
    if math.isfinite(ratio) and (np.abs(first_N) > _ROUNDING * ratio * np.sqrt(second_N) + _TINY).any():
        raise ProtocolError("moments", "a first moment that is impossible with its second moment")


def slices(values: FloatArray, experts: Sequence[int], layout: Layout) -> dict[int, FloatArray]:
    """Cuts shared memory into the moments (2N,) of each expert."""
    cut: dict[int, FloatArray] = {}
    start = 0
    for expert in experts:
        size = 2 * layout.expert_block(expert).size
        cut[expert] = values[start : start + size]
        start += size
    return cut


def num_moments(experts: Sequence[int], layout: Layout) -> int:
    """Size of the memory that `slices` cuts."""
    return sum(2 * layout.expert_block(expert).size for expert in experts)
