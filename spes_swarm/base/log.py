"""The log of a peer, OUTPUT_DIR/log.txt, to which all of its processes write.

A line says when (UTC), how serious, which process, run, round and peer, which module, and what. Tracebacks follow their
line. A full file is renamed to log.1.txt, and so on: the log never takes more than `MAX_BYTES` x `NUM_FILES`, and
standard output is left alone. What looks like a token, an invitation or a private key is not written.
"""

from __future__ import annotations

import faulthandler
import fcntl
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler
from pathlib import Path
from types import FrameType
from typing import Any, Final

from spes_swarm.base.errors import LeftEarlyError, UserError, os_errors_as

NAME: Final = "log.txt"
MAX_BYTES: Final = 6 << 20
NUM_FILES: Final = 4
_OWN = ("spes_swarm", "hivemind")  # loggers that have the user's level; those of other libraries start at warnings
_LIBRARIES = ("hivemind", "huggingface_hub", "transformers", "datasets")  # each prints to standard error by itself
_SECRETS = re.compile(
    r"\bhf_\w{8,}|\bspes1\.[\w-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?i:(?<=bearer )|(?<=token=)|(?<=signature=)|(?<=api_key=))[\w.~+/%-]{8,}",
    re.DOTALL,
)
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # in text from others; not a line's end, a tab
_SECRET_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY")


@dataclass
class Context:
    """What every line names."""

    process: str = ""
    run: str = "-"
    peer: str = "-"  # the end of its id
    round: Callable[[], int] = lambda: 0
    report: Callable[[], object] = lambda: None  # writes the state of this process; called at SIGUSR1, in a thread


context: Final = Context()
_LOGGER = logging.getLogger(__name__)
_path: Path | None = None  # of the log that is open, or was last


def redacted(text: str) -> str:
    """Replaces what must not leave this machine: tokens, invitations, signatures in addresses, private keys."""
    for name in _SECRET_VARIABLES:
        if len(secret := os.environ.get(name, "")) >= 8:
            text = text.replace(secret, "(secret)")
    return _SECRETS.sub("(secret)", text)


def where_to_read() -> str:
    """The end of a message about an unexpected error: where its traceback is; empty without a log."""
    return f"; traceback in {_path}" if _path is not None else ""


def divert(*libraries: str) -> None:
    """Makes libraries, already imported, write to the log, if there is one, instead of standard error."""
    for logger in map(logging.getLogger, libraries):
        logger.handlers = [logging.NullHandler()]
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


@contextmanager
def quiet_import_of_hivemind() -> Iterator[None]:
    """Hides that hivemind uses `torch.jit.script`: from 2.15 on torch warns users of that, not only developers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")
        yield


class _Formatter(logging.Formatter):
    def __init__(self) -> None:
        self.converter = time.gmtime
        super().__init__("%(asctime)s.%(msecs)03dZ %(levelname)s %(where)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.where = f"{context.process} run={context.run} round={context.round()} peer={context.peer}"
        # Only a new line begins at the margin, whatever a message holds.
        text = redacted(super().format(record)).replace("\n", "\n    ")
        return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


class _SharedFile(WatchedFileHandler):
    """A file that several processes append to. One that finds it full renames it, and all of them open the new one.

    The stacks that `faulthandler` writes at a crash and at SIGUSR1 go there, too.
    """

    stream: Any  # a file

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(_Formatter())

    def _open(self) -> Any:
        # What it wrote to is closed: if the file cannot be opened, that descriptor may become another file's.
        faulthandler.disable()
        faulthandler.unregister(signal.SIGUSR1)
        # Unbuffered: what a full disk refuses is dropped, and does not fail again when the file is closed.
        file: Any = io.FileIO(self.baseFilename, "a")
        stream = io.TextIOWrapper(file, "utf-8", "backslashreplace", write_through=True)
        faulthandler.enable(stream)
        faulthandler.register(signal.SIGUSR1, stream, chain=callable(signal.getsignal(signal.SIGUSR1)))
        return stream

    def open_again(self) -> None:
        """Reopens the file after a fork: on an inherited descriptor, a lock would be that of the parent."""
        self.stream.close()
        self.stream = self._open()
        self._statstream()

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # the disk is full, or somebody has removed the directory
            super().emit(record)
            if os.fstat(self.stream.fileno()).st_size > MAX_BYTES:
                self._rotate()

    def _rotate(self) -> None:
        path = Path(self.baseFilename)
        fcntl.flock(self.stream, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.fstat(self.stream.fileno()), path.stat()):
                files = [path, *(path.with_suffix(f".{number}.txt") for number in range(1, NUM_FILES))]
                for older, newer in reversed([*zip(files[1:], files[:-1], strict=True)]):
                    if newer.exists():
                        newer.replace(older)
        finally:
            fcntl.flock(self.stream, fcntl.LOCK_UN)  # if it could not be renamed, the others would wait forever
        self.reopenIfNeeded()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Drops what a full disk refuses: logging would print a traceback."""


_handler: _SharedFile | None = None


@contextmanager
def writing(path: Path, level: str, process: str) -> Iterator[None]:
    """Writes the log of this process to a file. An error that ends the process is logged with its traceback.

    Raises:
        UserError: the file cannot be written.
    """
    global _handler, _path
    at_signal, at_thread = signal.getsignal(signal.SIGUSR1), threading.excepthook
    if not callable(at_signal):
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGUSR1, _on_signal)
    with os_errors_as(UserError, f"{path} cannot be written"):
        _handler = handler = _SharedFile(path)
    _path, context.process = path, process
    handler.setLevel(level.upper())
    logging.getLogger().addHandler(handler)
    divert(*_LIBRARIES)
    logging.captureWarnings(True)
    for name in _OWN:
        logging.getLogger(name).setLevel(level.upper())
    threading.excepthook = _report_thread
    try:
        yield
    except Exception as exc:
        if not isinstance(exc, LeftEarlyError):
            _LOGGER.exception("this ends the process")
        raise
    finally:
        threading.excepthook = at_thread
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        with suppress(ValueError):
            signal.signal(signal.SIGUSR1, at_signal)
        handler.close()
        _handler = None


def enter_process(process: str, report: Callable[[], object]) -> None:
    """Continues the log in a process that was just forked."""
    context.process, context.report = process, report
    if _handler is not None:
        _handler.open_again()


def _on_signal(number: int, frame: FrameType | None) -> None:
    # In a thread: this one may be within a call of logging.
    threading.Thread(target=context.report, name="spes-report", daemon=True).start()


def _report_thread(arguments: threading.ExceptHookArgs) -> None:
    error, thread = arguments.exc_value, arguments.thread.name if arguments.thread is not None else "?"
    _LOGGER.error("thread %s has ended", thread, exc_info=error)
    with suppress(OSError):
        print(f"unexpected error in thread {thread}: {error!r}{where_to_read()}", file=sys.stderr)
