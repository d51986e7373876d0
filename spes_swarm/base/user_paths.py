"""Paths that users give: home directories, directories created without touching other files, and fsync."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from spes_swarm.base.errors import UserError, os_errors_as


def user_path(text: str) -> Path:
    """Replaces `~` and `~user` by home directories.

    Raises:
        UserError: there is no such user.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as exc:
        raise UserError(f"{text!r}: there is no such home directory") from exc


def existing_parent(path: Path) -> Path:
    """Returns a path, or the nearest parent of it that exists."""
    return next(parent for parent in (path, *path.absolute().parents) if os.path.lexists(parent))


def disk_of(path: Path) -> Path:
    """Returns where the file system of a path is mounted."""
    real = existing_parent(path).resolve()
    return next(parent for parent in (real, *real.parents) if parent.is_mount() or parent == parent.parent)


def refuse_lfs_pointer(path: Path | str, start: bytes, kind: type[UserError]) -> None:
    """Refuses a file that stands for another one, given its first bytes.

    Raises:
        UserError: of type `kind`: it is a pointer of Git LFS.
    """
    if start.startswith(b"version https://git-lfs.github.com/"):
        raise kind(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder")


def sync_to_disk(path: Path) -> None:
    """Makes a file, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replaces a file by bytes or UTF-8 text, atomically and durably; `mode` is subject to the umask.

    Raises:
        OSError: it cannot be written; an earlier file is intact, and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch(mode=mode)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync_to_disk(temporary)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def check_is_new(destination: Path) -> None:
    """Refuses a destination that is not empty.

    Raises:
        UserError: it exists and is not empty, or is not a directory.
    """
    with os_errors_as(UserError, f"{destination} cannot be written", "choose another destination"):
        holds_something = destination.exists() and any(destination.iterdir())
    if holds_something:
        raise UserError(f"{destination} exists and is not empty; choose another destination")


@contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Creates a directory atomically: it is filled under a temporary name, then renamed.

    Raises:
        UserError: the destination exists and is not empty, or cannot be written; nothing is left behind.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}")
    try:
        check_is_new(destination)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(destination)
    except (OSError, SafetensorError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise UserError(f"{destination} cannot be written: {reason}") from exc
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
