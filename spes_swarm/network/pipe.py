"""Messages on the pipe between a trainer and its network process, pickled; see port/commands.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spes_swarm.base.errors import SwarmError


@dataclass(frozen=True, slots=True)
class Sent:
    """A command to the network process."""

    number: int  # the reply has the same number
    name: str  # a method of port.commands.Commands
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a command."""

    number: int
    result: Any = None
    error: SwarmError | None = None
