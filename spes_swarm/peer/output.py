"""Standard output and standard error of a peer, which outlives both.

A terminal is closed, the reader of a pipe ends (`| head -1`), a disk is full, or the process is started without them.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from spes_swarm.base.arguments import show_any_text

_LOST = b"join: standard output cannot be written; training goes on, see metrics.jsonl\n"


class _Lasting(io.FileIO):
    """Drops what cannot be written; prints `lost` to standard error the first time."""

    def __init__(self, stream: TextIO, lost: bytes) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # would close the file if it were destroyed
        self._lost = lost

    def write(self, data: Any, /) -> int:
        """Returns the number of bytes that need not be written again; `data` is bytes, or a view of bytes."""
        try:
            return super().write(data) or len(data)  # None: it would block
        except OSError:
            lost, self._lost = self._lost, b""
            with suppress(OSError):
                os.write(2, lost)  # under a live panel, sys.stderr writes to this file
            return len(data)


def lasting(stream: TextIO, lost: bytes = _LOST) -> TextIO:
    """Returns a stream that writes to the same file and raises no OSError; one without a file is returned as it is."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Lasting):
        return stream
    try:
        buffer = io.BufferedWriter(_Lasting(stream, lost))
    except OSError:
        return stream
    by_line = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_line)


def keep_output() -> None:
    """Makes both streams of this process lasting; call this before anything else.

    A closed descriptor becomes /dev/null. The next file to be opened, such as a checkpoint, would get it otherwise, and
    with it what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest one, which is this
    show_any_text()
    sys.stdout = lasting(sys.stdout or os.fdopen(1, "w", errors="replace", closefd=False))
    sys.stderr = lasting(sys.stderr or os.fdopen(2, "w", errors="replace", closefd=False), b"")
