"""Command-line parsing that reports mistakes in one line, without usage text or a traceback."""

from __future__ import annotations

import argparse
import sys
from types import TracebackType
from typing import Any, NoReturn

from spes_swarm import __version__
from spes_swarm.base.errors import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with --version whose `parse_args` raises ConfigError for unknown flags and wrong values."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_argument("--version", action="version", version=f"spes_swarm {__version__}")

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake."""
        raise ConfigError(f"{message}; see --help")


def report_interrupt(program: str) -> None:
    """Makes an unhandled Ctrl-C end the program with one line instead of a traceback; call it before slow imports."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{program}: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report
