"""Random changes to valid messages, for tests of decoders."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

import msgpack

_ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**64 - 1,
    0.0,
    float("nan"),
    float("inf"),
    "",
    b"",
    [],
    {},
    "x" * 40,
)


_MARKS: Final = (b"\x97", b"\x95", b"\x83", b"\xc4", b"\xdc", b"\xdd")


def mutated(random: Random, data: bytes, other: bytes) -> bytes:
    """A message that differs from two valid ones, of which it is made."""
    while True:
        changed = random.choice(_CHANGES)(random, data, other)
        if changed not in (data, other):
            return changed


def garbage(random: Random, longest: int = 400) -> bytes:
    """Random bytes, often with msgpack's marks of lists, maps and byte strings in front."""
    data = random.randbytes(random.randrange(longest))
    return data if random.random() < 0.5 else random.choice(_MARKS) + data


def _flip(random: Random, data: bytes, other: bytes) -> bytes:
    del other
    changed = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(random: Random, data: bytes, other: bytes) -> bytes:
    del other
    return data[: random.randrange(len(data))]


def _insert(random: Random, data: bytes, other: bytes) -> bytes:
    del other
    where = random.randrange(len(data) + 1)
    return data[:where] + random.randbytes(random.choice((1, 2, 32))) + data[where:]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    where = random.randrange(min(len(data), len(other)))
    return data[:where] + other[where + random.choice((0, 0, 0, -1, 1)) :]


def _swap_fields(random: Random, data: bytes, other: bytes) -> bytes:
    del other
    content = _content(data)
    if len(places := _places(content)) < 2:
        return data
    (one, i), (two, j) = random.sample(places, 2)
    one[i], two[j] = two[j], one[i]
    return _packed(content)


def _take_field(random: Random, data: bytes, other: bytes) -> bytes:
    content, donor = _content(data), _content(other)
    places, taken = _places(content), _places(donor)
    if not places or not taken:
        return data
    at = random.randrange(len(places))
    target, i = places[at]
    # Often the same field of the other.
    source, j = taken[at] if at < len(taken) and random.random() < 0.7 else random.choice(taken)
    target[i] = source[j]
    return _packed(content)


def _odd_field(random: Random, data: bytes, other: bytes) -> bytes:
    del other
    content = _content(data)
    if not (places := _places(content)):
        return data
    target, i = random.choice(places)
    match random.randrange(4), target[i]:
        case 0, list(items):
            target[i] = items[:-1] if random.random() < 0.5 else [*items, *items[-1:]]
        case 0 | 1, bytes(text):
            target[i] = text[:-1] if random.random() < 0.5 else text + b"\0"
        case 0 | 1, int(number):
            target[i] = number + 1
        case 0 | 1, float(number):
            target[i] = number * 1.5
        case _:
            target[i] = random.choice(_ODD)
    return _packed(content)


def _content(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception:
        return []  # not msgpack: there are no fields


def _packed(content: Any) -> bytes:
    try:
        return bytes(msgpack.packb(content))
    except ValueError:  # a field was put into itself
        return b""


def _places(content: Any) -> list[tuple[Any, Any]]:
    """All fields at any depth, as a list and a position in it, or a map and a key."""
    found: list[tuple[Any, Any]] = []
    pending = [content]
    while pending:
        match pending.pop():
            case list(items):
                found += [(items, i) for i in range(len(items))]
                pending += items
            case dict(fields):
                found += [(fields, key) for key in fields]
                pending += fields.values()
    return found


_CHANGES: Final[tuple[Callable[[Random, bytes, bytes], bytes], ...]] = (
    _flip,
    _flip,
    _truncate,
    _insert,
    _splice,
    _swap_fields,
    _take_field,
    _odd_field,
)
