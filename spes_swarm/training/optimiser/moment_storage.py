"""Where and how the moments of an optimiser are stored.

Tensor suffixes: N elements of a parameter, flat.

A storage keeps what it needs as tensors in the optimiser's state of a parameter. In a stack with one row per expert,
each of these has one row per expert, too, so that rows move when experts change hands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spes_swarm.training.optimiser.rounding import (
    BLOCK_ELEMENTS,
    FIRST_MOMENT,
    SCALE_DTYPE,
    SECOND_MOMENT,
    Rounding,
    num_blocks,
)

# By their names in torch.
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's first and second
MOMENTUM = ("momentum_buffer",)  # Muon's only one
FORMS = ("device", "int8", "host")
# Moments in 8 bits or in host memory pass through fp32 copies on the device of so many elements at a time: few enough
# for a CPU's cache, or enough for a GPU to be busy.
_PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 20}
# Elements of equal matrices that Muon multiplies at a time; a larger matrix is multiplied alone.
_BATCH_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}

State = dict[str, Any]  # of one parameter


@dataclass(frozen=True, kw_only=True)
class MomentBytes:
    """Bytes of all moments of a weight."""

    on_device: float
    on_host: float


def moment_bytes_per_weight(form: str, moments: tuple[str, ...] = MOMENTS) -> MomentBytes:
    """Returns the bytes per trained weight in one of `FORMS`; vectors, which stay in fp32, are too few to count."""
    fp32 = len(moments) * torch.float32.itemsize
    if form == "int8":
        return MomentBytes(on_device=len(moments) * (1 + SCALE_DTYPE.itemsize / BLOCK_ELEMENTS), on_host=0.0)
    return MomentBytes(on_device=0.0, on_host=fp32) if form == "host" else MomentBytes(on_device=fp32, on_host=0.0)


def piece_elements(device: torch.device) -> int:
    """Returns how many elements of a parameter an optimiser step expands or moves at a time."""
    return _PIECE_ELEMENTS.get(device.type, _PIECE_ELEMENTS["cuda"])


def batch_elements(device: torch.device) -> int:
    """Returns how many elements of equal matrices Muon multiplies at a time, unless one matrix has more."""
    return _BATCH_ELEMENTS.get(device.type, _BATCH_ELEMENTS["cuda"])


class MomentStorage(Protocol):
    """A form of the moments of one parameter."""

    def zeros(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> State:
        """Returns the state of these moments; they are zero."""

    def pieces(self, parameter: nn.Parameter, row: int | None = None) -> Iterator[slice]:
        """Yields ranges of at most `piece_elements` that together are the whole parameter, or one row of it."""

    def read(self, state: State, moment: str, piece: slice) -> Tensor:
        """Returns one of `pieces` in fp32 (N,): a copy, or a view of what is stored."""

    def write(self, state: State, moment: str, piece: slice, values_N: Tensor, noise_N: Tensor | None = None) -> None:
        """Overwrites one of `pieces`; storages that round do so at random if they are given noise (N,) in [0, 1)."""


class Fp32Storage:
    """Tensors of the parameter's shape, on one device; in host memory they are pinned if there is a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cpu" and torch.cuda.is_available()

    def zeros(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> State:
        """See MomentStorage."""
        return {
            moment: torch.zeros(parameter.shape, dtype=torch.float32, device=self._device, pin_memory=self._pinned)
            for moment in moments
        }

    def pieces(self, parameter: nn.Parameter, row: int | None = None) -> Iterator[slice]:
        """See MomentStorage."""
        return _cut(parameter, 0, parameter.numel()) if row is None else _cut_row(parameter, row)

    def read(self, state: State, moment: str, piece: slice) -> Tensor:
        """See MomentStorage."""
        stored: Tensor = state[moment]
        return stored.view(-1)[piece]

    def write(self, state: State, moment: str, piece: slice, values_N: Tensor, noise_N: Tensor | None = None) -> None:
        """See MomentStorage."""
        target_N = self.read(state, moment, piece)
        if target_N.data_ptr() != values_N.data_ptr():
            target_N.copy_(values_N, non_blocking=self._pinned)


class EightBitStorage:
    """Codes of the parameter's shape, and the scales of their blocks.

    Blocks do not cross the rows of a stack of matrices, because rows move from stack to stack.
    """

    def zeros(self, parameter: nn.Parameter, moments: tuple[str, ...]) -> State:
        """See MomentStorage."""
        rows = _num_rows(parameter)
        state: State = {}
        for moment in moments:
            state[moment] = torch.zeros(parameter.shape, dtype=_rounding(moment).dtype, device=parameter.device)
            shape = (rows, num_blocks(parameter.numel() // rows))
            state[_scales(moment)] = torch.zeros(shape, dtype=SCALE_DTYPE, device=parameter.device)
        return state

    def pieces(self, parameter: nn.Parameter, row: int | None = None) -> Iterator[slice]:
        """See MomentStorage."""
        rows = _num_rows(parameter)
        if row is not None:
            return _cut_row(parameter, row)
        if rows == 1 or parameter.numel() // rows % BLOCK_ELEMENTS == 0:
            return _cut(parameter, 0, parameter.numel())
        return chain.from_iterable(_cut_row(parameter, row) for row in range(rows))

    def read(self, state: State, moment: str, piece: slice) -> Tensor:
        """See MomentStorage."""
        codes, scales = state[moment], state[_scales(moment)]
        return _rounding(moment).decode(codes.view(-1)[piece], scales.view(-1)[_blocks(codes, scales, piece)])

    def write(self, state: State, moment: str, piece: slice, values_N: Tensor, noise_N: Tensor | None = None) -> None:
        """See MomentStorage."""
        codes, scales = state[moment], state[_scales(moment)]
        codes_N, scales_B = _rounding(moment).encode(values_N, noise_N)
        codes.view(-1)[piece] = codes_N
        scales.view(-1)[_blocks(codes, scales, piece)] = scales_B


def _rounding(moment: str) -> Rounding:
    return SECOND_MOMENT if moment == "exp_avg_sq" else FIRST_MOMENT


def _scales(moment: str) -> str:
    return f"{moment}_scales"


def _num_rows(parameter: Tensor) -> int:
    """Returns the number of experts in a stack of matrices; a matrix is one row."""
    return parameter.shape[0] if parameter.dim() > 2 else 1


def _blocks(codes: Tensor, scales: Tensor, piece: slice) -> slice:
    rows, blocks_per_row = scales.shape
    row, offset = divmod(piece.start, codes.numel() // rows)
    first = row * blocks_per_row + offset // BLOCK_ELEMENTS
    return slice(first, first + num_blocks(piece.stop - piece.start))


def _cut_row(parameter: Tensor, row: int) -> Iterator[slice]:
    size = parameter.numel() // parameter.shape[0]
    return _cut(parameter, row * size, (row + 1) * size)


def _cut(parameter: Tensor, start: int, stop: int) -> Iterator[slice]:
    size = piece_elements(parameter.device)
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))
