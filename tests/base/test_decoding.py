"""What a stranger's bytes may turn into: few values, of little depth, whatever their length."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.utils.serializer import MSGPackSerializer
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.decoding import MAX_ELEMENTS, check_msgpack, load_json, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.rpc import MAX_RPC_BYTES
from spes_swarm.network.transport import hivemind_changes

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.floats(width=32)
    | st.text(max_size=300)
    | st.binary(max_size=300)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=60,
)


def list_of(count: int, item: bytes) -> bytes:
    """A list of `count` equal values, as a stranger would write it."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


def refused(kind: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolError) as error:
        call()
    assert error.value.kind == kind, error.value


def count(value: Any) -> int:
    """Values inside of containers."""
    if isinstance(value, dict):
        return 2 * len(value) + sum(map(count, value.values()))
    return len(value) + sum(map(count, value)) if isinstance(value, list) else 0


def depth(value: Any) -> int:
    """Containers within each other."""
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)


_LENGTH = MAX_RPC_BYTES - 5
HOSTILE = {
    "empty lists": list_of(_LENGTH, b"\x90"),
    "empty maps": list_of(_LENGTH, b"\x80"),
    "nothing": list_of(_LENGTH, b"\xc0"),
    "lists in lists": list_of(_LENGTH // 1000, b"\xdc\x03\xe5" + b"\x90" * 997),
    "a map of lists": b"\xdf" + (_LENGTH // 3).to_bytes(4, "big") + b"\xa1k\x90" * (_LENGTH // 3),
    "lists in the last entry": b"\x92\xc0" + list_of(_LENGTH - 2, b"\x90"),
    "more than there are": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_many_values_are_refused_before_any_of_them_exists(data: bytes) -> None:
    assert len(data) <= MAX_RPC_BYTES
    tracemalloc.start()
    try:
        refused("oversized", lambda: unpack(data, MAX_RPC_BYTES))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_as_many_as_are_allowed_are_read() -> None:
    assert unpack(list_of(MAX_ELEMENTS, b"\x90")) == [[]] * MAX_ELEMENTS
    refused("oversized", lambda: unpack(list_of(MAX_ELEMENTS + 1, b"\x90")))


def test_deep_messages_are_refused() -> None:
    assert depth(unpack(b"\x91" * 7 + b"\x90")) == 8
    refused("malformed", lambda: unpack(b"\x91" * 8 + b"\x90"))
    refused("malformed", lambda: unpack(b"\x81\xa1a" * 9 + b"\x90"))


def test_the_largest_honest_messages_are_read(serializer: Any) -> None:
    """Those of the README's limits: a group of 1,000 peers, the table of 4,096 experts, the records of 4,000 peers."""
    group = {"group": [b"s" * 4000] * 1000}
    table = {"round": 5, "versions": [1 << 40] * 4097, "chunks": [b"d" * 320] * 4097}
    for answer in (group, table):
        assert unpack(msgpack.packb(answer), MAX_RPC_BYTES) == answer
    records = DictionaryDHTValue()
    for number in range(4000):
        records.store(f"Qm{number:044}", b"r" * 900, 4e9)
    packed = serializer.dumps(records)
    assert len(packed) < 4 << 20
    assert len(serializer.loads(packed)) == 4000


@pytest.mark.slow
@given(_VALUES, st.data())
def test_values_are_counted_as_they_are(value: Any, data: st.DataObject) -> None:
    packed = msgpack.packb(value)
    number, levels = count(value), depth(value)
    check_msgpack(packed, max_elements=number, max_depth=levels)
    if number:
        refused("oversized", lambda: check_msgpack(packed, max_elements=number - 1, max_depth=levels))
        refused("malformed", lambda: check_msgpack(packed, max_elements=number, max_depth=levels - 1))
    cut = packed[: data.draw(st.integers(0, len(packed) - 1))]
    with pytest.raises(ProtocolError):
        unpack(cut, 1 << 20)


@pytest.mark.slow
@given(st.binary(max_size=200))
def test_rubbish_is_counted_as_msgpack_reads_it(data: bytes) -> None:
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=not_allowed)
    except Exception:
        with pytest.raises(ProtocolError):
            unpack(data)
        return
    check_msgpack(data, max_elements=10 * len(data), max_depth=200)
    number = count(value)  # a key may come twice in a map, so that fewer values are left than were there
    if number:
        refused("oversized", lambda: check_msgpack(data, max_elements=number - 1, max_depth=200))


def not_allowed(code: int, data: bytes) -> None:
    raise ValueError("an extension")


@pytest.mark.parametrize("code", [5, 0x40, 0x50, 0xFF])
@pytest.mark.parametrize("size", [0, 1, 2, 4, 8, 16, 3, 300, 70_000])
def test_extensions_are_refused(code: int, size: int) -> None:
    extension = msgpack.packb(msgpack.ExtType(code if code < 128 else 127, b"x" * size))
    refused("malformed", lambda: unpack(extension, 1 << 20))
    refused("malformed", lambda: unpack(b"\x91" + extension, 1 << 20))


# What hivemind decodes by itself.


@pytest.fixture
def serializer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hivemind's, as it is in a peer."""
    monkeypatch.setattr(MSGPackSerializer, "loads", MSGPackSerializer.loads)  # and back to what it was in the end
    hivemind_changes.bound_decoding()
    return MSGPackSerializer


def dictionary(content: bytes) -> bytes:
    """A dictionary of the DHT with any content."""
    return bytes(msgpack.packb(msgpack.ExtType(0x50, content)))


_TUPLE = msgpack.ExtType(0x40, list_of(100_000, b"\x90"))


@pytest.mark.parametrize(
    "data",
    [
        list_of(_LENGTH, b"\x90"),
        dictionary(list_of(_LENGTH - 100, b"\x90")),
        dictionary(b"\x93\xc0\xc0" + list_of(_LENGTH - 100, b"\x90")),
        dictionary(b"\x93\xc0\xc0\x91" + dictionary(b"\x90")),
        b"\x92" + 2 * dictionary(b"\x90"),
        msgpack.packb(_TUPLE),
        msgpack.packb([_TUPLE]),
    ],
    ids=["a list", "a dictionary", "its items", "nested", "two of them", "a tuple", "a tuple in a list"],
)
def test_the_dht_refuses_them_too(serializer: Any, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        serializer.loads(data)


def test_a_dictionary_of_the_dht_is_read(serializer: Any) -> None:
    records = DictionaryDHTValue()
    records.store("QmPeer", b"sealed", 4e9)
    read = serializer.loads(serializer.dumps(records))
    assert isinstance(read, DictionaryDHTValue)
    assert {key: tuple(item) for key, item in read.items()} == {"QmPeer": (b"sealed", 4e9)}


# JSON.


@pytest.mark.slow
@given(_VALUES)
def test_json_never_has_more_values_than_were_counted(value: Any) -> None:
    try:
        text = json.dumps(value).encode()
    except TypeError:  # bytes
        return
    assert repr(load_json(text, max_elements=len(text))) == repr(json.loads(text))
    if number := count(value):
        refused("oversized", lambda: load_json(text, max_elements=number - 1))


@pytest.mark.slow
def test_json_of_empty_lists_is_refused() -> None:
    text = b"[" + b"[]," * 100_000 + b"[]]"
    refused("oversized", lambda: load_json(text, max_elements=100_000))
    assert len(load_json(text, max_elements=300_000)) == 100_001
