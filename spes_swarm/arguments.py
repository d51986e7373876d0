"""Command lines that report mistakes as everything else does: in one line, without the whole usage."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from spes_swarm import __version__
from spes_swarm.errors import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser with --version whose `parse_args` raises ConfigError for unknown flags and wrong values."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.add_argument("--version", action="version", version=f"spes_swarm {__version__}")

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake."""
        raise ConfigError(f"{message}; --help lists what there is")
