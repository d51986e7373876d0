"""Loads a model directory in the plain `transformers` layout as the initial reference of a run.

Tensors are read one at a time, so a directory of any size needs only the memory of its largest tensor besides the
reference. Experts may be stacked, as `transformers` holds them (`mlp.experts.gate_up_proj`), or in the form in which it
saves them (saved_tensors.py): one by one in most architectures. Only safetensors are read: pickled weights can run
code.

Tensor suffixes: N elements of the flat reference, E experts, F expert ffn dim, D model dim.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.base.user_paths import refuse_lfs_pointer
from spes_swarm.config.model_settings import config_from_settings, repeatable, setting_names
from spes_swarm.config.run import ModelConfig
from spes_swarm.model.saved_tensors import Piece, SavedTensor, saved_tensors
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout, TensorSlot

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
# (name, the parameter that it repeats) in models that tie them; some tools save both.
TIED = ("lm_head.weight", "model.embed_tokens.weight")
_PICKLED = (".bin", ".pt", ".pth")
_SHARD = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")
# Tensors that a quantised model has besides its weights, in the names of fp8, GPTQ, AWQ, bitsandbytes and others.
_OF_QUANTISED = re.compile(
    r"[._](scale_inv|weight_scale|input_scale|scales|qweight|qzeros|g_idx|absmax|quant_map|SCB|blocks|quant_state\..*)$"
)
_QUANTISED = (
    "quantised weights cannot be trained; use the model's weights in bf16 or fp32, or dequantise it and save it with "
    "save_pretrained first"
)
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
                f"{self._directory}: {name} is stored as {stored}, expected {', '.join(_FLOATS)}: "
                + ("convert the model to bf16 or fp32 first" if stored == "F64" else _QUANTISED)
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
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory")
    content = _read_object(directory / CONFIG_FILE)
    if content is None:
        _check_no_adapter([entry.name for entry in directory.iterdir()], str(directory))
        below = next(iter(sorted(directory.glob(f"*/{CONFIG_FILE}"))), None)
        advice = "" if below is None else f"; {below.parent} has one: name that directory"
        raise CheckpointError(f"{directory} is not a transformers model: it has no {CONFIG_FILE}{advice}")
    if not isinstance(content.get("model_type"), str):
        raise CheckpointError(f"{directory / CONFIG_FILE} has no model_type")
    return content


def _read_object(path: Path) -> dict[str, Any] | None:
    """Returns the JSON object in a file; None if there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as exc:
        _refuse_pointer(path)
        raise CheckpointError(f"{path} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def model_section(directory: Path) -> dict[str, Any]:
    """Returns the `run.model` section (`type` and `settings`) that describes the model in a directory.

    Keys that transformers does not use for this type are left out: published configurations contain some.

    Raises:
        CheckpointError: config.json is missing or unreadable.
        ConfigError: the weights are quantised, its type is unknown, or it contains settings that a swarm does not
            accept.
    """
    content = read_config(directory)
    model_type = content["model_type"]
    _check_type(content, directory / CONFIG_FILE)
    if quantisation := content.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        raise ConfigError(
            f"{directory / CONFIG_FILE}: the weights are quantised ({method or 'how is unknown'}): {_QUANTISED}"
        )
    try:
        known = setting_names(model_type)
        named = {_setting_name(model_type, key): value for key, value in content.items() if key not in _BOOKKEEPING}
        settings = {key: value for key, value in named.items() if key in known}
        config_from_settings(model_type, settings)
    except ConfigError as exc:
        raise ConfigError(f"{directory / CONFIG_FILE}: {exc}") from exc
    return {"type": model_type, "settings": settings}


def with_repeated(model: ModelConfig, directory: Path) -> tuple[ModelConfig, list[str]]:
    """Adds what exports repeat of a directory's configuration files; also returns the keys that they do not repeat.

    Raises:
        CheckpointError: config.json or generation_config.json cannot be read.
    """
    known = setting_names(model.type) | _BOOKKEEPING
    content = {_setting_name(model.type, key): value for key, value in read_config(directory).items()}
    extra = {key: value for key, value in content.items() if key not in known}
    if model.pad_token_id is None and content.get("pad_token_id") is not None:
        extra["pad_token_id"] = content["pad_token_id"]
    generation = _read_object(directory / GENERATION_FILE) or {}
    kept_extra, kept = repeatable(model.type, "extra_settings", extra), repeatable(model.type, "generation", generation)
    lost = (extra.keys() - kept_extra.keys()) | (generation.keys() - kept.keys() - _BOOKKEEPING)
    added = dataclasses.replace(
        model, extra_settings=model.extra_settings or kept_extra, generation=model.generation or kept
    )
    return added, sorted(key for key in lost if not key.startswith("_"))


def load_initial_reference(
    directory: Path, layout: Layout, reference_N: FloatArray, model: PreTrainedModel | None = None
) -> str:
    """Fills the flat reference (N,), float32, with the weights in a model directory, e.g. an export or upcycled model.

    All names, shapes and dtypes are checked before the first value is written.

    Args:
        directory: the model.
        layout: that of the run's model.
        reference_N: receives the values.
        model: the run's model on the meta device; without it, only the forms of most architectures are understood.

    Returns:
        Hex BLAKE3 of the values as little-endian fp32 in the order of the layout: the same for the same weights,
        whatever their sharding, dtype on disk and naming of experts.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or not finite; the message names it.
        ValueError: `reference_N` has the wrong size or dtype.
    """
    if reference_N.dtype != np.float32 or reference_N.shape != (layout.num_elements,):
        raise ValueError(f"expected float32 ({layout.num_elements},), got {reference_N.dtype} {reference_N.shape}")
    blocks = [reference_N[block.start : block.stop] for block in layout.blocks]
    with WeightDirectory(directory) as weights:
        places = _Assignment(layout, directory, model).of(weights)
        check_tied(weights, all(slot.name != TIED[0] for slot in layout.blocks[SHARED_BLOCK].slots), directory)
        for name, place in places.items():
            tensor = weights.read(name)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{directory}: {name} has NaN or infinite values")
            for piece, values in zip(place.pieces, tensor.view(len(place.pieces), -1), strict=True):
                torch.from_numpy(piece.view(blocks[piece.block])).copy_(values.view(piece.shape))
    return blake3(reference_N.astype("<f4", copy=False).view(np.uint8).data, max_threads=blake3.AUTO).hexdigest()


# ------------------------------------------------------------------------------------------------ internals


def _check_type(content: dict[str, Any], path: Path) -> None:
    """Refuses a type that the installed transformers does not have; nobody has misspelt it."""
    from transformers import CONFIG_MAPPING, __version__

    model_type, saved_by = content["model_type"], content.get("transformers_version")
    if model_type in CONFIG_MAPPING:
        return
    advice = (
        "upgrade transformers if a newer version has it, or use a mixture of a known type, such as olmoe or qwen3_moe"
    )
    if content.get("auto_map"):
        advice = (
            "it needs code of its own (auto_map), which is never run: use a mixture of a type that transformers has"
        )
    saved = f" (the model was saved by {saved_by})" if isinstance(saved_by, str) else ""
    raise ConfigError(f"{path}: transformers {__version__} has no model type {model_type!r}{saved}: {advice}")


def _setting_name(model_type: str, key: str) -> str:
    """Returns the argument that sets a key of config.json: some types save an argument under another name."""
    from transformers import CONFIG_MAPPING  # takes seconds to import

    config_class = CONFIG_MAPPING[model_type]
    if key in {item.name for item in dataclasses.fields(config_class)}:
        return key
    return next((alias for alias, name in config_class.attribute_map.items() if name == key), key)


class _Assignment:
    """Assigns the tensors in the files to pieces of the reference, which together cover it exactly once."""

    def __init__(self, layout: Layout, directory: Path, model: PreTrainedModel | None) -> None:
        self._directory = directory
        self._num_experts = layout.num_experts
        self._slots = {(slot.name, slot.expert): (block, slot) for block in layout.blocks for slot in block.slots}
        self._starts = [slot.start for block in layout.blocks for slot in block.slots]
        self._in_order = [slot for block in layout.blocks for slot in block.slots]
        self._block_starts = [block.start for block in layout.blocks]
        self._saved = saved_tensors(model, layout) if model is not None else {}
        # What published files contain although this architecture has no such parameter in transformers.
        self._ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def of(self, weights: WeightDirectory) -> dict[str, SavedTensor]:
        """Returns where each tensor belongs."""
        uncovered = {slot: slot.size for slot in self._in_order}
        places: dict[str, SavedTensor] = {}
        for name in weights.names:
            place = self._place(name)
            if place is None:
                self._check_without_place(name, weights)
                continue
            if (shape := weights.shape(name)) != place.shape:
                raise CheckpointError(
                    f"{self._directory}: {name} has the shape {shape}, but the run's model has {place.shape}"
                )
            weights.check_float(name)
            for piece in place.pieces:
                slot = self._slot_of(piece)
                uncovered[slot] -= piece.size
                if uncovered[slot] < 0:
                    raise CheckpointError(f"{self._directory}: {name} appears twice, stacked and per expert")
            places[name] = place
        for slot, size in uncovered.items():
            if size:
                which = slot.name if slot.expert is None else f"{slot.name} (expert {slot.expert})"
                part = " in part" if size < slot.size else ""
                raise CheckpointError(f"{self._directory}: {which} is missing{part}")
        return places

    def _slot_of(self, piece: Piece) -> TensorSlot:
        return self._in_order[bisect_right(self._starts, self._block_starts[piece.block] + piece.start) - 1]

    def _place(self, name: str) -> SavedTensor | None:
        """Returns where a tensor of this name belongs; None if the model has no such parameter."""
        saved = self._saved.get(name)
        if saved is not None and saved.pieces:
            return saved
        canonical = name.replace(".block_sparse_moe.", ".mlp.")
        if (canonical, 0) in self._slots:
            pieces = tuple(self._piece(canonical, expert) for expert in range(self._num_experts))
            return SavedTensor(name, (len(pieces), *pieces[0].shape), pieces)
        piece = self._single(canonical)
        return None if piece is None else SavedTensor(name, piece.shape, (piece,))

    def _single(self, canonical: str) -> Piece | None:
        if (canonical, None) in self._slots:
            return self._piece(canonical, None)
        match = _EXPERT_TENSOR.fullmatch(canonical)
        if match is None:
            return None
        is_down, expert = match["matrix"] in _DOWN, int(match["expert"])
        stack = f"{match['experts']}.{'down_proj' if is_down else 'gate_up_proj'}"
        if (stack, expert) not in self._slots:
            return None
        return self._piece(stack, expert, half=None if is_down else int(match["matrix"] in _UP))

    def _piece(self, name: str, expert: int | None, half: int | None = None) -> Piece:
        """Returns a whole slot; with `half`, its first (0) or second (1) half of rows: gate rows, then up rows."""
        block, slot = self._slots[name, expert]
        shape, start = slot.shape, slot.start - block.start
        if half is not None:
            shape = (shape[0] // 2, *shape[1:])
            start += half * slot.size // 2
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return Piece(block.index, start, shape, strides)

    def _check_without_place(self, name: str, weights: WeightDirectory) -> None:
        """Checks a tensor that is not a parameter of the model."""
        if name == TIED[0] and (TIED[1], None) in self._slots:
            return  # this model ties them; `check_tied` compares
        if any(re.search(pattern, name) for pattern in self._ignored):
            return
        saved = self._saved.get(name)
        if saved is None and _OF_QUANTISED.search(name):
            raise CheckpointError(f"{self._directory}: {name} belongs to quantised weights: {_QUANTISED}")
        if saved is None:
            raise CheckpointError(f"{self._directory}: {name} is not a parameter of the run's model")
        if weights.read(name).any():
            raise CheckpointError(
                f"{self._directory}: {name} is a buffer with values other than zero, which the peers of a run do not "
                "exchange; this model cannot be continued"
            )


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
    check_has_weights([path.name for path in directory.iterdir()], str(directory))
    if not (index := directory / INDEX_FILE).is_file():
        return [directory / SINGLE_FILE]
    names = indexed_files(index)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the {len(names)} files that {INDEX_FILE} lists, such as "
            f"{missing[0]}: download them, too"
        )
    return [directory / name for name in names]


def indexed_files(index: Path) -> list[str]:
    """Returns the names of the files that an index of safetensors lists, in order.

    Raises:
        CheckpointError: it is not such an index.
    """
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        _refuse_pointer(index)
        raise CheckpointError(f"{index} is not an index of safetensors") from exc
    # An index may be untrusted: it may only name files next to it.
    if not names or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{index} is not an index of safetensors")
    return sorted(names)


def check_has_weights(names: Collection[str], where: str) -> None:
    """Refuses a model without safetensors, given the names of its files.

    Raises:
        CheckpointError: there are none; the message starts with `where`.
    """
    if INDEX_FILE in names or SINGLE_FILE in names:
        return
    _check_no_adapter(names, where)
    if any(_SHARD.fullmatch(name) for name in names):
        raise CheckpointError(f"{where} has shards of weights, but no {INDEX_FILE} that lists them: download it, too")
    if any(name.endswith(".gguf") for name in names):
        raise CheckpointError(f"{where} has GGUF weights only: use the model that they were made from")
    if any(Path(name).suffix in _PICKLED for name in names):
        raise CheckpointError(
            f"{where} has pickled weights only, which are never loaded because they can run code: convert them "
            "to safetensors first (transformers: from_pretrained, then save_pretrained)"
        )
    raise CheckpointError(f"{where} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


@contextmanager
def _corruption(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as exc:
        reason, advice = " ".join(str(exc).split()), ""
        if isinstance(exc, SafetensorError) and path.is_file():
            advice = "; " + _what_it_is(path)
        raise CheckpointError(f"{path} cannot be read: {reason}{advice}") from exc


def _what_it_is(path: Path) -> str:
    """Returns what a file is that is not a whole safetensors file, and what to do."""
    _refuse_pointer(path)
    with path.open("rb") as file:
        start = file.read(64)
    size = path.stat().st_size
    if not start:
        return "it is empty: download it again"
    if start[8:10] == b'{"':  # after the length of the header
        return f"it is truncated or damaged at {size:,} bytes: download it again"
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return "it holds pickled weights, which are never loaded: convert them to safetensors first"
    return "it is not a safetensors file: download it again"


def _refuse_pointer(path: Path) -> None:
    with suppress(OSError), path.open("rb") as file:
        refuse_lfs_pointer(path, file.read(64), CheckpointError)


def _check_no_adapter(names: Collection[str], where: str) -> None:
    if "adapter_config.json" in names:
        raise CheckpointError(
            f"{where} is an adapter (LoRA), not a model: merge it into its base model first "
            "(peft: merge_and_unload, then save_pretrained)"
        )
