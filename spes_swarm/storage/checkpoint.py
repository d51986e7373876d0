"""Checkpoints: everything that a peer needs to resume as if it had never stopped.

Each is a directory, `checkpoints/round-00000012-step-0000000480/`, with the reference, the live weights of the shared
and held blocks, the optimiser state, and `meta.json`, which has the BLAKE3 digests of the other files and of its own
content. It is written under a temporary name, synced to disk and renamed, so a directory with the final name is
complete. A checkpoint that fails verification is skipped in favour of the one before.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.base.user_paths import sync_to_disk
from spes_swarm.protocol.consensus.layout import Block, Layout

FORMAT = 2
_BROKEN = "broken-"
_DIRECTORY = re.compile(r"round-\d{8}-step-\d{10}")
_REFERENCE, _LIVE, _OPTIMISER = "reference.safetensors", "live.safetensors", "optimiser.safetensors"

Arrays = Mapping[str, np.ndarray[Any, np.dtype[Any]]]


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
    routed: list[int]  # since the last commit, for each expert
    cursor: dict[str, int]  # of the data sampler
    commits: list[int]  # that led to the reference; see protocol/consensus/lineage.py
    marks: str  # hex, of those commits
    swarm_tokens: int = 0  # of all peers, in all commits up to the reference


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk; arrays are read on demand."""

    path: Path
    meta: CheckpointMeta

    def reference(self, layout: Layout, out_N: FloatArray) -> None:
        """Reads the reference into a flat vector."""
        _read_blocks(self.path / _REFERENCE, layout.blocks, out_N)

    def live(self, layout: Layout, out_N: FloatArray) -> None:
        """Reads the live weights of the shared and held blocks into a flat vector."""
        _read_blocks(self.path / _LIVE, layout.trained_blocks(self.meta.held), out_N)

    def optimiser(self) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        """Reads the optimiser state by name."""
        return dict(load_file(self.path / _OPTIMISER))


def save_checkpoint(
    directory: Path,
    meta: CheckpointMeta,
    layout: Layout,
    reference_N: FloatArray,
    live_N: FloatArray,
    optimiser: Arrays,
    keep: int,
) -> Path:
    """Writes a checkpoint atomically and removes all but the newest `keep`.

    Raises:
        CheckpointError: it could not be written, for instance because the disk is full; earlier ones are untouched.
    """
    final = directory / f"round-{meta.round:08d}-step-{meta.step:010d}"
    if final.exists():
        return final  # nothing has changed since it was written
    temporary = directory / f".{final.name}.{os.getpid()}"
    trained = layout.trained_blocks(meta.held)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_file(_blocks(layout.blocks, reference_N), temporary / _REFERENCE)
        save_file(_blocks(trained, live_N), temporary / _LIVE)
        save_file(dict(optimiser), temporary / _OPTIMISER)
        files = {name: _file_digest(temporary / name) for name in (_REFERENCE, _LIVE, _OPTIMISER)}
        content = {"format": FORMAT, "files": files, **asdict(meta)}
        text = json.dumps({"digest": _content_digest(content), **content}, indent=1)
        (temporary / "meta.json").write_text(text, encoding="utf-8")
        for path in temporary.iterdir():
            sync_to_disk(path)
        sync_to_disk(temporary)
        temporary.rename(final)
        sync_to_disk(directory)
    except (OSError, SafetensorError) as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        newest = next(_candidates(directory), None)
        kept = f"the last good one is {newest}" if newest else "there is no earlier one"
        # safetensors wraps the system's error message.
        full = any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))
        advice = f"; free space for {directory}, or move the output directory to a larger disk" if full else ""
        raise CheckpointError(
            f"the checkpoint of round {meta.round} could not be written: {reason}; {kept}{advice}"
        ) from exc
    for old in list(_candidates(directory))[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_newest(
    directory: Path, run_id: str, peer_id: str, layout: Layout, *, set_aside: bool = False
) -> tuple[Checkpoint | None, list[str]]:
    """Finds the newest checkpoint that passes verification; also returns which ones were skipped, and why.

    With `set_aside` these are renamed to broken-..., so that they neither count as kept checkpoints nor get deleted.

    Raises:
        CheckpointError: the newest readable one belongs to another run or another model.
    """
    complaints: list[str] = []
    for path in list(_candidates(directory)):
        try:
            meta = _verify(path)
        except CheckpointError as exc:
            complaints.append(str(exc))
            if set_aside:
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


def has_broken(directory: Path) -> bool:
    """Returns True if the directory has checkpoints that were set aside."""
    return any(directory.glob(f"{_BROKEN}*"))


def _candidates(directory: Path) -> Iterator[Path]:
    """Checkpoint directories, newest first."""
    if directory.is_dir():
        yield from sorted((p for p in directory.iterdir() if _DIRECTORY.fullmatch(p.name)), reverse=True)


def _verify(path: Path) -> CheckpointMeta:
    try:
        content = json.loads((path / "meta.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path}: written by another version of spes_swarm")
        if content.pop("digest") != _content_digest(content):
            raise CheckpointError(f"{path}: meta.json is corrupt (its digest does not match)")
        files = content.pop("files")
        del content["format"]
        meta = CheckpointMeta(**content)
        for name in (_REFERENCE, _LIVE, _OPTIMISER):
            if _file_digest(path / name) != files[name]:
                raise CheckpointError(f"{path}: {name} is corrupt (its digest does not match)")
    except OSError as exc:
        raise CheckpointError(f"{exc.filename or path}: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise CheckpointError(f"{path}: meta.json is corrupt") from exc
    return meta


def _content_digest(content: Mapping[str, Any]) -> str:
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest() if path.stat().st_size else blake3().hexdigest()


def _blocks(blocks: Sequence[Block], values_N: FloatArray) -> dict[str, FloatArray]:
    return {block.name: values_N[block.start : block.stop] for block in blocks}


def _read_blocks(path: Path, blocks: Sequence[Block], out_N: FloatArray) -> None:
    arrays = load_file(path)
    for block in blocks:
        out_N[block.start : block.stop] = arrays[block.name]
