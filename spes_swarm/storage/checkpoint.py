"""Checkpoints: everything that a peer needs to resume as if it had never stopped.

Each is a directory, `checkpoints/round-00000012-step-0000000480/`, with

- `reference-00000.safetensors` and so on: the blocks of the reference; see checkpoint_files.py
- `live.safetensors`: those trained blocks whose live weights differ from the reference
- `optimiser.safetensors`: the optimiser state
- `meta.json`: the digests of all blocks of the reference, of the other two files, and of its own content

A directory with such a name is complete; see checkpoint_writing.py. A checkpoint that fails verification is skipped in
favour of the one before, and so is one of another format, which the version that wrote it can still read.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors.numpy import load_file

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import DIGEST_BYTES
from spes_swarm.storage.checkpoint_files import file_digest, read_blocks, reference_files

_FORMAT = 3
META, LIVE, OPTIMISER = "meta.json", "live.safetensors", "optimiser.safetensors"
_BROKEN = "broken-"
_DIRECTORY = re.compile(r"round-\d{8}-step-\d{10}")


class _OtherFormatError(CheckpointError):
    """A checkpoint has another format than this version's."""


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """The metadata of a checkpoint."""

    run_id: str
    peer_id: str
    layout_digest: str
    round: int
    versions: list[int]
    reference_digest: str
    held: list[int]
    step: int  # local steps so far
    tokens: int  # since the last commit
    steps_in_round: int  # local steps since the last commit
    routed: list[int]  # for each expert, since its last synchronisation
    cursor: dict[str, Any]  # of the data, in JSON values; see data/batch_source.py
    commits: list[int]  # that led to the reference; see protocol/consensus/lineage.py
    marks: str  # hex, of those commits
    swarm_tokens: int = 0  # of all peers, in all commits up to the reference


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk; arrays are read on demand."""

    path: Path
    meta: CheckpointMeta

    def reference_paths(self, layout: Layout) -> list[Path]:
        """The safetensors files that together have the blocks of the reference, each as one tensor with its name."""
        return [self.path / file.name for file in reference_files(layout)]

    def reference(self, layout: Layout, out_N: FloatArray) -> None:
        """Reads the reference into a flat vector."""
        for path in self.reference_paths(layout):
            read_blocks(path, layout.blocks, out_N)

    def live(self, layout: Layout, out_N: FloatArray) -> None:
        """Reads the live weights of the shared and held blocks into a flat vector."""
        trained = layout.trained_blocks(self.meta.held)
        differing = read_blocks(self.path / LIVE, trained, out_N)
        equal = [block for block in trained if block.index not in differing]
        for path in self.reference_paths(layout) if equal else []:
            read_blocks(path, equal, out_N)

    def optimiser(self) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Reads the optimiser state by name."""
        return dict(load_file(self.path / OPTIMISER))


