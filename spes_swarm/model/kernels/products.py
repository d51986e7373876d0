"""Expert kernels: matrix products with one matrix per group of consecutive rows, and moving rows to and from groups.

Tensor suffixes: T rows sorted by group, D input features, F output features, G groups. In `Dispatch`: T tokens, K
choices of each, S = T * K choices, E slots of experts.

A kernel is three products of one linear layer per group: its output, the gradient of its input, and the gradient of its
matrices. They are separate, because the experts of other peers never need the third (see `expert_mlp`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# grouped_mm rejects operands whose rows do not start on a multiple of this many bytes.
GROUPED_MM_ALIGNMENT_BYTES = 16
GROUPED_MM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Groups:
    """Which rows belong to which group: row t to group g when `ends[g - 1] <= t < ends[g]`."""

    def __init__(self, ends_G: Tensor, counts: Sequence[int] | None = None) -> None:
        """Takes one past the last row of each group: int32, ascending, on the rows' device; the last is T.

        `counts` are the rows of each group, if the host already knows them.
        """
        self.ends_G = ends_G
        self._counts = counts

    @classmethod
    def single(cls, num_rows: int) -> Groups:
        """Returns one group of that many rows, on a CPU."""
        return cls(torch.tensor([num_rows], dtype=torch.int32), [num_rows])

    @property
    def counts(self) -> Sequence[int]:
        """Rows of each group, on the host; the first read waits for the device if they are not known."""
        if self._counts is None:
            ends = self.ends_G.tolist()
            self._counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return self._counts


@dataclass(frozen=True)
class SortedChoices:
    """The experts chosen for tokens, numbered token by token, in the order of their slots."""

    slots_S: Tensor  # int32, ascending
    order_S: Tensor  # int32: the choice at each place
    ends_E: Tensor  # int32: one past the last place of each slot
    top_k: int  # choices of a token


class Dispatch(Protocol):
    """A kernel's own operations that sort choices and move rows to the experts and back."""

    def sort(self, slots_TK: Tensor, num_slots: int) -> SortedChoices:
        """Sorts the choices by slot; those of one slot stay in the order of their tokens."""

    def fits(self, num_rows: int, features: int) -> bool:
        """Returns True if the operations can address a matrix of this size."""

    def gather(self, x_TD: Tensor, choices: SortedChoices) -> Tensor:
        """Returns the token of each sorted choice: x_SD."""

    def combine(self, y_SD: Tensor, choices: SortedChoices, weights_TK: Tensor | None) -> Tensor:
        """Returns the sum of each token's rows, times their weights if there are any: y_TD, in the dtype of y."""


class ExpertKernel(Protocol):
    """One linear layer per group: `y[t] = w[g(t)] @ x[t]`.

    All tensors of a call have one dtype and are contiguous; there is at least one row.
    """

    @property
    def source(self) -> str:
        """The library that provides the kernel, for messages."""

    @property
    def dispatch(self) -> Dispatch | None:
        """Its own operations that move rows; None: torch moves them."""

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns the gradient of x: grad_x_TD."""

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns the gradient of w: grad_w_GFD, zeros for a group without rows."""


class LoopKernel:
    """One matrix product per group, on any device and for any dtype: the yardstick for the others."""

    source = "torch"
    dispatch: Dispatch | None = None

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
