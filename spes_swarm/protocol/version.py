"""The version of the protocol, which every record, statement, manifest, call and answer carries.

Peers of one major version train together, whatever their minor versions. Peers of two major versions refuse each other,
and say which side has to upgrade.

A *minor* version adds what older peers can ignore: fields of records and statements on which no plan depends, fields
of answers, methods. A new field has a default, for messages of older peers. A message of a newer minor version may have
fields that its reader does not know, which it ignores; in any other message they are an error. A new metric needs no
new version. All else is a *major* version, above all what changes the plan that members derive from statements.

To be recognised by every later version, a sealed message begins with its version (members/signed.py), and a call, an
answer and the opening message of a stream are maps with a `version`.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from spes_swarm.base.errors import ProtocolError


class Version(NamedTuple):
    """A version; on the wire a list of two numbers."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


PROTOCOL: Final = Version(7, 0)


def check_version(value: object, writer: str, oldest: int | None = None) -> Version:
    """Reads the version of a message; None, for a message without one, is version 1.

    `oldest`: the oldest major version that is accepted; None: this one alone.

    Raises:
        ProtocolError: (`malformed`) it is not a version; (`version`) it has another major version: the error names both
            and the side that has to upgrade.
    """
    numbers: Any = Version(1, 0) if value is None else value
    is_pair = isinstance(numbers, list | Version) and [type(number) for number in numbers] == [int, int]
    if not (is_pair and min(numbers) >= 0 and max(numbers) < 1 << 16):
        raise ProtocolError("malformed", f"the version of {writer} is not a list of two small numbers")
    version = Version(*numbers)
    if not (PROTOCOL.major if oldest is None else oldest) <= version.major <= PROTOCOL.major:
        upgrade = writer if version < PROTOCOL else "this side"
        raise ProtocolError("version", f"{writer} speaks protocol {version}, this side {PROTOCOL}: upgrade {upgrade}")
    return version


def with_version(fields: dict[str, Any]) -> dict[str, Any]:
    """A call, an answer or an opening message with this peer's version."""
    return {"version": PROTOCOL, **fields}


def without_version(message: object, writer: str) -> dict[str, Any]:
    """The inverse of `with_version`.

    Raises:
        ProtocolError: as `check_version`; (`malformed`) the message is not a map.
    """
    if not isinstance(message, dict):
        raise ProtocolError("malformed", f"the message of {writer} is not a map")
    check_version(message.pop("version", None), writer)
    return message
