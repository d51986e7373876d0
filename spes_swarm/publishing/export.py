"""Exports: the reference in a peer's newest checkpoint as a directory to publish, in the plain `transformers` layout.

The checkpoint is mapped, not read into memory; at most one tensor is copied at a time, and only if its saved form is
not a contiguous view of the reference. The peer may be training meanwhile, and remove old checkpoints. The weight files
of a round are byte-identical, whichever peer writes them: they are the reference, before any merge, and nothing is
computed.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.numpy import save_file
from transformers import PreTrainedModel

from spes_swarm.base.arguments import MAX_SHARD_SIZE, shard_bytes
from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.base.user_paths import new_directory
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import ModelConfig, RunConfig, transformers_config
from spes_swarm.data.chat import end_of_turn
from spes_swarm.data.run_tokenizer import TokenizerPlaces, run_tokenizer
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.model.initial_weights import CONFIG_FILE, GENERATION_FILE, INDEX_FILE
from spes_swarm.model.saved_tensors import Array, SavedTensor, saved_tensors
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.admission.acts import Use
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import digest_of_values, whole_digest
from spes_swarm.publishing.card import CardFacts, Results, results_of_metrics, write_card
from spes_swarm.publishing.publication import (
    CARD_FILE,
    PICTURE_FILE,
    PUBLICATION_FILE,
    LossPoint,
    Publication,
    PublishedBlock,
    RunDescription,
    describe_acts,
    describe_file,
    merge_history,
    parse_publication,
)
from spes_swarm.publishing.tensor_file import map_tensors
from spes_swarm.storage.checkpoint import Checkpoint, has_broken, last_peer, load_newest
from spes_swarm.storage.invitations import read_acts
from spes_swarm.storage.run_directory import RunDirectory

_ATTEMPTS = 3
_WEIGHTS = "model{suffix}.safetensors"

# The reference in an output directory.


@dataclass(frozen=True)
class Snapshot:
    """The reference of one round."""

    manifest: Manifest
    model: PreTrainedModel  # on the meta device
    layout: Layout
    round: int
    versions: tuple[int, ...]
    digests: tuple[bytes, ...]
    blocks: tuple[FloatArray, ...]  # values of each block
    tokens: int | None = None  # trained on by all peers together; None: unknown
    tokenizer: Path | None = None  # its packed files, if the run's founder made it

    @property
    def digest(self) -> str:
        """Hex digest of the whole reference."""
        return whole_digest(self.versions, self.digests).hex()


def take_snapshot(
    manifest: Manifest, round_number: int, versions: Sequence[int], blocks: Sequence[FloatArray]
) -> Snapshot:
    """Returns a snapshot of values in memory, e.g. the blocks of a flat reference.

    Raises:
        ConfigError: this version of transformers cannot build the run's model.
        CheckpointError: this version of transformers lays the model out differently.
    """
    model = empty_model(manifest.run)
    layout = layout_of(model)
    if layout.digest != manifest.layout_digest:
        raise CheckpointError("this version of transformers lays the model out differently from the founder's")
    digests = tuple(digest_of_values(block_N) for block_N in blocks)
    return Snapshot(manifest, model, layout, round_number, tuple(versions), digests, tuple(blocks))


def newest_snapshot(output_dir: Path, on_skipped: Callable[[str], None] = lambda reason: None) -> Snapshot:
    """Returns a snapshot of the newest checkpoint that verifies; `on_skipped` gets the reason for each one skipped.

    Raises:
        CheckpointError: the directory does not belong to a run, or has no usable checkpoint.
        ManifestError: this version of transformers does not support the run's model.
        ConfigError: this version of transformers cannot build the model.
    """
    directory = RunDirectory(output_dir)
    manifest = directory.require_run().build()
    layout = layout_of(empty_model(manifest.run))
    complaints: list[str] = []
    for _ in range(_ATTEMPTS):  # the peer may replace the checkpoint found by a newer one
        writer = last_peer(directory.checkpoints) or ""  # without its identity file, which may be anywhere
        checkpoint, complaints = load_newest(directory.checkpoints, manifest.run_id, writer, layout)
        if checkpoint is not None:
            with contextlib.suppress(FileNotFoundError):
                snapshot = _map(checkpoint, manifest, layout, directory.tokenizer)
                for complaint in complaints:
                    on_skipped(complaint)
                return snapshot
    if not complaints and has_broken(directory.checkpoints):
        complaints.append(f"{directory.checkpoints} has only damaged checkpoints, set aside as broken-...")
    if complaints:
        complaints.append("use the output directory of another peer of the run, which has the same model")
    raise CheckpointError("; ".join(complaints) or f"{directory.checkpoints} has no checkpoint yet")


def _map(checkpoint: Checkpoint, manifest: Manifest, layout: Layout, tokenizer: Path) -> Snapshot:
    meta = checkpoint.meta
    arrays = {name: array for path in checkpoint.reference_paths(layout) for name, array in map_tensors(path).items()}
    blocks = [arrays[block.name] for block in layout.blocks]
    snapshot = take_snapshot(manifest, meta.round, meta.versions, blocks)
    if snapshot.digest != meta.reference_digest:
        raise CheckpointError(f"{checkpoint.path}: the reference does not have the digest that the swarm agreed on")
    return replace(snapshot, tokens=meta.swarm_tokens or None, tokenizer=tokenizer)


def empty_model(run: RunConfig) -> PreTrainedModel:
    """Builds the model of a run on the meta device: names, shapes and configuration, no values.

    Raises:
        ConfigError: this version of transformers cannot build it.
    """
    return build_model(run.model.type, run.model.settings, seed=0, device="cpu", on_meta=True)


def split_blocks(layout: Layout, reference_N: FloatArray) -> list[FloatArray]:
    """Returns the blocks of a flat vector as views."""
    return [reference_N[block.where] for block in layout.blocks]


# The directory.


def export(
    snapshot: Snapshot,
    output_dir: Path,
    destination: Path,
    *,
    results: Results | None = None,
    published: Sequence[LossPoint] = (),
    card: CardFacts | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Publication:
    """Writes a peer's snapshot to a new or empty directory, with what its output directory knows about the run.

    Without `results` they are read from the peer's event log. The history continues the `published` one.

    Raises:
        UserError: as `pack`.
    """
    directory = RunDirectory(output_dir)
    known = results or results_of_metrics(directory.metrics, snapshot.round)
    tokens = known.tokens if known.tokens is not None else snapshot.tokens
    history = merge_history(published, known.history)
    acts = read_acts(directory.acts, snapshot.manifest)
    return pack(
        snapshot,
        destination,
        known.model_copy(update={"tokens": tokens, "history": history}),
        acts=sorted(acts, key=lambda data: isinstance(acts[data], Use)),  # if not all fit, revocations do
        card=card,
        max_shard_size=max_shard_size,
    )


def pack(
    snapshot: Snapshot,
    destination: Path,
    results: Results,
    *,
    acts: Sequence[bytes] = (),
    card: CardFacts | None = None,
    max_shard_size: str = MAX_SHARD_SIZE,
) -> Publication:
    """Writes a complete publication to a new or empty directory, which is complete when it exists.

    Raises:
        UserError: the destination cannot be written, a fact is invalid, the tokenizer cannot be used, or the result
            could not be read.
    """
    manifest = snapshot.manifest
    with new_directory(destination) as directory:
        write_model(manifest, snapshot.model, snapshot.blocks, directory, max_shard_size, snapshot.tokenizer)
        names = sorted(path for path in directory.iterdir() if path.name not in (CARD_FILE, PICTURE_FILE))
        publication = Publication(
            format=1,
            run_id=manifest.run_id,
            run=RunDescription(**{key: base64.b64encode(value).decode() for key, value in manifest.to_wire().items()}),
            round=snapshot.round,
            digest=snapshot.digest,
            layout=snapshot.layout.digest,
            blocks=[
                PublishedBlock(version=version, digest=digest.hex())
                for version, digest in zip(snapshot.versions, snapshot.digests, strict=True)
            ],
            tokens=results.tokens,
            steps=RoundClock.of(manifest.run).step_of(snapshot.round),
            peers=results.peers,
            files=[describe_file(path) for path in names],
            history=[point for point in results.history if point.round <= snapshot.round],
            acts=describe_acts(acts),
        )
        write_card(directory, publication, card or CardFacts())
        content = publication.to_bytes()
        # What no reader would accept is not written. The files need no second look: `describe_file` has just read them,
        # and a target compares them with that again, a directory as it copies them, the Hub as weights arrive.
        parse_publication(content, "the export")
        (directory / PUBLICATION_FILE).write_bytes(content)
    return publication


# The model in it.


def write_model(
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