def load_newest(
    directory: Path, run_id: str, peer_id: str, layout: Layout, *, set_aside: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Finds the newest checkpoint that passes verification; also returns which ones were skipped, and why.

    With `set_aside` the damaged ones are renamed to broken-..., so that they neither count as kept checkpoints nor get
    deleted. Those of another format keep their names, by which the version that wrote them finds them, until there are
    enough newer ones; see `superseded`.

    Raises:
        CheckpointError: the newest readable one belongs to another run or another model.
    """
    complaints: list[str] = []
    for path in _of_all_formats(directory):
        try:
            meta = _verify(path, layout)
        except CheckpointError as exc:
            complaints.append(str(exc))
            if set_aside and not isinstance(exc, _OtherFormatError):
                with contextlib.suppress(OSError):  # if it stays, it only counts as one that is kept
                    path.rename(path.with_name(f"{_BROKEN}{path.name}"))
            continue
        if meta.run_id != run_id:
            raise CheckpointError(f"{path} belongs to run {meta.run_id}, not {run_id}; use another --output-dir")
        if meta.layout_digest != layout.digest:
            raise CheckpointError(f"{path} belongs to another model; use another --output-dir")
        if meta.peer_id != peer_id:
            raise CheckpointError(
                f"{path} was written by peer {meta.peer_id}, but the identity in use is {peer_id}; "
                "use that peer's identity file or another --output-dir"
            )
        return Checkpoint(path, meta), complaints
    return None, complaints


def last_peer(directory: Path) -> str | None:
    """Returns the peer that wrote the newest checkpoint whose metadata can be read; None if there is none."""
    for path in checkpoints_in(directory):
        with contextlib.suppress(CheckpointError):
            return read_content(path).meta.peer_id
    return None


def superseded(directory: Path, keep: int) -> list[Path]:
    """Returns the checkpoints, of any format, that are older than the newest `keep` of this version's."""
    kept = checkpoints_in(directory)[:keep]
    return [path for path in _of_all_formats(directory) if len(kept) == keep and path < kept[-1]]


def has_broken(directory: Path) -> bool:
    """Returns True if the directory has checkpoints that were set aside."""
    return any(directory.glob(f"{_BROKEN}*"))


def checkpoints_in(directory: Path) -> list[Path]:
    """Checkpoint directories of this version's format, newest first; they are complete, but not verified."""
    return [path for path in _of_all_formats(directory) if not has_other_format(path)]


def has_other_format(path: Path) -> bool:
    """Returns True if another version has written a checkpoint, in another format."""
    try:
        read_content(path)
    except CheckpointError as exc:
        return isinstance(exc, _OtherFormatError)
    return False


def _of_all_formats(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _DIRECTORY.fullmatch(path.name)), reverse=True)


def _verify(path: Path, layout: Layout) -> CheckpointMeta:
    content = read_content(path)
    try:
        meta, files = content.meta, content.files
        for name in (LIVE, OPTIMISER):
            if file_digest(path / name) != files[name]:
                raise CheckpointError(f"{path}: {name} is corrupt (its digest does not match)")
        # The reference of another model cannot be checked; whoever asks for it is told.
        if meta.layout_digest == layout.digest:
            for file in reference_files(layout):
                if not file.is_intact(path, content.blocks):
                    raise CheckpointError(f"{path}: {file.name} is corrupt (its digest does not match)")
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or path}: {exc.strerror}") from exc
    except (KeyError, IndexError) as exc:
        raise CheckpointError(f"{path}: meta.json is corrupt") from exc
    return meta


@dataclass(frozen=True)
class Content:
    """What `meta.json` says about a checkpoint."""

    files: Mapping[str, str]  # BLAKE3 digests in hex by name
    blocks: tuple[bytes, ...]  # digests of the reference's blocks
    meta: CheckpointMeta

    def to_json(self) -> str:
        """Returns the text of `meta.json`."""
        blocks = [digest.hex() for digest in self.blocks]
        content = {"format": _FORMAT, "files": dict(self.files), "blocks": blocks, **asdict(self.meta)}
        return json.dumps({"digest": _content_digest(content), **content}, indent=1)


def read_content(path: Path) -> Content:
    """Reads the `meta.json` of a checkpoint, and verifies it, but no other file.

    Raises:
        CheckpointError: it is damaged, of another version, or cannot be read.
    """
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise _OtherFormatError(
                f"{path}: written by another version of spes_swarm, in another format; use that version, or let this "
                "peer fetch the reference from others with --initial-peers"
            )
        if content.pop("digest") != _content_digest(content):
            raise CheckpointError(f"{path}: meta.json is corrupt (its digest does not match)")
        del content["format"]
        files = dict(content.pop("files"))
        blocks = tuple(map(bytes.fromhex, content.pop("blocks")))
        if any(len(digest) != DIGEST_BYTES for digest in blocks):
            raise ValueError("not a digest")
        return Content(files, blocks, CheckpointMeta(**content))
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{path}: meta.json is corrupt") from exc


def _content_digest(content: Mapping[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()
