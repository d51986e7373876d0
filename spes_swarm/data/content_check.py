"""Checks token files against their digests, once per machine however often a peer starts.

An intact file leaves a receipt in the cache, named after its path, inode, size, modification time and digest. If no
receipt can be written, the next start reads the file again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.data.token_file import TokenFile

WORTH_SAYING_BYTES = 1 << 30  # below that, reading takes a few seconds


def check_contents_once(
    files: Sequence[TokenFile],
    cache_dir: Path,
    say: Callable[[str], None] = lambda text: None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Checks the tokens of files against the digests in their sidecars, unless that was done before.

    Files without a header are left out: their sidecars were derived from their content on this machine. `say` gets a
    message before a long check. `pause` is called before each file, and may raise to abort.

    Raises:
        DataError: a file is corrupt.
    """
    receipts = cache_dir / "checked"
    described = [file for file in files if file.has_header]
    left = [(file, receipt) for file in described if not (receipt := receipts / _receipt_name(file)).exists()]
    num_bytes = sum(file.tokens.nbytes for file, _ in left)
    if num_bytes >= WORTH_SAYING_BYTES:
        say(f"checking {num_bytes / 1e9:.1f} GB of tokens against their digests, once per machine")
    for file, receipt in left:
        pause()
        file.check_content()
        with suppress(OSError):
            receipts.mkdir(parents=True, exist_ok=True)
            receipt.touch()


def file_state(path: Path) -> bytes:
    """Returns what changes when a file does, unless someone restores its modification time.

    Raises:
        DataError: the file cannot be read.
    """
    with os_errors_as(DataError, f"{path} cannot be read"):
        status = path.stat()
        text = f"{path.resolve()} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    return text.encode("utf-8", "surrogateescape")


def _receipt_name(file: TokenFile) -> str:
    # The sidecar's digest is part of the name: a receipt is valid only for these bytes and that digest.
    return blake3(file_state(file.path) + f" {file.sidecar.blake3}".encode()).hexdigest()[:40]
