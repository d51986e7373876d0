"""The plain `transformers` layout on disk: weights, configuration and tokenizer of a run's model.

The weight files of a round are byte-identical, whichever peer writes them: they are the reference, before any merge,
and nothing is computed. Memory: at most one tensor is copied at a time, and only if its saved form is not a contiguous
view of the reference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from spes_swarm.base.arguments import MAX_SHARD_SIZE, shard_bytes
from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.data.run_tokenizer import run_tokenizer
from spes_swarm.model.initial_weights import INDEX_FILE
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.consensus.layout import Block, Layout, TensorSlot

_WEIGHTS = "model{suffix}.safetensors"


def empty_model(run: RunConfig) -> PreTrainedModel:
    """Builds the model of a run on the meta device: names, shapes and configuration, no values.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    return build_model(run.model.type, run.model.settings, seed=0, device="cpu", on_meta=True)


def write_export(
    manifest: Manifest,
    model: PreTrainedModel,
    blocks: Sequence[FloatArray],
    directory: Path,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> None:
    """Writes everything that `from_pretrained` needs, of a model on the meta device and its blocks' values.

    Weight files are smaller than `max_shard_size` ("500MB", "1GB"), unless a single tensor is larger.

    Raises:
        UserError: the tokenizer cannot be loaded.
        OSError, SafetensorError: the directory cannot be written.
    """
    tensors = saved_tensors(model, layout_of(model))
    tokenizer = run_tokenizer(manifest.run)
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]
    model.config.eos_token_id = tokenizer.end_of_text
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.end_of_text
        model.generation_config.save_pretrained(directory)
    tokenizer.save(directory)
    _write_weights(tensors, blocks, _buffers(manifest.run, tensors), directory, max_shard_size)


def _buffers(run: RunConfig, tensors: Mapping[str, SavedTensor]) -> dict[str, Array]:
    """Returns the values of persistent buffers. Few models have any; only for those the model is built."""
    names = {tensor.buffer for tensor in tensors.values() if tensor.buffer is not None}
    if not names:
        return {}
    state = build_model(run.model.type, run.model.settings, seed=0, device="cpu").state_dict()
    return {name: state[name].numpy() for name in names}


def _write_weights(
    tensors: Mapping[str, SavedTensor],
    blocks: Sequence[FloatArray],
    buffers: Mapping[str, Array],
    directory: Path,
    max_shard_size: str,
) -> None:
    """Writes the weight files one by one, named and sharded as by `save_pretrained`."""
    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.num_bytes,
        filename_pattern=_WEIGHTS,
        max_shard_size=shard_bytes(max_shard_size),
    )
    for file_name, names in plan.filename_to_tensors.items():
        arrays: dict[str, Array] = {}
        for name in names:
            buffer = tensors[name].buffer
            arrays[name] = tensors[name].values(blocks) if buffer is None else buffers[buffer]
        save_file(arrays, directory / file_name, metadata={"format": "pt"})
        (directory / file_name).chmod(0o644)  # safetensors makes it private
    if plan.is_sharded:
        total_parameters = sum(block_N.size for block_N in blocks)
        index = {
            "metadata": {"total_parameters": total_parameters, **plan.metadata},
            "weight_map": plan.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX_FILE).write_text(text, encoding="utf-8")


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


def split_blocks(layout: Layout, reference_N: FloatArray) -> list[FloatArray]:
    """Returns the blocks of a flat vector as views."""
    return [reference_N[block.start : block.stop] for block in layout.blocks]


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
    """Returns the number of elements that a view spans, from its first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _piece(slot: tuple[Block, TensorSlot], offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Piece:
    block, place = slot
    return Piece(block.index, place.start - block.start + offset, shape, strides)
