"""The commands of the package, without the time for imports."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.testing.forked_peer import ForkServer, Main
from scripts.testing.local_peer import PATIENCE_S


def output_of(main: Main, *arguments: object, code: int = 0) -> str:
    """Runs a command in a process of the fork server, and checks its exit code; returns what it prints."""
    with TemporaryDirectory() as directory:
        log = Path(directory) / "console.log"
        ended_with = ForkServer(main=main)([str(argument) for argument in arguments], log).wait(PATIENCE_S)
        printed = log.read_text()
    assert ended_with == code, printed
    return printed
