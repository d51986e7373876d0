"""Checkpoints: whole or absent, and what is damaged is passed over with a word."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.storage.checkpoint import FORMAT, Arrays, CheckpointMeta, load_newest, save_checkpoint
from tests.helpers.rounds import small_layout

LAYOUT = small_layout(4)
RUN, PEER = "run-1", "peer-1"
FILES = ["live.safetensors", "meta.json", "optimiser.safetensors", "reference.safetensors"]


def meta(round_number: int, **changes: object) -> CheckpointMeta:
    made = CheckpointMeta(
        run_id=RUN,
        peer_id=PEER,
        layout_digest=LAYOUT.digest,
        round=round_number,
        versions=[round_number, 0, 1, 2, 3],
        reference_digest="ab" * 32,
        held=[1, 3],
        step=10 * round_number,
        tokens=64,
        steps_in_round=1,
        routed=[0, 5, 0, 6],
        cursor={"position": 7},
        commits=[1],
        marks="ab" * 8,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def values(seed: int, layout: Layout = LAYOUT) -> FloatArray:
    return np.random.default_rng(seed).normal(size=layout.num_elements).astype(np.float32)


def moments(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        "w/step": np.array(seed, dtype=np.float32),
        "w/exp_avg": rng.normal(size=(3, 4)).astype(np.float32),
        "w/exp_avg_sq": rng.normal(size=(3, 4)).astype(np.float32),
    }


def save(directory: Path, round_number: int, keep: int = 2, layout: Layout = LAYOUT) -> Path:
    """The checkpoint of a round; its content follows from its number."""
    return save_checkpoint(
        directory,
        meta(round_number, layout_digest=layout.digest),
        layout,
        values(round_number, layout),
        values(100 + round_number, layout),
        moments(round_number),
        keep,
    )


def newest_round(directory: Path, layout: Layout = LAYOUT) -> int | None:
    """The round that would be gone on with, its content compared with what was saved."""
    found, _ = load_newest(directory, RUN, PEER, layout)
    if found is None:
        return None
    number = found.meta.round
    assert found.meta == meta(number, layout_digest=layout.digest)
    reference_N, live_N = (np.full(layout.num_elements, np.nan, np.float32) for _ in range(2))
    found.reference(layout, reference_N)
    found.live(layout, live_N)
    assert reference_N.tobytes() == values(number, layout).tobytes()
    trained = {0, *(1 + expert for expert in found.meta.held)}
    for block in layout.blocks:
        piece_N = live_N[block.start : block.stop]
        if block.index in trained:
            assert np.array_equal(piece_N, values(100 + number, layout)[block.start : block.stop])
        else:
            assert np.isnan(piece_N).all()  # left as it was
    expected = moments(number)
    assert found.optimiser().keys() == expected.keys()
    for name, array in found.optimiser().items():
        assert np.array_equal(array, expected[name])
        assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype)
    return number


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert path.name == "round-00000003-step-0000000030"
    assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert newest_round(tmp_path) == 3
    # Readable by anybody: plain safetensors, one tensor for each block.
    assert load_file(path / "reference.safetensors").keys() == {block.name for block in LAYOUT.blocks}


def test_a_peer_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    assert load_newest(tmp_path, RUN, PEER, LAYOUT) == (None, [])
    assert load_newest(tmp_path / "nowhere", RUN, PEER, LAYOUT) == (None, [])


def test_an_optimiser_that_has_not_begun_can_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, meta(1), LAYOUT, values(1), values(2), {}, 2)
    found, _ = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert found is not None
    assert found.optimiser() == {}


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in (1, 2, 9, 10, 11):
        save(tmp_path, number, keep=3)
    assert sorted(int(path.name[6:14]) for path in tmp_path.iterdir()) == [9, 10, 11]
    assert newest_round(tmp_path) == 11


def test_saving_twice_at_the_same_step_changes_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    before = {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()}
    assert save(tmp_path, 1) == path
    assert {entry.name: entry.stat().st_mtime_ns for entry in path.iterdir()} == before


# Damage.


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, path.stat().st_size // 2),
        lambda path: flip(path, path.stat().st_size - 3),
        lambda path: truncate(path, path.stat().st_size // 2),
        lambda path: truncate(path, 0),
        lambda path: path.unlink(),
    ],
    ids=["bit in the middle", "bit at the end", "half", "empty", "gone"],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    damage(damaged / name)
    found, complaints = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert found is not None
    assert found.meta.round == 1
    assert newest_round(tmp_path) == 1
    (complaint,) = complaints
    assert damaged.name in complaint


@pytest.mark.slow
def test_no_bit_of_the_description_can_change_unnoticed(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "meta.json"
    intact = path.read_bytes()
    for position in range(len(intact)):
        flip(path, position)
        found, _ = load_newest(tmp_path, RUN, PEER, LAYOUT)
        assert found is None or found.meta == meta(1), intact[position - 20 : position + 20]
        path.write_bytes(intact)
    assert newest_round(tmp_path) == 1


@pytest.mark.parametrize("content", ["[]", "null", "5", '"x"', "{}", "[" * 100_000, "\x00"])
def test_a_description_that_is_none_is_passed_over(tmp_path: Path, content: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / "meta.json").write_text(content)
    _, complaints = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert len(complaints) == 1
    assert newest_round(tmp_path) == 1


def test_a_checkpoint_of_another_version_is_passed_over(tmp_path: Path) -> None:
    path = save(tmp_path, 1) / "meta.json"
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    found, complaints = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert found is None
    assert "another version" in complaints[0]


def test_when_all_are_damaged_each_one_is_named(tmp_path: Path) -> None:
    for number in (1, 2):
        flip(save(tmp_path, number) / "live.safetensors", -1)
    found, complaints = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert found is None
    assert ["round-00000002" in complaints[0], "round-00000001" in complaints[1]] == [True, True]


def test_half_written_ones_of_a_killed_process_are_never_taken(tmp_path: Path) -> None:
    newer = save(tmp_path, 2)
    save(tmp_path, 1)
    newer.rename(tmp_path / f".{newer.name}.12345")
    assert newest_round(tmp_path) == 1


# What belongs to somebody else.


@pytest.mark.parametrize(
    ("run_id", "peer_id", "layout", "why"),
    [
        ("run-2", PEER, LAYOUT, "belongs to run run-1, not run-2"),
        (RUN, "peer-2", LAYOUT, "written by peer peer-1, but the identity in use is peer-2"),
        (RUN, PEER, small_layout(5), "belongs to another model"),
    ],
    ids=["run", "peer", "model"],
)
def test_a_foreign_checkpoint_is_refused(tmp_path: Path, run_id: str, peer_id: str, layout: Layout, why: str) -> None:
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=why) as error:
        load_newest(tmp_path, run_id, peer_id, layout)
    assert "--output-dir" in str(error.value)  # what to do
    assert newest_round(tmp_path) == 1  # and nothing happened to it


# Failures of the disk.


class PowerCut(BaseException):
    """Ends the process at once, as far as the code under test can tell."""


@pytest.mark.parametrize("cut_after", range(12))
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
        patches.setattr(
            "spes_swarm.storage.checkpoint.save_file", dying(__import__("safetensors.numpy").numpy.save_file)
        )
        patches.setattr("os.fsync", dying(os.fsync))
        patches.setattr("pathlib.Path.rename", dying(Path.rename))
        save(tmp_path, 2)
    for path in tmp_path.glob("round-*"):
        assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert newest_round(tmp_path) == (2 if (tmp_path / "round-00000002-step-0000000020").exists() else 1)
    save(tmp_path, 3)
    assert newest_round(tmp_path) == 3


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
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
)
def test_a_full_disk_comes_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, advice: bool
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("spes_swarm.storage.checkpoint.save_file", fail)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, 1)
    assert (f"free space for {tmp_path}, or move" in str(caught.value)) == advice


SMALL_DISK_BYTES = 512 * 1024
LARGE_LAYOUT = small_layout(4, shared=6_000, expert=3_000)  # 72 kB of reference


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is quickly full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    options = f"size={SMALL_DISK_BYTES}"
    made = subprocess.run([mount, "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this machine does not allow to mount: {made.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


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


def fill(path: Path, leave: int) -> None:
    """Uses up the disk but for `leave` bytes."""
    status = os.statvfs(path.parent)
    with path.open("wb") as file:
        file.write(b"\0" * max(0, status.f_bavail * status.f_frsize - leave))
