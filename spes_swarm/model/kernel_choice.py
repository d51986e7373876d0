"""Chooses the expert kernel of a device: the one that the user names, or the fastest that works.

Tensor suffixes as in `expert_mlp`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.model_size import EXPERTS_PER_TOKEN, first_of
from spes_swarm.model.expert_mlp import Routing, expert_mlp
from spes_swarm.model.experts import PROJECTIONS
from spes_swarm.model.kernels import KERNELS, ExpertKernel, LoopKernel, load_kernel
from spes_swarm.model.kernels.megablocks import would_be_downloaded
from spes_swarm.model.sparse_model import build_model, find_experts

_WARM_UP, _REPEATS = 2, 5
# Another kernel must take less than this share of the time of `torch`, which needs no extra package.
_CLEARLY_FASTER = 0.95
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

    @classmethod
    def largest(cls, model_type: str, settings: Mapping[str, Any], tokens: int, held: int) -> Self:
        """Returns the shape of a model's largest layer, without creating weights."""
        model = build_model(model_type, settings, 0, "cpu", on_meta=True)
        top_k = first_of(model.config, EXPERTS_PER_TOKEN)
        assert isinstance(top_k, int)  # checked with the run's configuration
        shapes = [tuple(getattr(layer, PROJECTIONS[1]).shape) for layer in find_experts(model).values()]
        experts, dim, ffn = max(shapes, key=lambda shape: shape[1] * shape[2])
        return cls(tokens=tokens, top_k=top_k, dim=dim, ffn=ffn, experts=experts, held=held)


# Sizes that every kernel takes.
_TRIAL = LayerShape(tokens=48, top_k=2, dim=64, ffn=32, experts=5, held=2)


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, and why it was chosen."""

    kernel: str
    kernel_reason: str


def choose_kernel(shape: LayerShape, device: torch.device, precision: str) -> KernelChoice:
    """Returns the fastest kernel for this layer; the reason names each kernel that was skipped, and why.

    On a CPU nothing is measured: experts are computed one at a time (see `expert_mlp`), by all kernels with the same
    `torch.mm`. On a GPU each kernel computes the layer forward and backward a few times, which takes seconds.

    Args:
        shape: of the layer.
        device: where it is computed.
        precision: "fp32", or "bf16" by autocast.
    """
    if device.type == "cpu":
        return KernelChoice("torch", "on a CPU all kernels compute the same products")
    return measured_choice(shape, device, precision)


def measured_choice(shape: LayerShape, device: torch.device, precision: str) -> KernelChoice:
    """Measures all kernels and returns the fastest; the arguments are those of `choose_kernel`."""
    try:
        layer = Layer(shape, device, precision)
    except torch.OutOfMemoryError:
        return KernelChoice("torch", "there is not enough memory to measure the others")
    seconds: dict[str, float] = {}
    sources: dict[str, str] = {}
    remarks = []
    for name in KERNELS:
        if name == "megablocks" and would_be_downloaded():
            remarks.append("skipped: the prebuilt megablocks is code from the Hub; name it to use it")
            continue
        try:
            kernel = try_kernel(name, device, precision)
            seconds[name], sources[name] = layer.seconds(kernel), kernel.source
        except ConfigError as exc:
            remarks.append(f"skipped: {exc}")
        except Exception as exc:  # kernels fail in many ways; the others may work
            remarks.append(f"skipped: kernel {name!r} fails on this layer: {_reason(exc)}")
    del layer
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the model, and other processes on this GPU, need this memory
    return fastest(seconds, sources, remarks)


def fastest(seconds: Mapping[str, float], sources: Mapping[str, str], remarks: Sequence[str] = ()) -> KernelChoice:
    """Returns the kernel that took the least time; `torch` unless another is clearly faster."""
    best = min(seconds, key=lambda name: seconds[name], default="torch")
    if "torch" in seconds and seconds[best] > _CLEARLY_FASTER * seconds["torch"]:
        best = "torch"
    in_order = sorted(seconds, key=lambda name: seconds[name])
    times = ", ".join(f"{_full_name(name, sources[name])} {1e3 * seconds[name]:.3g} ms" for name in in_order)
    return KernelChoice(best, "; ".join([f"a layer takes {times}" if times else "none could be measured", *remarks]))


def _full_name(name: str, source: str) -> str:
    return name if source == "torch" else f"{name} ({source})"


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

    def seconds(self, kernel: ExpertKernel) -> float:
        """Returns the median time of a forward and backward pass."""
        taken = []
        for _ in range(_WARM_UP + _REPEATS):
            self._wait()
            started = time.perf_counter()
            self.compute(kernel)
            self._wait()
            taken.append(time.perf_counter() - started)
        return median(taken[_WARM_UP:])

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
