"""Checkpoints: whole or absent, and what is damaged is passed over with a word."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from spes_swarm.base.errors import CheckpointError
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.storage.checkpoint import checkpoints_in, load_newest
from spes_swarm.storage.checkpoint_writing import save_checkpoint
from tests.helpers.checkpoints import (
    LAYOUT,
    PEER,
    RUN,
    UNCHANGED_BLOCKS,
    meta,
    newest_round,
    save,
    state,
)
from tests.helpers.rounds import small_layout

SHARED_FILES = [f"reference-{index:05d}.safetensors" for index in UNCHANGED_BLOCKS]
FILES = [
    "live.safetensors",
    "meta.json",
    "optimiser.safetensors",
    *(f"reference-{i:05d}.safetensors" for i in range(5)),
]


def test_what_was_saved_is_what_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    assert path.name == "round-00000003-step-0000000030"
    assert sorted(entry.name for entry in path.iterdir()) == FILES
    assert newest_round(tmp_path) == 3
    # Readable by anybody: plain safetensors, one tensor for each block.
    for file, block in zip(sorted(path.glob("reference-*")), LAYOUT.blocks, strict=True):
        (name, values_N), *others = load_file(file).items()
        assert (name, values_N.size, others) == (block.name, block.size, [])


def test_a_peer_without_checkpoints_starts_from_nothing(tmp_path: Path) -> None:
    assert load_newest(tmp_path, RUN, PEER, LAYOUT) == (None, [])
    assert load_newest(tmp_path / "nowhere", RUN, PEER, LAYOUT) == (None, [])


def test_an_optimiser_that_has_not_begun_can_be_saved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1, optimiser={}), keep=2)
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


@pytest.mark.parametrize("name", [name for name in FILES if name not in SHARED_FILES])
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


@pytest.mark.parametrize("name", SHARED_FILES)
def test_a_damaged_file_that_two_checkpoints_share_is_noticed_in_both(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    flip(save(tmp_path, 2) / name, -1)
    found, complaints = load_newest(tmp_path, RUN, PEER, LAYOUT)
    assert found is None
    assert [f"{name} is corrupt" in complaint for complaint in complaints] == [True, True]


@pytest.mark.parametrize("name", SHARED_FILES)
def test_a_shared_file_that_one_checkpoint_has_lost_is_not_lost_to_the_other(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).unlink()
    assert newest_round(tmp_path) == 1


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


@pytest.mark.parametrize("number", [2, 4])
def test_a_checkpoint_of_another_version_is_passed_over(tmp_path: Path, number: int) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "meta.json"
    path.write_text(path.read_text().replace('"format": 3', f'"format": {number}'))
    _, (complaint,) = load_newest(tmp_path, RUN, PEER, LAYOUT, set_aside=True)
    assert "another version" in complaint
    assert "--initial-peers" in complaint  # what to do
    assert newest_round(tmp_path) == 1
    path.write_text(path.read_text().replace(f'"format": {number}', '"format": 3'))
    assert newest_round(tmp_path) == 2  # where that version looks for it


def test_checkpoints_of_another_version_displace_none_and_go_when_they_are_old(tmp_path: Path) -> None:
    def rounds() -> list[int]:
        return sorted(int(path.name[6:14]) for path in tmp_path.iterdir())

    for number in (1, 2, 8, 9):
        path = save(tmp_path, number, keep=4) / "meta.json"
        path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    save(tmp_path, 3)
    assert rounds() == [1, 2, 3, 8, 9]
    save(tmp_path, 4)
    assert rounds() == [3, 4, 8, 9]
    save(tmp_path, 5)
    assert rounds() == [4, 5, 8, 9]
    for number in (10, 11):
        save(tmp_path, number)
    assert rounds() == [10, 11]


def test_a_checkpoint_of_another_version_is_none_of_this_one(tmp_path: Path) -> None:
    """It is no earlier one if a write fails, and its name does not keep this version from writing its own."""
    theirs = save(tmp_path, 1)
    (theirs / "meta.json").write_text('{"format": 2}')
    assert checkpoints_in(tmp_path) == []
    assert save(tmp_path, 1) == theirs
    assert newest_round(tmp_path) == 1
    assert (tmp_path / f"other-{theirs.name}" / "meta.json").read_text() == '{"format": 2}'


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damaged = save(tmp_path, 2)
    flip(damaged / "live.safetensors", -1)
    load_newest(tmp_path, RUN, PEER, LAYOUT, set_aside=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "broken-round-00000002-step-0000000020",
        "round-00000001-step-0000000010",
    ]


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
