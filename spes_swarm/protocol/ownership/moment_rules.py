"""Which moments of AdamW and Muon a peer accepts from another one, and their layout in shared memory.

Moments are the only state that a peer takes from a single other peer, without a vote. They must therefore be possible.

AdamW: with decays b1 and b2, b1^2 < b2, no sequence of gradients makes |m| larger than
(1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) * sqrt(v) (Cauchy-Schwarz on the two moving averages), so no forged pair can
make AdamW take larger steps than genuine gradients could.

Nor may v be so large that the adopted expert stops moving. Every gradient is clipped to a norm of max_grad_norm over
all parameters that a peer trains, so the squares of one expert's entries sum to at most max_grad_norm^2 in each step,
and so do their moving averages v. An adopted v stays within this bound, too, since both sides clip alike. Clipping
cannot be switched off, but a run may set max_grad_norm so high that nothing is ever clipped; then only the first bound
has an effect.

Muon: its momentum is a moving average of clipped gradients, m = b m + (1 - b) g, so an expert's part of it is never
longer than max_grad_norm. However long it is, it cannot make a step larger, because updates are orthogonalised; but one
that is too long would determine the direction of hundreds of steps.

Shapes: N elements of one expert's block, K moments per weight: AdamW has a first and a second one, Muon has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.layout import Layout

_ROUNDING = 1.01  # moments are running sums in fp32
_EPSILON = float(np.finfo(np.float32).eps)
_TINY = 1e-12  # squares of tiny gradients underflow


def moments_digest(moments_KN: FloatArray) -> str:
    """Hex BLAKE3 digest of one expert's moments, for the metrics."""
    return blake3(moments_KN.astype("<f4", copy=False).view(np.uint8).data).hexdigest()


class Limits(Protocol):
    """Bounds on the moments of an optimiser; see the top of this file."""

    @property
    def per_weight(self) -> int:
        """Number of moments per weight (K)."""

    def check(self, moments_KN: FloatArray) -> None:
        """Checks finite moments.

        Raises:
            ProtocolError: (`moments`) no training could have produced them.
        """


@dataclass(frozen=True, slots=True)
class MomentLimits:
    """Bounds on the moments of AdamW that gradients can produce."""

    ratio: float  # largest |m| / sqrt(v); infinite if the decays do not bound it
    second: float  # largest sum of one expert's v; infinite if gradients are effectively unclipped

    @classmethod
    def of(cls, max_grad_norm: float, beta1: float, beta2: float) -> MomentLimits:
        """The limits for AdamW with these decays and gradients clipped to `max_grad_norm`."""
        return cls(largest_ratio(beta1, beta2), largest_second(max_grad_norm, beta2))

    @property
    def per_weight(self) -> int:
        """See Limits."""
        return 2

    def check(self, moments_KN: FloatArray) -> None:
        """See Limits; first moments are the first half."""
        first_N, second_N = np.split(moments_KN, 2)
        if (second_N < 0).any():
            raise ProtocolError("moments", "a second moment is negative")
        if float(second_N.sum(dtype=np.float64)) > self.second:
            raise ProtocolError("moments", "second moments that are impossible with gradients clipped to max_grad_norm")
        if math.isfinite(self.ratio) and (np.abs(first_N) > _ROUNDING * self.ratio * np.sqrt(second_N) + _TINY).any():
            raise ProtocolError("moments", "a first moment that is impossible with its second moment")


@dataclass(frozen=True, slots=True)
class MomentumLimit:
    """Bound on the momentum of Muon that gradients can produce."""

    norm: float  # of one expert's momentum; infinite if gradients are effectively unclipped

    @classmethod
    def of(cls, max_grad_norm: float, momentum: float) -> MomentumLimit:
        """The limit for this decay and gradients clipped to `max_grad_norm`.

        A moving average in fp32 is rounded three times per step and forgets 1 - momentum of the accumulated error.
        """
        return cls(max_grad_norm * (_ROUNDING + 3 * _EPSILON / (1 - momentum)))

    @property
    def per_weight(self) -> int:
        """See Limits."""
        return 1

    def check(self, moments_KN: FloatArray) -> None:
        """See Limits."""
        if float(np.linalg.norm(moments_KN.astype(np.float64))) > self.norm:
            raise ProtocolError("moments", "a momentum that is impossible with gradients clipped to max_grad_norm")


def largest_ratio(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v) that gradients can produce."""
    if beta1 * beta1 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))


def largest_second(max_grad_norm: float, beta2: float) -> float:
    """The largest sum of one expert's second moments that clipped gradients can produce, rounding included.

    In each step a moving average in fp32 is rounded three times and forgets 1 - beta2 of the accumulated error.
    """
    return max_grad_norm * max_grad_norm * (_ROUNDING + 3 * _EPSILON / (1 - beta2))


def check_moments(moments_KN: FloatArray, limits: Limits) -> None:
    """Checks the moments of one expert that another peer sent.

    Raises:
        ProtocolError: (`moments`) no training could have produced them.
    """
    if not np.isfinite(moments_KN).all():
        raise ProtocolError("moments", "moments are not finite")
    limits.check(moments_KN)


def slices(values: FloatArray, experts: Sequence[int], layout: Layout, per_weight: int) -> dict[int, FloatArray]:
    """Slices shared memory into the moments (KN,) of each expert."""
    cut: dict[int, FloatArray] = {}
    start = 0
    for expert in experts:
        size = per_weight * layout.expert_block(expert).size
        cut[expert] = values[start : start + size]
        start += size
    return cut


def num_moments(experts: Sequence[int], layout: Layout, per_weight: int) -> int:
    """Number of elements that `slices` needs for these experts."""
    return sum(per_weight * layout.expert_block(expert).size for expert in experts)
