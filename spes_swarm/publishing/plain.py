"""The plain `transformers` layout on disk: weights, configuration and tokenizer of a run's model.

The weight files of a round are byte-identical, whichever peer writes them: they are the reference, before any merge,
and nothing is computed. Memory: at most one tensor is copied at a time, and only if its saved form is not a contiguous
view of the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from spes_swarm.base.arguments import MAX_SHARD_SIZE, shard_bytes
from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import ModelConfig, RunConfig, transformers_config
from spes_swarm.data.chat import end_of_turn
from spes_swarm.data.run_tokenizer import TokenizerPlaces, run_tokenizer
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.model.initial_weights import CONFIG_FILE, GENERATION_FILE, INDEX_FILE
from spes_swarm.model.saved_tensors import Array, SavedTensor, saved_tensors
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.consensus.layout import Layout

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
    packed_tokenizer: Path | None = None,
) -> None:
    """Writes everything that `from_pretrained` needs, of a model on the meta device and its blocks' values.

    `packed_tokenizer` is the file of the peer's output directory, needed if the run's founder made the tokenizer.

    Weight files are smaller than `max_shard_size` ("500MB", "1GB"), unless a single tensor is larger.

    Raises:
        UserError: the tokenizer cannot be loaded.
        OSError, SafetensorError: the directory cannot be written.
    """
    tensors = saved_tensors(model, layout_of(model))
    tokenizer = run_tokenizer(manifest.run, TokenizerPlaces(packed=packed_tokenizer))
    ends = _end_tokens(manifest.run.model, tokenizer)
    model.config.dtype = "float32"
    model.config.architectures = [type(model).__name__]
    model.config.eos_token_id = ends
    model.config.save_pretrained(directory)
    _add_keys(directory / CONFIG_FILE, manifest.run.model)
    if model.can_generate():
        generation = model.generation_config
        generation.eos_token_id = ends
        generation.save_pretrained(directory)
        if brought := manifest.run.model.generation:
            versioned = {"eos_token_id": ends, "transformers_version": generation.transformers_version}
            _write_json(directory / GENERATION_FILE, {**brought, **versioned})
    tokenizer.save(directory)
    _write_weights(tensors, blocks, _buffers(manifest.run, tensors), directory, max_shard_size)


def _end_tokens(model: ModelConfig, tokenizer: Tokenizer) -> int | list[int]:
    """Returns the ids at which generation stops: those of the initial model, and the ends of answers and documents."""
    found: list[int] = []
    brought = [model.generation.get("eos_token_id"), model.settings.get("eos_token_id")]
    for given in (*brought, end_of_turn(tokenizer), tokenizer.end_of_text):
        for token_id in given if isinstance(given, list) else [given]:
            if not isinstance(token_id, int) or not 0 <= token_id < model.vocab_size or token_id in found:
                continue
            # Settings that were written for another tokenizer may name any of its ids.
            if model.initial_weights or token_id == tokenizer.end_of_text or not tokenizer.produces(token_id):
                found.append(token_id)
    return found if len(found) > 1 else found[0]


def _add_keys(path: Path, model: ModelConfig) -> None:
    """Adds to config.json what the initial model's has besides, and what transformers 4 reads instead of newer keys."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    added = dict(model.extra_settings)
    pad = added.pop("pad_token_id", None)
    if content.get("pad_token_id") is None and type(pad) is int and 0 <= pad < model.vocab_size:
        content["pad_token_id"] = pad
    names = transformers_config(model).attribute_map
    added |= {older: content[newer] for older, newer in names.items() if newer in content}
    rope = content.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:  # they are the same in all layers
        added |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        if rope.get("rope_type") != "default":
            added["rope_scaling"] = {key: value for key, value in rope.items() if key not in added}
    _write_json(path, {**added, **content})


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
        _write_json(directory / INDEX_FILE, index)


def split_blocks(layout: Layout, reference_N: FloatArray) -> list[FloatArray]:
    """Returns the blocks of a flat vector as views."""
    return [reference_N[block.start : block.stop] for block in layout.blocks]
