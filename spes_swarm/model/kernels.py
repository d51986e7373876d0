"""A registry of expert kernels: matrix products with one matrix per group of consecutive rows.

Tensor suffixes: T rows sorted by group, D input features, F output features, G groups.

A kernel is three products of one linear layer per group: its output, the gradient of its input, and the gradient of its
matrices. They are separate, because the experts of other peers never need the third (see `expert_mlp`).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from spes_swarm.base.errors import ConfigError

# grouped_mm rejects operands whose rows do not start on a multiple of this many bytes.
GROUPED_MM_ALIGNMENT_BYTES = 16
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Groups:
    """Which rows belong to which group: row t to group g when `ends[g - 1] <= t < ends[g]`."""

    def __init__(self, ends_G: Tensor) -> None:
        """Takes one past the last row of each group: int32, ascending, on the rows' device; the last is T."""
        self.ends_G = ends_G

    @classmethod
    def single(cls, num_rows: int) -> Groups:
        """Returns one group of that many rows, on a CPU."""
        return cls(torch.tensor([num_rows], dtype=torch.int32))

    @cached_property
    def counts(self) -> list[int]:
        """Rows of each group, on the host: reading them waits for the device, once."""
        ends = self.ends_G.tolist()
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


class ExpertKernel(Protocol):
    """One linear layer per group: `y[t] = w[g(t)] @ x[t]`.

    All tensors of a call have one dtype and are contiguous; there is at least one row.
    """

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns the gradient of x: grad_x_TD."""

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns the gradient of w: grad_w_GFD, zeros for a group without rows."""


class LoopKernel:
    """One matrix product per group, on any device and for any dtype: the yardstick for the others."""

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""
        if len(groups.ends_G) == 1:
            return torch.mm(x_TD, w_GFD[0].T)
        y_TF = x_TD.new_empty((x_TD.shape[0], w_GFD.shape[1]))
        for group, rows in _ranges(groups):
            torch.mm(x_TD[rows], w_GFD[group].T, out=y_TF[rows])
        return y_TF

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_x_TD."""
        if len(groups.ends_G) == 1:
            return torch.mm(grad_y_TF, w_GFD[0])
        grad_x_TD = grad_y_TF.new_empty((grad_y_TF.shape[0], w_GFD.shape[2]))
        for group, rows in _ranges(groups):
            torch.mm(grad_y_TF[rows], w_GFD[group], out=grad_x_TD[rows])
        return grad_x_TD

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_w_GFD."""
        if len(groups.ends_G) == 1:
            return torch.mm(grad_y_TF.T, x_TD).unsqueeze(0)
        grad_w_GFD = x_TD.new_zeros((len(groups.counts), grad_y_TF.shape[1], x_TD.shape[1]))
        for group, rows in _ranges(groups):
            torch.mm(grad_y_TF[rows].T, x_TD[rows], out=grad_w_GFD[group])
        return grad_w_GFD


def _ranges(groups: Groups) -> list[tuple[int, slice]]:
    """Returns every group that has rows, and its rows."""
    found, start = [], 0
    for group, count in enumerate(groups.counts):
        if count:
            found.append((group, slice(start, start + count)))
        start += count
    return found


def grouped_mm_applies(first: Tensor, second: Tensor, input_features: int, output_features: int) -> bool:
    """Returns True if `torch.nn.functional.grouped_mm` supports a product of these operands of a layer of this size.

    Measured on torch 2.13 (CPU): it raises "strides should be multiple of 16 bytes" unless rows of x, w and of the
    output's gradient are aligned, that is D * itemsize and F * itemsize are multiples of 16; torch 2.10 also requires
    aligned start addresses (see transformers' integrations/moe.py). Empty groups are fine.
    """
    sizes = (features * first.element_size() for features in (input_features, output_features))
    return first.dtype in GROUPED_MM_DTYPES and all(
        size % GROUPED_MM_ALIGNMENT_BYTES == 0 for size in (*sizes, first.data_ptr(), second.data_ptr())
    )


class TorchKernel(LoopKernel):
    """`torch.nn.functional.grouped_mm` where it applies, else one product per group; on CPU and CUDA."""

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""
        if len(groups.ends_G) == 1 or not grouped_mm_applies(x_TD, w_GFD, w_GFD.shape[2], w_GFD.shape[1]):
            return super().product(x_TD, w_GFD, groups)
        return functional.grouped_mm(x_TD, w_GFD.transpose(1, 2), offs=groups.ends_G)

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_x_TD."""
        if len(groups.ends_G) == 1 or not grouped_mm_applies(grad_y_TF, w_GFD, w_GFD.shape[2], w_GFD.shape[1]):
            return super().input_gradient(grad_y_TF, w_GFD, groups)
        return functional.grouped_mm(grad_y_TF, w_GFD, offs=groups.ends_G)

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_w_GFD."""
        if len(groups.ends_G) == 1 or not grouped_mm_applies(grad_y_TF, x_TD, x_TD.shape[1], grad_y_TF.shape[1]):
            return super().weight_gradient(grad_y_TF, x_TD, groups)
        return functional.grouped_mm(grad_y_TF.T, x_TD, offs=groups.ends_G)


class _MegablocksKernel:
    """The grouped products of megablocks; they compute in bf16 only, on CUDA."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops  # megablocks' `ops` of grouped_gemm

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""
        return self._gmm(x_TD, w_GFD, groups, trans_b=True)

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_x_TD."""
        return self._gmm(grad_y_TF, w_GFD, groups)

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_w_GFD."""
        return self._gmm(grad_y_TF, x_TD, groups, trans_a=True)

    def _gmm(self, a: Tensor, b: Tensor, groups: Groups, *, trans_a: bool = False, trans_b: bool = False) -> Tensor:
        # It expects the rows per group as int64 in host memory.
        counts_G = torch.tensor(groups.counts, dtype=torch.int64)
        with torch.no_grad():
            product: Tensor = self._ops.gmm(a.bfloat16(), b.bfloat16(), counts_G, trans_a, trans_b)
        return product.to(a.dtype)


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
    return _MegablocksKernel(ops)


KERNELS: dict[str, Callable[[], ExpertKernel]] = {
    "torch": TorchKernel,
    "loop": LoopKernel,
    "megablocks": _load_megablocks,
}


def load_kernel(name: str) -> ExpertKernel:
    """Returns the kernel called `name`.

    Raises:
        ConfigError: no such kernel, or the package that it needs is not installed.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown expert kernel {name!r}; known: {', '.join(sorted(KERNELS))}")
    return KERNELS[name]()
