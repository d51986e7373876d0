"""Where the reference and the contribution are: in memory, or in a file without a name."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from spes_swarm.base.arrays import attach_from
from spes_swarm.base.errors import CapacityError
from spes_swarm.peer.memory import host_memory
from spes_swarm.peer.memory.host_memory import place_of_previous, room_for_previous, shared_vectors

N = 1 << 18
BOTH = 8 * N


def is_on_disk(fd: int) -> bool:
    return "memfd:" not in str(Path(f"/proc/self/fd/{fd}").readlink())


@pytest.mark.parametrize(
    ("storage", "free", "on_disk"),
    [("memory", 0, False), ("disk", 100 * BOTH, True), ("auto", 2 * BOTH, False), ("auto", 2 * BOTH - 2, True)],
)
def test_they_are_on_disk_if_asked_or_if_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, free: int, on_disk: bool
) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: free)
    for vector in shared_vectors(N, storage, tmp_path):
        assert is_on_disk(vector.fd) == on_disk
        assert not vector.values_N.any()
        vector.values_N[:] = 1.0
        np.testing.assert_array_equal(attach_from(os.getpid(), vector.fd, N), vector.values_N)
        vector.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CapacityError, match=r"0\.0 GB for the reference and the contribution: No space left") as raised:
        shared_vectors(N, "disk", tmp_path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("storage", "previous", "free", "place"),
    [
        ("memory", "auto", 4 * BOTH, "memory"),
        ("memory", "auto", 4 * BOTH - 2, "disk"),  # all four would take more than half
        ("auto", "auto", 2 * BOTH, "disk"),  # there is room for the reference, but not for both
        ("disk", "auto", 100 * BOTH, "disk"),
        ("disk", "memory", 0, "memory"),
        ("memory", "disk", 100 * BOTH, "disk"),
        ("memory", "none", 100 * BOTH, "none"),
    ],
)
def test_the_previous_reference_goes_to_the_disk_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, previous: str, free: int, place: str
) -> None:
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda: free)
    assert place_of_previous(N, storage, previous) == place
    vector = room_for_previous(N, place, tmp_path)
    if vector is None:
        assert place == "none"
        return
    assert is_on_disk(vector.fd) == (place == "disk")
    assert len(vector.values_N) == 2 * N
    vector.close()
