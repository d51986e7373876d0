"""What is to be done after an input of the machine (see meeting.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spes_swarm.base.errors import ProtocolError

Answer = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Poll:
    """Poll a leader; its answer goes to `poll_answered`."""

    leader: str
    round: int
    sealed: bytes


@dataclass(frozen=True)
class Call:
    """Call a missing peer; its answer goes to `call_answered`."""

    peer: str
    round: int


@dataclass(frozen=True)
class Reply:
    """What a poll is answered."""

    key: int
    answer: Answer


@dataclass(frozen=True)
class Called:
    """A leader, maybe this peer, calls for a round; the trainer should join as soon as its step is done."""

    round: int


@dataclass(frozen=True)
class Ahead:
    """Others gather for the round after the target: this peer may have missed one."""

    round: int


@dataclass(frozen=True)
class Stall:
    """A leader did not close the group of a round."""

    leader: str
    round: int


@dataclass(frozen=True)
class Fault:
    """A peer broke the protocol."""

    peer: str
    error: ProtocolError


Output = Poll | Call | Reply | Called | Ahead | Stall | Fault
