"""Writing checkpoints: what has not changed is linked, and whatever happens, the last complete one is there."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spes_swarm.base.errors import CheckpointError
from spes_swarm.storage.checkpoint_files import ReferenceFile, reference_files, write_tensors
from spes_swarm.storage.checkpoint_writing import Written, save_checkpoint
from tests.helpers.checkpoints import UNCHANGED_BLOCKS, newest_round, save, state
from tests.helpers.rounds import small_layout
from tests.helpers.small_disk import mounted_disk

FILES = [
    "live.safetensors",
    "meta.json",
    "optimiser.safetensors",
    *(f"reference-{i:05d}.safetensors" for i in range(5)),
]
ROOT = Path(__file__).parents[2]


# What has not changed.


def inodes(path: Path) -> dict[str, int]:
    return {entry.name: entry.stat().st_ino for entry in path.iterdir()}


def write(directory: Path, round_number: int, **changes: Any) -> Written:
    return save_checkpoint(directory, state(round_number, **changes), keep=2)


def test_files_of_unchanged_blocks_are_linked_and_all_others_written(tmp_path: Path) -> None:
    first, second = write(tmp_path, 1), write(tmp_path, 2)
    shared = {name for name, inode in inodes(second.path).items() if inodes(first.path)[name] == inode}
    assert shared == {f"reference-{index:05d}.safetensors" for index in UNCHANGED_BLOCKS}
    sizes = {entry.name: entry.stat().st_size for entry in second.path.iterdir()}
    assert second.bytes_linked == sum(sizes[name] for name in shared)
    assert second.bytes_written == sum(sizes.values()) - second.bytes_linked
    assert (first.bytes_linked, first.round, second.round) == (0, 1, 2)
    assert newest_round(tmp_path) == 2


def test_linked_files_outlive_the_checkpoint_that_wrote_them(tmp_path: Path) -> None:
    for number in (1, 2, 3, 4):
        save(tmp_path, number, keep=1)
    assert [path.name[:14] for path in tmp_path.iterdir()] == ["round-00000004"]
    assert newest_round(tmp_path) == 4


def test_nothing_is_linked_to_a_damaged_or_shorter_checkpoint(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "meta.json").write_text("{}")
    assert write(tmp_path, 2).bytes_linked == 0
    os.truncate(tmp_path / state(2).name / "reference-00001.safetensors", 5)
    third = write(tmp_path, 3)
    assert third.bytes_linked == (third.path / "reference-00003.safetensors").stat().st_size
    assert newest_round(tmp_path) == 3


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("os.link", refuse)
    write(tmp_path, 1)
    assert write(tmp_path, 2).bytes_linked == 0
    assert newest_round(tmp_path) == 2


def test_a_reference_that_changes_while_it_is_written_is_never_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    changed = state(2)
    changed.reference_N[-1] += 1
    with pytest.raises(
        CheckpointError, match=r"round 2 .*has changed meanwhile; the last good one is .*round-00000001"
    ):
        save_checkpoint(tmp_path, changed, keep=2)
    assert newest_round(tmp_path) == 1
    assert [path.name[:14] for path in tmp_path.iterdir()] == ["round-00000001"]


def test_the_reference_may_change_once_it_is_said_to_be_read(tmp_path: Path) -> None:
    made = state(1)
    save_checkpoint(tmp_path, made, keep=2, on_reference_read=lambda: made.reference_N.fill(0))
    assert newest_round(tmp_path) == 1
    assert not made.live
    assert not made.optimiser  # their memory is free


def test_many_small_blocks_share_files(tmp_path: Path) -> None:
    layout = small_layout(600, shared=20, expert=9)
    files = reference_files(layout)
    assert 100 < len(files) <= 256
    assert [block for file in files for block in file.blocks] == list(layout.blocks)
    path = save(tmp_path, 1, layout=layout)
    assert len(list(path.glob("reference-*"))) == len(files)
    assert newest_round(tmp_path, layout) == 1
    assert write(tmp_path, 2, layout=layout).bytes_linked == 0  # every file has a block that has changed


# Failures of the disk.


class PowerCut(BaseException):
    """Ends the process at once, as far as the code under test can tell."""


@pytest.mark.parametrize("cut_after", range(20))
def test_a_process_that_dies_while_saving_leaves_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_after: int
) -> None:
    """Every system call that matters for the order of events is a place to die at."""
    save(tmp_path, 1)
    calls = 0

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **named: object) -> object:
            nonlocal calls
            calls += 1
            if calls > cut_after:
                raise PowerCut
            return call(*arguments, **named)

        return wrapped

    with monkeypatch.context() as patches, contextlib.suppress(PowerCut):
        patches.setattr("spes_swarm.storage.checkpoint_writing.write_tensors", dying(write_tensors))
        patches.setattr(ReferenceFile, "write", dying(ReferenceFile.write))
        patches.setattr("os.link", dying(os.link))
        patches.setattr("os.fsync", dying(os.fsync))
        patches.setattr("pathlib.Path.rename", dying(Path.rename))
        save(tmp_path, 2)
    for path in tmp_path.glob("round-*"):
        assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert newest_round(tmp_path) == (2 if (tmp_path / "round-00000002-step-0000000020").exists() else 1)
    save(tmp_path, 3)
    assert newest_round(tmp_path) == 3


@pytest.mark.slow
def test_a_process_that_is_killed_at_any_moment_of_saving_leaves_the_last_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    command = [sys.executable, "-m", "tests.helpers.killed_writer", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True, bufsize=1) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None

        def outcome(round_number: int, kill_at: int) -> dict[str, int]:
            print(round_number, kill_at, file=writer.stdin)
            found: dict[str, int] = {}
            for line in writer.stdout or ():
                what, number = line.split()
                found[what] = int(number)
                if what == "ended":
                    break
            return found

        calls = outcome(2, 0)["calls"]
        seen = set()
        newest = 3
        for kill_at in random.Random(0).sample(range(1, calls), 40):
            found = outcome(newest + 1, kill_at)
            assert found["ended"] == signal.SIGKILL
            seen.add(len(found))  # 1: none was completed; 2: the first was
            before, newest = found.get("saved", newest), newest_round(tmp_path) or 0
            assert newest in (before, before + 1)  # it may die between the new name and the message
            assert len(list(tmp_path.glob("round-*"))) >= 2
        assert seen == {1, 2}
    save(tmp_path, newest + 1)
    assert newest_round(tmp_path) == newest + 1
    assert all(path.name.startswith("round-") for path in tmp_path.iterdir())  # nothing of the killed takes up the disk


def test_everything_is_on_the_disk_before_the_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def logging_fsync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def logging_rename(path: Path, target: Path) -> Path:
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr("os.fsync", logging_fsync)
    monkeypatch.setattr("pathlib.Path.rename", logging_rename)
    save(tmp_path, 1)
    named_at = events.index("rename")
    assert set(FILES) < set(events[:named_at])
    assert events[named_at + 1 :] == [tmp_path.name]


def test_a_directory_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not be written: .*there is no earlier one"):
        save(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
)
def test_a_full_disk_comes_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, advice: bool
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("spes_swarm.storage.checkpoint_writing.write_tensors", fail)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 1)
    assert (f"free space for {tmp_path}, or move" in str(caught.value)) == advice


SMALL_DISK_BYTES = 512 * 1024
LARGE_LAYOUT = small_layout(4, shared=6_000, expert=3_000)  # 72 kB of reference


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is quickly full."""
    with mounted_disk(tmp_path / "disk", SMALL_DISK_BYTES) as disk:
        yield disk


