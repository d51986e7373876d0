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

_WORTH_SAYING_BYTES = 1 << 30


def check_contents_once(
    files: Sequence[TokenFile],
    cache_dir: Path,
    say: Callable[[str], None] = lambda text: None,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Checks the tokens of files against the digests in their sidecars, unless that was done before.

    `say` gets a message before a long check. `pause` is called before each file, and may raise to abort.

    Raises:
        DataError: a file is corrupt.
    """
    receipts = cache_dir / "checked"
    left = [(file, receipt) for file in files if not (receipt := receipts / _receipt_name(file)).exists()]
    num_bytes = sum(file.tokens.nbytes for file, _ in left)
    if num_bytes >= _WORTH_SAYING_BYTES:
        say(f"checking {num_bytes / 1e9:.1f} GB of tokens against their digests, once per machine")
    for file, receipt in left:
        pause()
        file.check_content()
        with suppress(OSError):
            receipts.mkdir(parents=True, exist_ok=True)
            receipt.touch()


def _receipt_name(file: TokenFile) -> str:
    with os_errors_as(DataError, f"{file.path} cannot be read"):
        status = file.path.stat()
        path = file.path.resolve()
    # The sidecar's digest is part of the name: a receipt is valid only for these bytes and that digest.
    text = f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns} {file.sidecar.blake3}"
    return blake3(text.encode("utf-8", "surrogateescape")).hexdigest()[:40]
