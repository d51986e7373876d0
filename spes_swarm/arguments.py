"""Command lines that report mistakes as everything else does: in one line, without the whole usage."""

from __future__ import annotations

import argparse
from typing import NoReturn

from spes_swarm.errors import ConfigError


class OneLineParser(argparse.ArgumentParser):
    """An ArgumentParser whose `parse_args` raises ConfigError for unknown flags and wrong values."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse for every mistake."""
        raise ConfigError(f"{message}; --help lists what there is")
