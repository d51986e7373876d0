"""The form in which `transformers` saves a model: each tensor of the files as strided views of the reference.

Some architectures save tensors that differ from those they compute with: experts one by one, projections split, other
names. transformers describes this rearrangement in its weight conversions; here it is applied to meta tensors. An
export reads the views, and initial weights are written to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError
from spes_swarm.protocol.consensus.layout import Block, Layout, TensorSlot

ITEM_BYTES = 4  # fp32
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A saved tensor, or one expert's slice of it, as a strided view of one block of the reference."""

    block: int
    start: int  # first element, within the block
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def view(self, block_N: FloatArray) -> FloatArray:
        """Returns the piece as a view of its block's values."""
        strides = [ITEM_BYTES * stride for stride in self.strides]
        return np.lib.stride_tricks.as_strided(block_N[self.start :], self.shape, strides)


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One tensor of the weight files."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]  # several: stacked along the first dimension
    buffer: str | None = None  # a persistent buffer of the model: not in the reference, never trained

    @property
    def num_bytes(self) -> int:
        """Size in fp32."""
        return ITEM_BYTES * int(np.prod(self.shape, dtype=np.int64))

    def values(self, blocks: Sequence[FloatArray]) -> FloatArray:
        """Returns the tensor, C-contiguous: a view of `blocks` if possible, else a copy."""
        views = [piece.view(blocks[piece.block]) for piece in self.pieces]
        return np.ascontiguousarray(views[0]) if len(views) == 1 else np.stack(views)


class _View(torch.Tensor):
    """A meta tensor that `contiguous` does not copy, so that conversions of transformers yield views of its storage."""

    def contiguous(self, *_: Any, **__: Any) -> torch.Tensor:
        return self


def saved_tensors(model: PreTrainedModel, layout: Layout) -> dict[str, SavedTensor]:
    """Returns all tensors of an export (of a model on the meta device) by name, in the order in which `save_pretrained`
    writes them.

    Raises:
        ConfigError: transformers saves this model in a form that is not a rearrangement of its parameters.
    """
    parameters = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - parameters.keys()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    probes = {name: torch.empty(tensor.shape, device="meta").as_subclass(_View) for name, tensor in state.items()}
    owners = {probe.untyped_storage()._cdata: name for name, probe in probes.items()}
    found: dict[str, SavedTensor] = {}
    slots = _slots_by_name(layout)
    for name, tensor in revert_weight_conversion(model, dict(probes)).items():
        owner = owners.get(tensor.untyped_storage()._cdata)
        if owner is None:
            raise ConfigError(f"{type(model).__name__}: {name} cannot be exported; its values are computed on saving")
        if owner in parameters:
            found[name] = SavedTensor(name, tuple(tensor.shape), _pieces(name, tensor, slots[owner]))
        else:
            found[name] = SavedTensor(name, tuple(tensor.shape), (), buffer=owner)
    num_found = sum(piece.size for saved in found.values() for piece in saved.pieces)
    if num_found != layout.num_elements:
        raise ConfigError(f"{type(model).__name__}: an export would have {num_found} of {layout.num_elements} weights")
    return found


def pieces_by_block(tensors: Mapping[str, SavedTensor]) -> dict[int, list[tuple[SavedTensor, int]]]:
    """Returns for each block the (tensor, index of the piece) pairs that it consists of."""
    found: dict[int, list[tuple[SavedTensor, int]]] = {}
    for tensor in tensors.values():
        for index, piece in enumerate(tensor.pieces):
            found.setdefault(piece.block, []).append((tensor, index))
    return found


def _slots_by_name(layout: Layout) -> dict[str, list[tuple[Block, TensorSlot]]]:
    slots: dict[str, list[tuple[Block, TensorSlot]]] = {}
    for block in layout.blocks:
        for slot in block.slots:
            slots.setdefault(slot.name, []).append((block, slot))
    return slots


def _pieces(name: str, tensor: torch.Tensor, slots: Sequence[tuple[Block, TensorSlot]]) -> tuple[Piece, ...]:
    """Returns the pieces of a view of a parameter, which has one shared slot or one slot per expert."""
    shape, strides, row = tuple(tensor.shape), tuple(tensor.stride()), slots[0][1].size
    first, offset = divmod(int(tensor.storage_offset()), row)
    if offset + _extent(shape, strides) <= row:
        return (_piece(slots[first], offset, shape, strides),)
    stacked = len(shape) > 0 and shape[0] == len(slots) and strides[0] == row and first == 0
    if stacked and offset + _extent(shape[1:], strides[1:]) <= row:
        return tuple(_piece(slot, offset, shape[1:], strides[1:]) for slot in slots)
    raise ConfigError(f"{name} cannot be exported: it mixes experts in a way that this version does not support")


def _extent(shape: Iterable[int], strides: Iterable[int]) -> int:
    """Returns the number of elements that a view spans, from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _piece(slot: tuple[Block, TensorSlot], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Piece:
    block, place = slot
    return Piece(block.index, place.start - block.start + offset, shape, strides)
