"""Directories that scripts fill anew with each run."""

from __future__ import annotations

import shutil
from pathlib import Path

from spes_swarm.base.errors import UserError, os_errors_as


def remake_directory(path: Path, program: str) -> None:
    """Creates an empty directory for `program`, with a marker file; removes what an earlier call left there.

    Raises:
        UserError: it is not empty and has no marker, or cannot be written.
    """
    mark = path / f".{program}"
    with os_errors_as(UserError, f"{path} cannot be written", "choose another directory"):
        left = [child for child in path.iterdir() if child != mark] if path.exists() else []
        if left and not mark.is_file():
            raise UserError(f"{path} contains files that {program} did not create; choose another directory")
        for child in left:  # the marker stays: an interruption must not leave files without it
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()
        path.mkdir(parents=True, exist_ok=True)
        mark.touch()
