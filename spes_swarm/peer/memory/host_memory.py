"""How much host memory this process may still allocate, and where its largest vectors go.

psutil reads /proc/meminfo, which describes the whole machine even inside a container. The limits of a container are in
its control groups, any of which can set one (cgroups(7): memory.max in version 2, memory.limit_in_bytes in version 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from spes_swarm.base.arrays import SharedVector
from spes_swarm.base.errors import CapacityError, os_errors_as

# Files with the limit and the usage, and the `memory.stat` field of the page cache that the kernel reclaims first.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_host_bytes() -> int:
    """Returns the bytes that this process may still allocate."""
    free = int(psutil.virtual_memory().available)
    return min([free, *cgroup_free_bytes()])


def belongs_on_disk(num_elements: int, storage: str) -> bool:
    """Returns True if the reference and the contribution of a peer, of that many elements each, go to a disk.

    `storage` is "memory", "disk", or "auto": on disk if both would take more than half of the free memory.
    """
    return storage == "disk" or (storage == "auto" and 2 * 4 * num_elements > free_host_bytes() / 2)


def place_of_previous(num_elements: int, storage: str, previous: str) -> str:
    """Returns where a peer keeps what it needs to take back a commit: "memory", "disk" or "none".

    Args:
        num_elements: of the reference.
        storage: of the reference; see `belongs_on_disk`.
        previous: one of these, or "auto": on disk if the reference is, or if all four vectors would take more than half
            of the free memory.
    """
    if previous != "auto":
        return previous
    on_disk = belongs_on_disk(num_elements, storage) or belongs_on_disk(2 * num_elements, "auto")
    return "disk" if on_disk else "memory"


def room_for_previous(num_elements: int, place: str, directory: Path) -> SharedVector | None:
    """Makes the vector for a previous reference of that many elements, and for as many live weights.

    Raises:
        CapacityError: the disk has too little space.
    """
    if place == "none":
        return None
    where = directory if place == "disk" else None
    with os_errors_as(CapacityError, f"{directory}: {8 * num_elements / 1e9:.1f} GB for the previous reference"):
        return SharedVector.create(2 * num_elements, where)


def shared_vectors(num_elements: int, storage: str, directory: Path) -> tuple[SharedVector, SharedVector]:
    """Makes the reference and the contribution of a peer.

    Args:
        num_elements: of each.
        storage: see `belongs_on_disk`.
        directory: on whose disk.

    Raises:
        CapacityError: the disk has too little space.
    """
    if not belongs_on_disk(num_elements, storage):
        return SharedVector.create(num_elements), SharedVector.create(num_elements)
    with os_errors_as(
        CapacityError, f"{directory}: {8 * num_elements / 1e9:.1f} GB for the reference and the contribution"
    ):
        return SharedVector.create(num_elements, directory), SharedVector.create(num_elements, directory)


def cgroup_free_bytes(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """Yields the bytes left in each control group of the process (listed in a file) that has a limit."""
    try:
        lines = process.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (mount, _V2) if not controllers else (mount / "memory", _V1)
        # In a container the path may be the host's, which is not mounted here; the container's group is then the root.
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if (free := _free_in(directory, *names)) is not None:
                yield free
            if directory == root:
                break


def _free_in(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """Returns the bytes left in one control group, None if it has no limit."""
    try:
        limit = int((directory / limit_file).read_text(encoding="ascii"))  # "max" is not a number: no limit
        used = int((directory / usage_file).read_text(encoding="ascii"))
        statistics = (directory / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    match = re.search(rf"^{reclaimable} (\d+)$", statistics, re.MULTILINE)
    return max(0, limit - used + (int(match[1]) if match else 0))
