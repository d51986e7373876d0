"""Tries an expert kernel on a small layer before a peer trains with it: compiled code fails in many ways.

Tensor suffixes as in `expert_mlp`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.expert_mlp import Routing, expert_mlp
from spes_swarm.model.kernels import ExpertKernel, LoopKernel, load_kernel

# Largest accepted relative error against the loop: far above rounding, far below that of a broken kernel.
_MOST_ERROR = {torch.float32: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """A layer of experts, and the tokens of a micro-batch."""

    tokens: int
    top_k: int
    dim: int
    ffn: int
    experts: int
    held: int


# Sizes that every kernel takes.
_TRIAL = LayerShape(tokens=48, top_k=2, dim=64, ffn=32, experts=5, held=2)


def try_kernel(name: str, device: torch.device, precision: str) -> ExpertKernel:
    """Loads a kernel and compares it with the plain loop on a small layer.

    Raises:
        ConfigError: it is unknown, does not load, fails, or computes wrong results.
    """
    kernel = load_kernel(name)
    if device.type == "cpu" and kernel.source == "torch":
        return kernel  # computes as the loop does
    layer = Layer(_TRIAL, device, precision, leave_out=True)
    try:
        error = layer.distance(kernel, LoopKernel())
    except ConfigError:
        raise
    except Exception as exc:  # compiled code fails in many ways
        raise ConfigError(
            f"kernel {name!r} ({kernel.source}) fails at its first product: {_reason(exc)}; use another"
        ) from exc
    if not error < _MOST_ERROR[layer.dtype]:
        raise ConfigError(
            f"kernel {name!r} ({kernel.source}) computes wrong results: they are off by {error:.0%}; use another"
        )
    return kernel


class Layer:
    """A layer of experts with random weights, as a peer computes it."""

    def __init__(self, shape: LayerShape, device: torch.device, precision: str, *, leave_out: bool = False) -> None:
        """Draws random weights, tokens and routing.

        With `leave_out` no token chooses the first or the last expert. If any expert is held, the first one is, and its
        gradients are zeros.
        """
        self.dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._device = device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=dtype).mul_(size[-1] ** -0.5)

        E, H, T, D, F = shape.experts, shape.held, shape.tokens, shape.dim, shape.ffn
        self._held = draw(H, 2 * F, D).requires_grad_(), draw(H, D, F).requires_grad_()
        self._foreign = _Matrices(draw(E - H, 2 * F, D, dtype=self.dtype), draw(E - H, D, F, dtype=self.dtype))
        self._x_TD = draw(T, D).mul_(D**0.5).requires_grad_()
        scores_TE = torch.rand((T, E), generator=generator, device=device)
        if leave_out:
            scores_TE[:, [0, -1]] = -torch.inf
        weights_TK, self._slots_TK = scores_TE.softmax(-1).topk(shape.top_k)
        self._weights_TK = weights_TK.requires_grad_()
        self._grad_TD = draw(T, D)
        self._num_slots = E

    def compute(self, kernel: ExpertKernel) -> list[Tensor]:
        """Returns the output and all gradients."""
        leaves = [self._x_TD, self._weights_TK, *self._held]
        routing = Routing.of(self._slots_TK, self._num_slots, len(self._held[0]), kernel.dispatch)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            y_TD = expert_mlp(self._x_TD, self._weights_TK, self._held, self._foreign, routing, kernel, functional.silu)
        used = [leaf for leaf in leaves if leaf.numel()]
        return [y_TD.detach(), *torch.autograd.grad(y_TD, used, self._grad_TD)]

    def distance(self, kernel: ExpertKernel, reference: ExpertKernel) -> float:
        """Returns the largest relative distance between the results of two kernels."""
        pairs = zip(self.compute(kernel), self.compute(reference), strict=True)
        return max(float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12)) for ours, theirs in pairs)


@dataclass(frozen=True)
class _Matrices:
    gate_up_GFD: Tensor
    down_GDF: Tensor

    def fetch(self) -> _Matrices:
        return self

    def matrices(self, projection: str, dtype: torch.dtype, slots: slice) -> Tensor:
        return (self.gate_up_GFD if projection == "gate_up_proj" else self.down_GDF)[slots].to(dtype)


def _reason(exc: Exception) -> str:
    return " ".join(str(exc).split())[:200] or type(exc).__name__
