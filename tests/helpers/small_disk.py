"""File systems that are quickly full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_disk(disk: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of that size at a new directory; skips the test where mounting is not allowed."""
    disk.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(disk)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this machine does not allow to mount: {made.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
