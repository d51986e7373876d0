"""How commands end: failures and interruptions are reported in one line, without a traceback."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from spes_swarm.base import log
from spes_swarm.base.errors import UserError

# Shards of publications: an interrupted transfer resumes after the last complete file.
MAX_SHARD_SIZE = "1GB"


def exit_code(program: str, run: Callable[[], int | None], *, interrupted: str = "interrupted") -> int:
    """Runs a command and returns its exit code (None: 0); explains a failure or a Ctrl-C in one line on stderr."""
    show_any_text()
    handle_interrupts(program, interrupted)
    try:
        return run() or 0
    except UserError as exc:
        # It may quote other peers: it must stay on one line and contain no terminal escapes.
        reason, code = "".join(c if c.isprintable() else " " for c in str(exc)), 2
    except OSError as exc:  # an impossible path, or a limit of the machine
        reason, code = f"{exc}{log.where_to_read()}", 2
    except KeyboardInterrupt:
        reason, code = interrupted, 130
    except Exception as exc:
        if not log.where_to_read():
            raise
        reason, code = f"unexpected error: {exc!r}{log.where_to_read()}", 1
    print(f"{program}: {reason}", file=sys.stderr)
    return code


def show_any_text() -> None:
    """Makes standard output replace characters that it cannot encode, which would raise an error otherwise.

    File names and the names of peers can contain any character, and a terminal without UTF-8 shows few of them.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # standard error never raises
        sys.stdout.reconfigure(errors="replace")


def handle_interrupts(program: str, interrupted: str = "interrupted") -> None:
    """Makes a Ctrl-C that would be dangerous end the process with one line; any other raises KeyboardInterrupt."""

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        end_while_torch_is_imported(130, f"{program}: {interrupted}\n")
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, handle)


def end_while_torch_is_imported(code: int, last_words: str = "") -> None:
    """Ends the process if torch is being imported: its C++ calls Python, and aborts at an exception of a handler."""
    if getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False):
        sys.stderr.write(last_words)
        os._exit(code)


def end_program(code: int) -> NoReturn:
    """Exits. A Ctrl-C while libraries clean up ends the program at once, without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a program to stop.

    SIGHUP is one of them, which comes when a terminal is closed, unless it is ignored, as after `nohup`.
    """
    wanted = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    return wanted if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else wanted[:-1]


def interrupt_on_stop_signals() -> None:
    """Makes all raise KeyboardInterrupt as Ctrl-C does, even if that is ignored; call this in the main thread."""
    handler = signal.getsignal(signal.SIGINT)
    for number in stop_signals()[1:]:
        signal.signal(number, handler if callable(handler) else signal.default_int_handler)


def shard_bytes(size: str) -> int:
    """Parses a size such as "500MB" or "1GB" into bytes.

    Raises:
        UserError: it is not a whole number of KB, MB, GB or TB.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})([KMGT])B", size.strip().upper())
    if match is None:
        raise UserError(f"shard size {size!r:.40}: expected something like 500MB or 1GB")
    return int(match[1]) * {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[match[2]]
