"""The plain `transformers` layout on disk: weights, configuration and tokenizer of a run's model.

Whichever peer writes a round, the weight files are the same bytes: they are the reference, before any merge, and
nothing is computed. Memory: one tensor at most is copied, namely one that does not lie in the reference as it is saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from spes_swarm.base.errors import DataError
from spes_swarm.base.user_paths import new_directory
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.data.tokenizer import Tokenizer, load_tokenizer
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.consensus.codec import FloatArray
from spes_swarm.publishing.shard_size import MAX_SHARD_SIZE, shard_bytes
from spes_swarm.publishing.weights import Array, SavedTensor, saved_tensors, split_blocks

_WEIGHTS, _INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"


def empty_model(run: RunConfig) -> PreTrainedModel:
    """The model of a run without memory: names, shapes and configuration.

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
    """Writes everything that `from_pretrained` needs.

    Args:
        manifest: of the run.
        model: of the run, untouched, on the meta device; its configuration is completed.
        blocks: the blocks' values, e.g. mapped from a file.
        directory: existing.
        max_shard_size: of each weight file, unless a single tensor is larger: "500MB", "1GB" ...

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


def export_reference(
    manifest: Manifest, reference_N: FloatArray, destination: Path, max_shard_size: str = MAX_SHARD_SIZE
) -> None:
    """Saves model, configuration and tokenizer, without card and publication manifest.

    Args:
        manifest: of the run.
        reference_N: the flat reference (N,).
        destination: a new or empty directory; complete when it exists.
        max_shard_size: see `write_export`.

    Raises:
        UserError: the destination is not empty or cannot be written, or the tokenizer cannot be loaded.
    """
    model = empty_model(manifest.run)
    blocks = split_blocks(layout_of(model), reference_N)
    with new_directory(destination) as directory:
        write_export(manifest, model, blocks, directory, max_shard_size)


def run_tokenizer(run: RunConfig) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
        DataError: it cannot be loaded, or is another one than the founder's.
    """
    tokenizer = load_tokenizer(run.tokenizer.name)
    if run.tokenizer.digest not in (None, tokenizer.digest):
        raise DataError(f"tokenizer {run.tokenizer.name!r} is not the one that the run was founded with")
    return tokenizer


def _buffers(run: RunConfig, tensors: Mapping[str, SavedTensor]) -> dict[str, Array]:
    """The values of persistent buffers, which few models have; for these the model has to be built."""
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
    """Writes the weight files one after the other, named and cut as `save_pretrained` does."""
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
        (directory / file_name).chmod(0o644)  # the library makes it private
    if plan.is_sharded:
        total_parameters = sum(block_N.size for block_N in blocks)
        index = {
            "metadata": {"total_parameters": total_parameters, **plan.metadata},
            "weight_map": plan.tensor_to_filename,
        }
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / _INDEX).write_text(text, encoding="utf-8")