def test_a_full_disk_spares_the_last_good_checkpoint(small_disk: Path) -> None:
    """However much room is left: the save fails as a whole or succeeds as a whole."""
    checkpoints = small_disk / "checkpoints"
    save(checkpoints, 1, layout=LARGE_LAYOUT)
    filler, outcomes = small_disk / "filler", []
    for attempt, room in enumerate(range(0, 200 * 1024, 12 * 1024), start=2):
        last_good = newest_round(checkpoints, LARGE_LAYOUT)
        fill(filler, leave=room)
        try:
            save(checkpoints, attempt, layout=LARGE_LAYOUT)
        except CheckpointError as error:
            outcomes.append("full")
            complaint = str(error)
            assert complaint.endswith(f"; free space for {checkpoints}, or move the output directory to a larger disk")
        else:
            outcomes.append("saved")
            last_good = attempt
            complaint = f"No space left; round-{attempt:08d}"
        assert "No space left" in complaint
        assert f"round-{last_good:08d}" in complaint  # where it stands now
        filler.unlink()
        assert newest_round(checkpoints, LARGE_LAYOUT) == last_good
        assert all(path.name.startswith("round-") for path in checkpoints.iterdir())  # no rubbish takes up the room
    assert outcomes[0] == "full"
    assert outcomes[-1] == "saved"
    assert outcomes.count("full") > 3


def test_room_is_looked_for_before_anything_is_written(small_disk: Path) -> None:
    save(small_disk, 1, layout=LARGE_LAYOUT)
    fill(small_disk / "filler", leave=60_000)
    with pytest.raises(CheckpointError, match=r"No space left on device: it takes 0\.1 MB, and 0\.1 MB are free; "):
        save(small_disk, 2, layout=LARGE_LAYOUT)


def fill(path: Path, leave: int) -> None:
    """Uses up the disk but for `leave` bytes."""
    status = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(b"\0" * max(0, status.f_bavail * status.f_frsize - leave))
