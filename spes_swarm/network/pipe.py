"""What travels through the pipe between a trainer and its network process, pickled; see port.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spes_swarm.base.errors import SwarmError


@dataclass(frozen=True, slots=True)
class Sent:
    """A command, on its way to the network process."""

    number: int  # of the reply that belongs to it
    name: str  # of one of port.Commands
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a command."""

    number: int
    result: Any = None
    error: SwarmError | None = None
