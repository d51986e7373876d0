"""How much of this machine's memory a process may still take.

/proc/meminfo, which psutil reads, is that of the whole machine even in a container. What a container may use is in its
control groups, any of which can set a limit (cgroups(7): memory.max in version 2, memory.limit_in_bytes in version 1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil

# Names of the limit, of what is in use, and of the page cache in `memory.stat` that the kernel would give up first.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")


def free_host_bytes() -> int:
    """Bytes that this process may still take."""
    free = int(psutil.virtual_memory().available)
    return min([free, *cgroup_free_bytes()])


def cgroup_free_bytes(process: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group with a limit has left, in bytes.

    Args:
        process: which control groups the process is in.
        mount: where they are mounted.
    """
    try:
        lines = process.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (mount, _V2) if not controllers else (mount / "memory", _V1)
        # In a container the path may be that of the host, where it is not mounted; its own group is then the root.
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if (free := _free_in(directory, *names)) is not None:
                yield free
            if directory == root:
                break


def _free_in(directory: Path, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    """What one control group has left; None if it has no limit."""
    try:
        limit = int((directory / limit_file).read_text(encoding="ascii"))  # "max" is no number
        used = int((directory / usage_file).read_text(encoding="ascii"))
        statistics = (directory / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    match = re.search(rf"^{reclaimable} (\d+)$", statistics, re.MULTILINE)
    return max(0, limit - used + (int(match[1]) if match else 0))
