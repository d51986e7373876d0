"""Runs, references and output directories for tests of exports and publications, without any swarm."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.publishing.card import Results
from spes_swarm.publishing.export import Snapshot, pack, split_blocks, take_snapshot
from spes_swarm.publishing.publication import Publication
from spes_swarm.storage.checkpoint import CheckpointMeta
from spes_swarm.storage.checkpoint_writing import PeerState, save_checkpoint
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.rounds import identity
from tests.helpers.swarm import TINY_RUN, merged

_COMMON = {key: value for key, value in TINY_RUN["model"]["settings"].items() if key != "num_experts"}
MODELS: dict[str, dict[str, Any]] = {
    "olmoe": {**_COMMON, "num_experts": 8},
    "qwen3_moe": {**_COMMON, "num_experts": 8, "moe_intermediate_size": 16, "head_dim": 16},
    "mixtral": {**_COMMON, "num_local_experts": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
}


@lru_cache(maxsize=16)
def manifest_of(model_type: str = "olmoe", name: str = "test") -> Manifest:
    """The manifest of a small run."""
    settings = MODELS[model_type]
    content = {**TINY_RUN, "name": name, "model": {"type": model_type, "settings": settings}}
    run = RunConfig.from_dict(merged(content, {}), source="test")
    return found_run(run, layout_for(model_type).digest, identity(0))


@lru_cache(maxsize=16)
def layout_for(model_type: str = "olmoe") -> Layout:
    """The layout of a small model."""
    return layout_of(build_model(model_type, MODELS[model_type], 0, "cpu", on_meta=True))


def values(seed: int, model_type: str = "olmoe") -> FloatArray:
    """A reference: small enough for finite logits, and different everywhere."""
    size = layout_for(model_type).num_elements
    return (0.05 * np.random.default_rng(seed).standard_normal(size)).astype(np.float32)


def snapshot(round_number: int, manifest: Manifest | None = None) -> Snapshot:
    """The reference of a round, which follows from its number."""
    found = manifest or manifest_of()
    layout = layout_for(found.run.model.type)
    versions = [round_number, *(max(0, round_number - e) for e in range(layout.num_experts))]
    return take_snapshot(
        found, round_number, versions, split_blocks(layout, values(round_number, found.run.model.type))
    )


def packed(directory: Path, round_number: int, shard_size: str = "100KB", **facts: Any) -> tuple[Path, Publication]:
    """An export of a round, ready to be published."""
    destination = directory / f"export-{round_number}"
    return destination, pack(snapshot(round_number), destination, Results(**facts), max_shard_size=shard_size)


def output_dir(path: Path, round_number: int, peer: int = 0, manifest: Manifest | None = None) -> Path:
    """The output directory of a peer with a checkpoint; peers differ in all but the reference."""
    found = snapshot(round_number, manifest)
    directory = RunDirectory(path)
    directory.checkpoints.mkdir(parents=True, exist_ok=True)
    directory.remember(found.manifest)
    meta = CheckpointMeta(
        run_id=found.manifest.run_id,
        peer_id=identity(peer).peer_id,
        layout_digest=found.layout.digest,
        round=round_number,
        versions=list(found.versions),
        reference_digest=found.digest,
        held=[peer],
        step=10 * round_number + peer,
        tokens=0,
        steps_in_round=0,
        routed=[0] * found.layout.num_experts,
        cursor={},
        commits=[],
        marks="",
    )
    reference_N = np.concatenate(found.blocks)
    state = PeerState(
        meta=meta,
        layout=found.layout,
        reference_N=reference_N,
        digests=found.digests,
        live={0: found.blocks[0] + np.float32(0.01 * (1 + peer))},
        optimiser={"w/exp_avg": np.full(3, peer, dtype=np.float32)},
    )
    save_checkpoint(directory.checkpoints, state, keep=2)
    return path


def hashes(directory: Path, pattern: str = "*.safetensors") -> dict[str, str]:
    """SHA-256 of files by name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.glob(pattern))}


def assert_complete(files: dict[str, bytes], publication: Publication) -> None:
    """What readers see is one publication, whole."""
    for file in publication.files:
        assert hashlib.sha256(files[file.name]).hexdigest() == file.sha256
        assert len(files[file.name]) == file.size
