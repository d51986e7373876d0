"""Loads a model directory in the plain `transformers` layout as the initial reference of a run.

Tensors are read one at a time, so a directory of any size needs only the memory of its largest tensor besides the
reference. Experts may be stacked, as `transformers` holds them (`mlp.experts.gate_up_proj`), or separate, as it saves
them: `mlp.experts.3.up_proj.weight` (OLMoE, Qwen3-MoE, FlexOlmo and others) or `block_sparse_moe.experts.3.w3.weight`
(Mixtral). Only safetensors are read: pickled weights can run code.

Tensor suffixes: N elements of the flat reference, E experts, F expert ffn dim, D model dim.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.config.model_settings import config_from_settings
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout, TensorSlot

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
# (name, the parameter that it repeats) in models that tie them; some tools save both.
TIED = ("lm_head.weight", "model.embed_tokens.weight")
_ROWS_COMPARED = 1024
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Name of a matrix of a single expert, and which of its three matrices it is.
_EXPERT_TENSOR = re.compile(
    r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj|w1|w2|w3)\.weight"
)
_UP, _DOWN = ("up_proj", "w3"), ("down_proj", "w2")
# Keys that describe the file or how it was loaded, not the function that the model computes.
_BOOKKEEPING = frozenset(
    {"_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"}
)


class WeightDirectory:
    """The safetensors of a model directory: names and shapes from the headers, values on demand. A context manager.

    Values are read with pread(2): pages of a memory map would count towards this process's memory.
    """

    def __init__(self, directory: Path) -> None:
        """Opens the files and reads their headers.

        Raises:
            CheckpointError: no such directory, no safetensors in it, or a file that is missing or corrupt.
        """
        self._directory = directory
        self.files = tuple(_weight_files(directory))  # the weight files, in the order of their names
        self._stack = ExitStack()
        self._file_of: dict[str, Any] = {}
        with ExitStack() as opening:
            for path in self.files:
                with _corruption(path):
                    file = opening.enter_context(safe_open(path, framework="pt", backend="pread"))
                for name in file.offset_keys():
                    if name in self._file_of:
                        raise CheckpointError(f"{path}: tensor {name} is also in another file of {directory}")
                    self._file_of[name] = file
            self._stack = opening.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._file_of.clear()
        self._stack.close()

    @property
    def names(self) -> Collection[str]:
        """Names of all tensors, file by file, in the order in which they are stored."""
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def check_float(self, name: str) -> None:
        """Refuses a tensor that is not fp32, bf16 or fp16.

        Raises:
            CheckpointError: the tensor holds integers or 8-bit floats, e.g. of a quantised model.
        """
        stored = self._file_of[name].get_slice(name).get_dtype()
        if stored not in _FLOATS:
            raise CheckpointError(
                f"{self._directory}: {name} is stored as {stored}, expected {', '.join(_FLOATS)}; "
                "quantised weights cannot be used"
            )

    def read(self, name: str) -> Tensor:
        """Returns a tensor in its stored dtype, in its own memory.

        Raises:
            CheckpointError: the file is shorter than its header says, or cannot be read.
        """
        with _corruption(self._directory):
            tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def are_equal(self, name: str, other: str) -> bool:
        """Returns True if two tensors have the same shape and values. Reads a few rows at a time."""
        if (shape := self.shape(name)) != self.shape(other):
            return False
        one, two = self._file_of[name].get_slice(name), self._file_of[other].get_slice(other)
        with _corruption(self._directory):
            rows = (slice(i, min(i + _ROWS_COMPARED, shape[0])) for i in range(0, shape[0], _ROWS_COMPARED))
            return all(torch.equal(one[piece], two[piece]) for piece in rows)


def read_config(directory: Path) -> dict[str, Any]:
    """Returns the content of config.json.

    Raises:
        CheckpointError: config.json is missing, or is not a JSON object with a model_type.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise CheckpointError(f"{directory} is not a transformers model: it has no {CONFIG_FILE}") from exc
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise CheckpointError(f"{path} has no model_type")
    return content


def model_section(directory: Path) -> dict[str, Any]:
    """Returns the `run.model` section (`type` and `settings`) that describes the model in a directory.

    Raises:
        CheckpointError: config.json is missing or unreadable.
        ConfigError: it contains settings that a swarm does not accept, e.g. code or quantisation.
    """
    content = read_config(directory)
    model_type = content["model_type"]
    settings = {_setting_name(model_type, key): value for key, value in content.items() if key not in _BOOKKEEPING}
    try:
        config_from_settings(model_type, settings)
    except ConfigError as exc:
        raise ConfigError(f"{directory / CONFIG_FILE}: {exc}") from exc
    return {"type": model_type, "settings": settings}


