"""A registry of expert kernels: matrix products with one matrix per group of consecutive rows.

Tensor suffixes: T rows sorted by group, D input features, F output features, G groups.

A kernel computes `y[t] = w[g(t)] @ x[t]`, where row t belongs to group g when `ends[g - 1] <= t < ends[g]`.
It is differentiable in x and w, and skips the gradient of a w that does not require one (foreign experts).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_swarm.base.errors import ConfigError

# torch.nn.functional.grouped_mm rejects operands whose rows do not start on a multiple of this many bytes.
GROUPED_MM_ALIGNMENT_BYTES = 16
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ExpertKernel(Protocol):
    """A grouped matrix product over rows that are sorted by group."""

    def __call__(self, x_TD: Tensor, w_GFD: Tensor, ends_G: Tensor) -> Tensor:
        """Returns y_TF; `ends_G` (int32, device of x) holds one past the last row of each group, `ends_G[-1] == T`."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matmul of `x` runs: autocast's if enabled for x's device, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def grouped_mm_applies(x_TD: Tensor, w_GFD: Tensor) -> bool:
    """Returns True if `torch.nn.functional.grouped_mm` supports forward *and* backward of this product.

    Measured on torch 2.13 (CPU): it raises "strides should be multiple of 16 bytes" unless rows of x, w and of the
    output's gradient are aligned, that is D * itemsize and F * itemsize are multiples of 16; torch 2.10 also requires
    aligned start addresses (see transformers' integrations/moe.py). Empty groups are fine; the case of no rows at all
    is handled before a kernel is chosen. Everything else uses one matmul per group.
    """
    _, F, D = w_GFD.shape
    itemsize = x_TD.element_size()
    return (
        x_TD.dtype in GROUPED_MM_DTYPES
        and D * itemsize % GROUPED_MM_ALIGNMENT_BYTES == 0
        and F * itemsize % GROUPED_MM_ALIGNMENT_BYTES == 0
        and x_TD.data_ptr() % GROUPED_MM_ALIGNMENT_BYTES == 0
        and w_GFD.data_ptr() % GROUPED_MM_ALIGNMENT_BYTES == 0
    )


class _GroupedLinear(torch.autograd.Function):
    """Grouped linear layer; a custom Function, because autograd's formula for grouped_mm rejects expanded gradients."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_GFD: Tensor, ends_G: Tensor) -> Tensor:
        grouped = grouped_mm_applies(x_TD, w_GFD)
        ctx.grouped = grouped
        ctx.save_for_backward(x_TD, w_GFD, ends_G)
        if grouped:
            return torch.nn.functional.grouped_mm(x_TD, w_GFD.transpose(1, 2), offs=ends_G)
        y_TF = x_TD.new_empty((x_TD.shape[0], w_GFD.shape[1]))
        for group, start, stop in _ranges(ends_G):
            torch.mm(x_TD[start:stop], w_GFD[group].T, out=y_TF[start:stop])
        return y_TF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, w_GFD, ends_G = ctx.saved_tensors
        needs_x, needs_w, _ = ctx.needs_input_grad
        grad_y_TF = grad_y_TF.contiguous()
        grad_x_TD: Tensor | None = None
        grad_w_GFD: Tensor | None = None
        if ctx.grouped:
            grouped_mm = torch.nn.functional.grouped_mm
            if needs_x:
                grad_x_TD = grouped_mm(grad_y_TF, w_GFD, offs=ends_G)
            if needs_w:
                grad_w_GFD = grouped_mm(grad_y_TF.T, x_TD, offs=ends_G)
            return grad_x_TD, grad_w_GFD, None
        grad_x_TD = torch.empty_like(x_TD) if needs_x else None
        grad_w_GFD = torch.zeros_like(w_GFD) if needs_w else None
        for group, start, stop in _ranges(ends_G):
            if grad_x_TD is not None:
                torch.mm(grad_y_TF[start:stop], w_GFD[group], out=grad_x_TD[start:stop])
            if grad_w_GFD is not None:
                torch.mm(grad_y_TF[start:stop].T, x_TD[start:stop], out=grad_w_GFD[group])
        return grad_x_TD, grad_w_GFD, None


def _ranges(ends_G: Tensor) -> list[tuple[int, int, int]]:
    """Returns (group, start, stop) of every group that has rows; synchronises with the device once."""
    ends = ends_G.tolist()
    return [(g, start, stop) for g, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)) if stop > start]


def torch_kernel(x_TD: Tensor, w_GFD: Tensor, ends_G: Tensor) -> Tensor:
    """Grouped linear layer on CPU and CUDA; computes and returns y_TF in the autocast dtype (see `compute_dtype`).

    Uses `torch.nn.functional.grouped_mm` exactly where `grouped_mm_applies`, else one matmul per group. grouped_mm is
    not autocast-aware, hence the explicit casts. With no rows the result is an empty y_TF, connected to x and w, so
    that w still gets a gradient of zeros.
    """
    dtype = compute_dtype(x_TD)
    x_TD, w_GFD = x_TD.to(dtype).contiguous(), w_GFD.to(dtype).contiguous()
    if x_TD.shape[0] == 0:
        # An empty slice of w keeps the graph connected: its gradient is zeros, as for an expert without tokens.
        return x_TD @ w_GFD.reshape(-1, x_TD.shape[1])[: w_GFD.shape[1]].T
    y_TF: Tensor = _GroupedLinear.apply(x_TD, w_GFD, ends_G)  # type: ignore[no-untyped-call]
    return y_TF


# The metadata of megablocks 0.10 requires an older torch than this package, so it is installed without dependencies.
_INSTALL_MEGABLOCKS = (
    "pip install --no-deps megablocks stanford-stk && pip install --no-deps --no-build-isolation grouped_gemm"
)


def _load_megablocks() -> ExpertKernel:
    for package in ("megablocks", "grouped_gemm"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"kernel 'megablocks' needs the package {package}, which is not installed: {_INSTALL_MEGABLOCKS}"
            )
    try:
        ops: Any = importlib.import_module("megablocks.grouped_gemm_util").ops
        if ops is None:  # megablocks hides why grouped_gemm cannot be imported
            ops = importlib.import_module("grouped_gemm").ops
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"kernel 'megablocks' needs the module {exc.name}, which is not installed: {_INSTALL_MEGABLOCKS}"
        ) from exc
    except Exception as exc:  # extensions fail to load in many ways: libraries, symbols, devices
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise ConfigError(
            f"kernel 'megablocks' does not load: {reason}; it must be built for this torch: {_INSTALL_MEGABLOCKS}"
        ) from exc
    if not torch.cuda.is_available():
        raise ConfigError("kernel 'megablocks' needs a CUDA device, and this machine has none; use the kernel torch")

    def megablocks_kernel(x_TD: Tensor, w_GFD: Tensor, ends_G: Tensor) -> Tensor:
        # grouped_gemm computes in bf16 only, and expects the rows per group as int64 in host memory.
        counts_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1)).to("cpu", torch.int64)
        y_TF: Tensor = ops.gmm(x_TD.to(torch.bfloat16), w_GFD.to(torch.bfloat16), counts_G, trans_b=True)
        return y_TF.to(compute_dtype(x_TD))

    return megablocks_kernel


KERNELS: dict[str, Callable[[], ExpertKernel]] = {"torch": lambda: torch_kernel, "megablocks": _load_megablocks}


def load_kernel(name: str) -> ExpertKernel:
    """Returns the kernel called `name`.

    Raises:
        ConfigError: no such kernel, or the package that it needs is not installed.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown expert kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
    return KERNELS[name]()
