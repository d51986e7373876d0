"""Command lines that report mistakes as everything else does: in one line, without the whole usage or a traceback."""

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
        raise ConfigError(f"{message}; --help lists what there is")


def report_interrupt(program: str) -> None:
    """From now on, a Ctrl-C that nothing handles ends the program with one line; to be called before slow imports."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(f"{program}: interrupted", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = report
