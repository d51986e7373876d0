"""Matrices that a peer evaluates but does not train, in fp32 or rounded to fewer bits.

Other peers' experts change only when a round commits, so they can be rounded once, and expanded one layer at a time
when they are needed. `int8` and `int4` scale every 32 consecutive weights of a row together, as GGUF's Q8_0 and Q4_0
do; the scale is a bf16 number, so a weight takes 8.5 or 4.5 bits.

Tensor suffixes: G experts, R rows of a matrix, C columns, P columns with padding, X stored values of a row, N groups of
columns, W weights of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from spes_swarm.model.foreign.storage import ForeignStorage

_GROUP_WEIGHTS = 32
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST = {"int8": 127, "int4": 7}  # the largest rounded weight of each form; the smallest is its negative
FORMS = (*_FLOATS, *_LARGEST)


def bytes_per_weight(form: str) -> float:
    """Returns the bytes that a weight takes in one of `FORMS`, its share of a scale included."""
    if form in _FLOATS:
        return float(_FLOATS[form].itemsize)
    return (0.5 if form == "int4" else 1.0) + torch.bfloat16.itemsize / _GROUP_WEIGHTS


class FrozenStack(nn.Module):
    """A stack of matrices (G, R, C) in one of `FORMS`; its buffers are `values` and `scales`, in that order."""

    values: Tensor
    scales: Tensor

    def __init__(
        self, shape: tuple[int, int, int], form: str, device: torch.device, storage: ForeignStorage | None = None
    ) -> None:
        """Makes a stack of zeros.

        Args:
            shape: number of matrices, their rows and columns.
            form: of the weights.
            device: of the model.
            storage: where the stack is kept; None: on the device.
        """
        super().__init__()
        self.shape = shape
        self.form = form
        self._storage = storage or ForeignStorage()
        G, R, C = shape
        self._num_groups = 0 if form in _FLOATS else -(-C // _GROUP_WEIGHTS)
        dtype = _FLOATS.get(form, torch.uint8 if form == "int4" else torch.int8)
        width = self._num_groups * _GROUP_WEIGHTS // (2 if form == "int4" else 1) or C
        scales_GRN = self._storage.zeros((G, R, self._num_groups), torch.bfloat16, device)
        self.register_buffer("values", self._storage.zeros((G, R, width), dtype, device), persistent=False)
        self.register_buffer("scales", scales_GRN, persistent=False)

    def __len__(self) -> int:
        return self.shape[0]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Called by `nn.Module.to`; `fn` moves a tensor.
        if self._storage.is_fixed:
            return self
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call,no-any-return]  # torch does not annotate it

    def write(self, index: int, matrix_RC: Tensor) -> None:
        """Rounds a matrix of any float dtype into place."""
        self._storage.before_write()
        values_RX, scales_RN = self._rounded(matrix_RC)
        self.values[index].copy_(values_RX)
        self.scales[index].copy_(scales_RN)

    @torch.no_grad()
    def _rounded(self, matrix_RC: Tensor) -> tuple[Tensor, Tensor]:
        if self.form in _FLOATS:
            return matrix_RC.to(_FLOATS[self.form]), self.scales.new_empty((len(matrix_RC), 0))
        R, C = matrix_RC.shape
        padding = self._num_groups * _GROUP_WEIGHTS - C
        groups_RNW = nn.functional.pad(matrix_RC.to(self.values.device, torch.float32), (0, padding)).view(
            R, self._num_groups, _GROUP_WEIGHTS
        )
        largest = _LARGEST[self.form]
        # The weights are divided by the scale as it is stored.
        scales_RN = (groups_RNW.abs().amax(dim=-1) / largest).bfloat16()
        divisors_RN1 = scales_RN.float().clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
        rounded_RP = (groups_RNW / divisors_RN1).round_().clamp_(-largest, largest).to(torch.int8).view(R, -1)
        if self.form == "int4":
            # Two neighbours in a byte, the first in its low half, both with an offset that makes them positive.
            shifted_RP = (rounded_RP + 8).view(torch.uint8)
            rounded_RP = shifted_RP[:, 0::2] | shifted_RP[:, 1::2] << 4
        return rounded_RP, scales_RN

    def read(self, index: int) -> Tensor:
        """Returns one matrix (R, C) in fp32; a view of an fp32 stack."""
        return _expanded(self.values[index], self.scales[index], self.form, torch.float32)[:, : self.shape[2]]

    def expand(
        self, dtype: torch.dtype, experts: slice = slice(None), fetched: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Returns all matrices (G, R, C), or some of them; float stacks of this dtype are not copied.

        `fetched` are the values and scales as the storage has fetched them; None: the buffers are used where they are.
        """
        values, scales = fetched or (self.values, self.scales)
        return _expanded(values[experts], scales[experts], self.form, dtype)[..., : self.shape[2]].contiguous()


def _expanded(values: Tensor, scales: Tensor, form: str, dtype: torch.dtype) -> Tensor:
    if form in _FLOATS:
        return values.to(dtype)
    if form == "int4":
        halves = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
        values = halves.view(torch.int8) - 8
    groups = values.view(*scales.shape, _GROUP_WEIGHTS).to(dtype)
    return groups.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)
