"""The reference in a peer's output directory: mapped from its newest checkpoint, not read into memory.

The peer may be training meanwhile, and remove old checkpoints.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.config.manifest import Manifest
from spes_swarm.model.sparse_model import layout_of
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import CHUNK_ELEMENTS, block_digest, chunk_digest, whole_digest
from spes_swarm.publishing.plain import empty_model
from spes_swarm.publishing.tensor_file import map_tensors
from spes_swarm.storage.checkpoint import Checkpoint, has_broken, load_newest
from spes_swarm.storage.run_directory import RunDirectory

_ATTEMPTS = 3


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


def digest_of_block(block_N: FloatArray) -> bytes:
    """Returns the digest of a block's values, as in protocol/consensus/reference.py."""
    chunks = [block_N[start : start + CHUNK_ELEMENTS] for start in range(0, block_N.size, CHUNK_ELEMENTS)]
    return block_digest([chunk_digest(chunk_N) for chunk_N in chunks])


def take_snapshot(
    manifest: Manifest,
    round_number: int,
    versions: Sequence[int],
    blocks: Sequence[FloatArray],
    tokens: int | None = None,
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
    digests = tuple(digest_of_block(block_N) for block_N in blocks)
    return Snapshot(manifest, model, layout, round_number, tuple(versions), digests, tuple(blocks), tokens)


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
        writer = _writer(directory.checkpoints)
        checkpoint, complaints = load_newest(directory.checkpoints, manifest.run_id, writer, layout)
        if checkpoint is not None:
            with contextlib.suppress(FileNotFoundError):
                snapshot = replace(_map(checkpoint, manifest, layout), tokenizer=directory.tokenizer)
                for complaint in complaints:
                    on_skipped(complaint)
                return snapshot
    if has_broken(directory.checkpoints):
        complaints.append(f"{directory.checkpoints} has only damaged checkpoints, set aside as broken-...")
    if complaints:
        complaints.append("use the output directory of another peer of the run, which has the same model")
    raise CheckpointError("; ".join(complaints) or f"{directory.checkpoints} has no checkpoint yet")


def _map(checkpoint: Checkpoint, manifest: Manifest, layout: Layout) -> Snapshot:
    meta = checkpoint.meta
    arrays = {name: array for path in checkpoint.reference_paths(layout) for name, array in map_tensors(path).items()}
    blocks = [arrays[block.name] for block in layout.blocks]
    snapshot = take_snapshot(manifest, meta.round, meta.versions, blocks, meta.swarm_tokens or None)
    if snapshot.digest != meta.reference_digest:
        raise CheckpointError(f"{checkpoint.path}: the reference does not have the digest that the swarm agreed on")
    return snapshot


def _writer(checkpoints: Path) -> str:
    """Returns the id of the peer that wrote the checkpoints, without its identity file, which may be anywhere."""
    for path in sorted(checkpoints.glob("round-*-step-*/meta.json"), reverse=True):
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["peer_id"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue  # verifying the checkpoint reports what is wrong
    return ""
