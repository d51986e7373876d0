"""Decoding of untrusted data: the one place where received msgpack and JSON become Python objects.

A limit on the length of a message does not limit what it decodes to: a byte of msgpack becomes an empty list of 56
bytes, and 4 MiB of them took 2.9 s and 550 MB. So the number of values and their depth are counted on the bytes, before
any object exists. msgpack's own limits apply to each container separately, and lists can be nested.

Honest messages have few values: statements and records travel as byte strings inside other messages. The largest counts
are 4 per peer in a DHT answer (4,000 for 1,000 peers), 4 per block in a statement (its 64 KiB hold 1,600 blocks), and 2
per block in the table of a reference (8,200 for 4,096 experts).
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from spes_swarm.base.errors import ProtocolError

MAX_MESSAGE_BYTES = 64 * 1024
MAX_TOKENIZER_BYTES = 64 << 20  # the largest in use have about 35 MB
MAX_ELEMENTS = 1 << 15
MAX_DEPTH = 8  # honest messages nest 4 containers

_ARRAY16, _ARRAY32, _MAP16, _MAP32 = 0xDC, 0xDD, 0xDE, 0xDF
# Byte strings and text with a length field: first byte -> size of that field.
_LENGTHS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# The same for extensions, which have a type byte before the payload; then extensions of a fixed size.
_EXT_LENGTHS: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_CONTAINERS: Final = {_ARRAY16: (2, 1), _ARRAY32: (4, 1), _MAP16: (2, 2), _MAP32: (4, 2)}  # bytes of count, factor


def _fixed_sizes() -> list[int]:
    """Total size of a value by its first byte; 0 for containers, and where the first byte does not determine it."""
    sizes = [0] * 256
    sizes[0x00:0x80] = [1] * 0x80  # positive fixint
    sizes[0xA0:0xC0] = range(1, 33)  # fixstr
    sizes[0xE0:0x100] = [1] * 0x20  # negative fixint
    for first, size in {0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9}.items():  # nil, false, true, floats
        sizes[first] = size
    for power in range(4):  # uint and int of 1, 2, 4 and 8 bytes
        sizes[0xCC + power] = sizes[0xD0 + power] = 1 + (1 << power)
    return sizes


_SIZES: Final = _fixed_sizes()


def check_msgpack(
    data: bytes, *, max_elements: int = MAX_ELEMENTS, max_depth: int = MAX_DEPTH, ext_codes: Collection[int] = ()
) -> None:
    """Counts the values of a message without decoding it, in about 5 ms at most, whatever its length.

    A map entry has two values. Payloads of extension types are left to the caller. Format:
    https://github.com/msgpack/msgpack/blob/master/spec.md

    Raises:
        ProtocolError: (`oversized`) too many values; (`malformed`) too deep, not msgpack, or an extension.
    """
    try:
        _count(data, max_elements, max_depth, ext_codes)
    except IndexError as exc:
        raise ProtocolError("malformed", "not valid msgpack: truncated") from exc


def _count(data: bytes, max_elements: int, max_depth: int, ext_codes: Collection[int]) -> None:
    sizes = _SIZES
    position, budget, left = 0, max_elements, 1
    above: list[int] = []  # values left in each enclosing container
    while True:
        while left:
            left -= 1
            first = data[position]
            size = sizes[first]
            if size:
                position += size
                continue
            if first in _LENGTHS:
                begin = position + 1
                position = begin + _LENGTHS[first]
                position += int.from_bytes(data[begin:position], "big")
            elif first < 0xA0 or first in _CONTAINERS:
                if first < 0xA0:
                    count = 2 * (first & 0x0F) if first < 0x90 else first & 0x0F
                    position += 1
                else:
                    width, factor = _CONTAINERS[first]
                    count = factor * int.from_bytes(data[position + 1 : position + 1 + width], "big")
                    position += 1 + width
                budget -= count
                if budget < 0:
                    raise ProtocolError("oversized", f"a message of more than {max_elements} values")
                if len(above) >= max_depth:
                    raise ProtocolError("malformed", f"a message nested deeper than {max_depth} levels")
                above.append(left)
                left = count
            else:
                position = _skip_extension(data, position, () if above else ext_codes)
        if not above:
            return
        left = above.pop()


def _skip_extension(data: bytes, position: int, ext_codes: Collection[int]) -> int:
    first = data[position]
    if first in _FIXED_EXT:
        size, begin = _FIXED_EXT[first], position + 1
    elif first in _EXT_LENGTHS:
        begin = position + 1 + _EXT_LENGTHS[first]
        size = int.from_bytes(data[position + 1 : begin], "big")
    else:
        raise ProtocolError("malformed", "not valid msgpack")
    if data[begin] not in ext_codes:
        raise ProtocolError("malformed", "a message with an extension type")
    return begin + 1 + size


def unpack(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Any:
    """Decodes untrusted msgpack with limits on length, number of values and depth.

    Raises:
        ProtocolError: (`oversized`) longer than `max_bytes`, or more than MAX_ELEMENTS values; (`malformed`) deeper
            than MAX_DEPTH, not valid msgpack, or an extension.
    """
    if len(data) > max_bytes:
        raise ProtocolError("oversized", f"a message of {len(data)} bytes; at most {max_bytes} are allowed")
    check_msgpack(data)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:
        raise ProtocolError("malformed", "not valid msgpack") from exc


def check_json(data: bytes, *, max_elements: int) -> None:
    """Counts the values of a JSON text without decoding it.

    Every value but the first follows one of `[ { , :`; these characters count inside strings, too.

    Raises:
        ProtocolError: (`oversized`) it may have more values than `max_elements`.
    """
    if sum(map(data.count, (b"[", b"{", b",", b":"))) > max_elements:
        raise ProtocolError("oversized", f"JSON of more than {max_elements} values")


def load_json(data: bytes, *, max_elements: int) -> Any:
    """Decodes untrusted JSON; the caller limits its length.

    Raises:
        ProtocolError: (`oversized`) it may have more values than `max_elements`.
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """
    check_json(data, max_elements=max_elements)
    return json.loads(data)


class StrictModel(BaseModel):
    """Untrusted JSON with strict types and no other fields; immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


_MAX_WHERE_CHARS = 80  # an unknown key may be as long as its message


def first_complaint(error: ValidationError, max_chars: int = 160) -> str:
    """Describes the first error, after its location if it has one: "shards.0.name: Field required"."""
    first = error.errors()[0]
    where = ".".join(str(item) for item in first["loc"])[:_MAX_WHERE_CHARS]
    what = first["msg"][:max_chars]
    return f"{where}: {what}" if where else what
