"""Keeps a peer running when nobody takes its output: a terminal is closed, a pipe's reader ends, a disk is full."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

from spes_swarm.base.arguments import show_any_text

_LOST = b"join: standard output cannot be written; training goes on, see metrics.jsonl\n"


class _Lasting(io.FileIO):
    """Drops what cannot be written; says so on standard error the first time."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream.fileno(), "w", closefd=False)
        self._stream = stream  # would close the file if it were destroyed
        self._lost = _LOST if stream is not sys.stderr else b""

    def write(self, data: Any, /) -> int:
        """Returns the number of bytes that need not be written again; `data` is bytes, or a view of bytes."""
        try:
            return super().write(data) or len(data)  # None: it would block
        except OSError:
            lost, self._lost = self._lost, b""
            with suppress(OSError):
                os.write(2, lost)  # under a live panel, sys.stderr writes to this file
            return len(data)


def lasting(stream: TextIO) -> TextIO:
    """Returns a stream that writes to the same file and raises no OSError; one without a file is returned as it is."""
    if isinstance(stream, io.TextIOWrapper) and not isinstance(getattr(stream.buffer, "raw", None), _Lasting):
        by_line = stream.line_buffering or stream.write_through
        with suppress(OSError):  # it has no file
            buffer = io.BufferedWriter(_Lasting(stream))
            return io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=by_line)
    return stream


def keep_output() -> None:
    """Makes both outputs of this process lasting; call this before anything else.

    A closed descriptor becomes /dev/null. A checkpoint would get it otherwise, and with it what libraries print.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest one, which is this
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    show_any_text()
    sys.stdout, sys.stderr = lasting(sys.stdout), lasting(sys.stderr)