def load_initial_reference(directory: Path, layout: Layout, reference_N: FloatArray) -> str:
    """Fills the flat reference (N,), float32, with the weights in a model directory, e.g. an export or upcycled model.

    All names, shapes and dtypes are checked before the first value is written.

    Returns:
        Hex BLAKE3 of the values as little-endian fp32 in the order of the layout: the same for the same weights,
        whatever their sharding, dtype on disk and naming of experts.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or not finite; the message names it.
        ValueError: `reference_N` has the wrong size or dtype.
    """
    if reference_N.dtype != np.float32 or reference_N.shape != (layout.num_elements,):
        raise ValueError(f"expected float32 ({layout.num_elements},), got {reference_N.dtype} {reference_N.shape}")
    with WeightDirectory(directory) as weights:
        places = _assign(weights, layout, directory)
        check_tied(weights, all(slot.name != TIED[0] for slot in layout.blocks[SHARED_BLOCK].slots), directory)
        for name, place in places.items():
            tensor = weights.read(name)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{directory}: {name} has NaN or infinite values")
            for slot, values_N in zip(place.slots, tensor.reshape(len(place.slots), -1), strict=True):
                start = slot.start + place.offset
                torch.from_numpy(reference_N[start : start + place.size]).copy_(values_N)
    return blake3(reference_N.astype("<f4", copy=False).view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()


# ------------------------------------------------------------------------------------------------ internals


def _setting_name(model_type: str, key: str) -> str:
    """Returns the argument that sets a key of config.json: some types save an argument under another name."""
    from transformers import CONFIG_MAPPING  # takes seconds to import

    if model_type not in CONFIG_MAPPING:
        return key  # `config_from_settings` reports this
    config_class = CONFIG_MAPPING[model_type]
    if key in {item.name for item in dataclasses.fields(config_class)}:
        return key
    return next((alias for alias, name in config_class.attribute_map.items() if name == key), key)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor in a file belongs: one slot of the layout, or one for each expert of a stacked tensor."""

    shape: tuple[int, ...]  # expected in the file
    slots: tuple[TensorSlot, ...]
    offset: int = 0  # of its first element within each slot

    @property
    def size(self) -> int:
        """Elements per slot."""
        return math.prod(self.shape) // len(self.slots)


_Slots = dict[tuple[str, int | None], TensorSlot]


def _assign(weights: WeightDirectory, layout: Layout, directory: Path) -> dict[str, _Place]:
    """Returns the place of each tensor in the files; together they cover the reference exactly once."""
    slots: _Slots = {(slot.name, slot.expert): slot for block in layout.blocks for slot in block.slots}
    uncovered = {slot: slot.size for slot in slots.values()}
    places: dict[str, _Place] = {}
    for name in weights.names:
        place = _place(name, slots, layout.num_experts)
        if place is None:
            if name == TIED[0] and (TIED[1], None) in slots:
                continue  # this model ties them; `check_tied` compares
            raise CheckpointError(f"{directory}: {name} is not a parameter of the run's model")
        if weights.shape(name) != place.shape:
            raise CheckpointError(
                f"{directory}: {name} has the shape {weights.shape(name)}, but the run's model has {place.shape}"
            )
        weights.check_float(name)
        for slot in place.slots:
            uncovered[slot] -= place.size
            if uncovered[slot] < 0:
                raise CheckpointError(f"{directory}: {name} appears twice, stacked and per expert")
        places[name] = place
    for slot, size in uncovered.items():
        if size:
            which = slot.name if slot.expert is None else f"{slot.name} (expert {slot.expert})"
            raise CheckpointError(f"{directory}: {which} is missing" + (" in part" if size < slot.size else ""))
    return places


def _place(name: str, slots: _Slots, num_experts: int) -> _Place | None:
    """Returns where a tensor of this name belongs; None if the model has no such parameter."""
    canonical = name.replace(".block_sparse_moe.", ".mlp.")
    if shared := slots.get((canonical, None)):
        return _Place(shared.shape, (shared,))
    if (canonical, 0) in slots:
        stack = tuple(slots[canonical, expert] for expert in range(num_experts))
        return _Place((num_experts, *stack[0].shape), stack)
    match = _EXPERT_TENSOR.fullmatch(canonical)
    if match is None:
        return None
    matrix, expert = match["matrix"], int(match["expert"])
    if slot := slots.get((f"{match['experts']}.down_proj", expert)) if matrix in _DOWN else None:
        return _Place(slot.shape, (slot,))
    if slot := slots.get((f"{match['experts']}.gate_up_proj", expert)) if matrix not in _DOWN else None:
        double_F, D = slot.shape  # gate rows first, then up rows
        return _Place((double_F // 2, D), (slot,), offset=slot.size // 2 if matrix in _UP else 0)
    return None


def check_tied(weights: WeightDirectory, is_tied: bool, directory: Path) -> None:
    """Checks that an output head that is tied to the embedding but saved separately equals the embedding.

    Raises:
        CheckpointError: they differ.
    """
    if is_tied and set(TIED) <= set(weights.names) and not weights.are_equal(*TIED):
        raise CheckpointError(f"{directory}: {TIED[0]} differs from {TIED[1]}, but the model's configuration ties them")


def _weight_files(directory: Path) -> list[Path]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    if (index := directory / INDEX_FILE).is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
            raise CheckpointError(f"{index} is not an index of safetensors") from exc
        # An index may be untrusted: it may only name files beside it.
        if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise CheckpointError(f"{index} is not an index of safetensors")
        return [directory / name for name in sorted(names)]
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    if any(path.suffix in (".bin", ".pt", ".pth") for path in directory.iterdir()):
        raise CheckpointError(
            f"{directory} has pickled weights only, which are never loaded because they can run code: convert them "
            "to safetensors first"
        )
    raise CheckpointError(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


@contextmanager
def _corruption(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(exc).split())}") from exc
