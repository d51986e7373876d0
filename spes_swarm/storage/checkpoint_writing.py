"""Writes checkpoints, so that a peer that is killed at any moment keeps the last complete one.

A checkpoint is written under a temporary name, synced to disk and renamed. Files of the reference whose blocks have not
changed since the newest checkpoint are linked, not written: `load_newest` has verified that one when the peer started,
or this peer has written it since.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.base.user_paths import sync_to_disk
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.storage.checkpoint import (
    LIVE,
    META,
    OPTIMISER,
    CheckpointMeta,
    Content,
    checkpoints_in,
    has_other_format,
    read_content,
    superseded,
)
from spes_swarm.storage.checkpoint_files import Array, reference_files, write_tensors

_TEMPORARY = ".round-*"
OVERHEAD_BYTES = 8192  # of a file: its header, and the end of its last disk block


@dataclass(frozen=True, kw_only=True)
class PeerState:
    """What a checkpoint holds."""

    meta: CheckpointMeta
    layout: Layout
    reference_N: FloatArray  # may change later; see `save_checkpoint`
    digests: Sequence[bytes]  # of the reference's blocks
    live: dict[int, FloatArray]  # by block: weights of trained blocks that differ from the reference
    optimiser: dict[str, Array]

    @property
    def name(self) -> str:
        """Name of the checkpoint's directory."""
        return f"round-{self.meta.round:08d}-step-{self.meta.step:010d}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """What writing a checkpoint took."""

    path: Path
    round: int
    bytes_written: int
    bytes_linked: int


def save_checkpoint(
    directory: Path, state: PeerState, keep: int, on_reference_read: Callable[[], None] = lambda: None
) -> Written:
    """Writes a checkpoint atomically and removes all but the newest `keep`.

    The reference must not change before `on_reference_read` is called, after which only `live` and `optimiser` are
    written. These two are emptied on the way, to free their memory. Does nothing if the checkpoint exists.

    Raises:
        CheckpointError: it could not be written, for instance because the disk is full; earlier ones are untouched.
    """
    final = directory / state.name
    if final.exists() and not has_other_format(final):
        on_reference_read()
        return Written(path=final, round=state.meta.round, bytes_written=0, bytes_linked=0)
    temporary = directory / f".{state.name}.{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Those of killed processes, which may be as large as a checkpoint. Only one process at a time writes here.
        for left in directory.glob(_TEMPORARY):
            shutil.rmtree(left)
        temporary.mkdir()
        linked = _link_unchanged(directory, temporary, state)
        _check_room(temporary, state, linked)
        if not _write_reference(temporary, state, linked):
            raise OSError("the reference has changed meanwhile")
        on_reference_read()
        _write_rest(temporary, state)
        sizes = {path.name: path.stat().st_size for path in temporary.iterdir()}
        for name in sizes.keys() - linked:
            sync_to_disk(temporary / name)
        sync_to_disk(temporary)
        if final.exists():  # of another format: it is not this version's to overwrite
            final.rename(final.with_name(f"other-{final.name}"))
        temporary.rename(final)
        sync_to_disk(directory)
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        raise _error(directory, state.meta.round, exc) from exc
    for old in superseded(directory, keep):
        shutil.rmtree(old, ignore_errors=True)
    linked_bytes = sum(sizes[name] for name in linked)
    fresh_bytes = sum(sizes.values()) - linked_bytes
    return Written(path=final, round=state.meta.round, bytes_written=fresh_bytes, bytes_linked=linked_bytes)


def _link_unchanged(directory: Path, temporary: Path, state: PeerState) -> set[str]:
    """Links the files of the newest checkpoint whose blocks have not changed since; returns their names."""
    newest = next(iter(checkpoints_in(directory)), None)
    if newest is None:
        return set()
    try:
        before = read_content(newest)
    except CheckpointError:
        return set()
    if before.meta.layout_digest != state.layout.digest or len(before.blocks) != len(state.digests):
        return set()
    linked: set[str] = set()
    for file in reference_files(state.layout):
        unchanged = all(before.blocks[block.index] == state.digests[block.index] for block in file.blocks)
        # Not every file system has links.
        with suppress(OSError):
            if unchanged and (newest / file.name).stat().st_size == file.num_bytes:
                os.link(newest / file.name, temporary / file.name)
                linked.add(file.name)
    return linked


def _check_room(temporary: Path, state: PeerState, linked: set[str]) -> None:
    """Raises OSError if the disk does not have room for the files that are still to be written."""
    sizes = [file.num_bytes for file in reference_files(state.layout) if file.name not in linked]
    sizes += [sum(array.nbytes for array in arrays.values()) for arrays in (state.live, state.optimiser)]
    needed = sum(sizes) + OVERHEAD_BYTES * (len(sizes) + 1)
    status = os.statvfs(temporary)
    free = status.f_bavail * status.f_frsize
    if needed > free:
        reason = f"{os.strerror(errno.ENOSPC)}: it takes {needed / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, reason)


def _write_reference(temporary: Path, state: PeerState, linked: set[str]) -> bool:
    """Writes the files that are not linked. Returns False if the reference does not have its digests any more."""
    fresh = [file for file in reference_files(state.layout) if file.name not in linked]
    return all(file.write(temporary, state.reference_N, state.digests) for file in fresh)


def _write_rest(temporary: Path, state: PeerState) -> None:
    live: dict[str, Array] = {state.layout.blocks[index].name: state.live.pop(index) for index in list(state.live)}
    digests = {
        LIVE: write_tensors(temporary / LIVE, live),
        OPTIMISER: write_tensors(temporary / OPTIMISER, state.optimiser),
    }
    content = Content(digests, tuple(state.digests), state.meta)
    (temporary / META).write_text(content.to_json(), encoding="utf-8")


def _error(directory: Path, round_number: int, exc: OSError) -> CheckpointError:
    newest = next(iter(checkpoints_in(directory)), None)
    kept = f"the last good one is {newest}" if newest else "there is no earlier one"
    full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    advice = f"; free space for {directory}, or move the output directory to a larger disk" if full else ""
    return CheckpointError(
        f"the checkpoint of round {round_number} could not be written: {exc.strerror or exc}; {kept}{advice}"
    )
