"""Opening files that somebody else has put there: regular ones of the size that they must have, and nothing else.

In a directory that others write to, a name may stand for a pipe, which blocks whoever opens it, for a device without
an end, for a link to a file that is none of the reader's business, or for a file far larger than was announced.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from spes_swarm.publishing.errors import PublicationError


def open_regular(path: Path, *, size: int | None = None, max_size: int | None = None) -> BinaryIO:
    """Opens a regular file for reading; never waits, and never follows a link at the end of the path.

    Args:
        path: of the file.
        size: that it must have, in bytes; None: any.
        max_size: that it may have at most; None: any.

    Raises:
        PublicationError: it is something else, or of another size.
        OSError: it cannot be opened.
    """
    if path.is_symlink():  # for the message; O_NOFOLLOW is what counts
        raise PublicationError(f"{path.name} is a link, not a regular file")
    # A pipe without a writer would block until there is one; on regular files O_NONBLOCK has no effect.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PublicationError(f"{path.name} is not a regular file")
        if size is not None and found.st_size != size:
            raise PublicationError(f"{path.name} has {found.st_size:,} bytes, but {size:,} were published")
        if max_size is not None and found.st_size > max_size:
            raise PublicationError(f"{path.name} has {found.st_size:,} bytes, expected at most {max_size:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
