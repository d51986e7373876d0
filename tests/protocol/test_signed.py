"""Signed messages: who says what, in which version, and what must not pass for signed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spes_swarm.base.decoding import MAX_MESSAGE_BYTES, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.members.signed import SignedModel, seal, unseal
from spes_swarm.protocol.version import check_version
from tests.helpers.refusals import refused
from tests.helpers.rounds import identity

RUN = "run-1"


class Note(SignedModel):
    """A message of the tests."""

    text: str
    count: int
    share: float = 0.5


NOTE = Note(text="hello", count=3)


def test_a_message_arrives_with_the_name_of_its_writer() -> None:
    assert unseal(seal(identity(0), "note", RUN, NOTE), "note", RUN, Note) == (identity(0).peer_id, NOTE)


def test_equal_messages_are_equal_bytes() -> None:
    assert seal(identity(0), "note", RUN, NOTE) == seal(identity(0), "note", RUN, NOTE.model_copy())


@pytest.mark.parametrize(("kind", "run"), [("letter", RUN), ("note", "run-2"), ("note\0run", "1"), ("", "note\0run-1")])
def test_a_message_counts_only_for_its_kind_and_run(kind: str, run: str) -> None:
    data = seal(identity(0), "note", RUN, NOTE)
    refused("signature", lambda: unseal(data, kind, run, Note))


@pytest.mark.slow
def test_no_bit_of_a_message_can_be_changed() -> None:
    data = seal(identity(0), "note", RUN, NOTE)
    for bit in range(8 * len(data)):
        forged = bytearray(data)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            unseal(bytes(forged), "note", RUN, Note)


def test_a_signature_of_one_peer_does_not_serve_another() -> None:
    version, payload, _, signature = msgpack.unpackb(seal(identity(0), "note", RUN, NOTE))
    forged = msgpack.packb([version, payload, identity(1).public_key_der, signature])
    refused("signature", lambda: unseal(forged, "note", RUN, Note))


def envelope(payload: Any, version: Sequence[int] = (7, 0)) -> bytes:
    """A well-signed message whose payload is anything at all; what `seal` signs, written out."""
    who = identity(0)
    packed = payload if isinstance(payload, bytes) else msgpack.packb(payload)
    signature = who.sign(f"spes_swarm\0{version[0]}.{version[1]}\0note\0run-1\0".encode() + packed)
    return bytes(msgpack.packb([version, packed, who.public_key_der, signature]))


def test_the_signature_covers_what_the_tests_think() -> None:
    assert unseal(envelope({"text": "hello", "count": 3}), "note", RUN, Note)[1] == NOTE


@pytest.mark.parametrize(
    "payload",
    [
        {"text": "hello"},
        {"text": "hello", "count": 3, "more": 1},
        {"text": "hello", "count": "3"},
        {"text": "hello", "count": 3.0},
        {"text": "hello", "count": True},
        {"text": b"hello", "count": 3},
        {"text": None, "count": 3},
        ["hello", 3],
        None,
        7,
    ],
)
def test_a_signed_payload_of_another_shape_is_refused(payload: Any) -> None:
    refused("schema", lambda: unseal(envelope(payload), "note", RUN, Note))


@pytest.mark.parametrize("version", [(7, 0), (7, 1), (7, 65_535)])
def test_a_field_that_is_not_known_is_ignored_only_in_a_message_of_a_newer_version(version: tuple[int, int]) -> None:
    data = envelope({"text": "hello", "count": 3, "more": {"than": ["this"]}}, version)
    if version <= (7, 0):
        refused("schema", lambda: unseal(data, "note", RUN, Note))
    else:
        assert unseal(data, "note", RUN, Note)[1] == NOTE


def test_a_field_that_is_not_known_is_ignored_in_what_a_newer_message_contains_too() -> None:
    class Notes(SignedModel):
        notes: list[Note]

    inner = {"notes": [{"text": "hello", "count": 3, "more": 1}]}
    assert unseal(envelope(inner, (7, 1)), "note", RUN, Notes)[1].notes == [NOTE]
    refused("schema", lambda: unseal(envelope(inner), "note", RUN, Notes))
    wrong = {"notes": [{"text": "hello", "count": "3", "more": 1}]}
    refused("schema", lambda: unseal(envelope(wrong, (7, 1)), "note", RUN, Notes))


@pytest.mark.parametrize(
    "payload", [{"text": "hello", "more": 1}, {"text": "hello", "count": "3", "more": 1}, ["hello", 3], None, 7]
)
def test_what_is_known_must_fit_in_a_newer_version_too(payload: Any) -> None:
    refused("schema", lambda: unseal(envelope(payload, (7, 1)), "note", RUN, Note))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (envelope({"text": "hello", "count": 3}, (8, 1)), "speaks protocol 8.1, this side 7.0: upgrade this side"),
        (msgpack.packb([[8, 1]]), "speaks protocol 8.1, this side 7.0: upgrade this side"),
        (msgpack.packb([[65_535, 0], {"a": "form"}, 5]), "speaks protocol 65535.0, this side 7.0: upgrade this side"),
        (envelope({"text": "hello", "count": 3}, (1, 7)), "protocol 1.7, this side 7.0: upgrade the writer of a note"),
        (msgpack.packb([b"", b"", b""]), "protocol 1.0, this side 7.0: upgrade the writer of a note"),  # as it was then
    ],
    ids=["newer", "nothing else", "another form", "older", "without a version"],
)
def test_of_another_major_version_only_the_version_is_read(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)) as error:
        unseal(data, "note", RUN, Note)
    assert error.value.kind == "version"


def test_the_signature_covers_the_version() -> None:
    _, *rest = msgpack.unpackb(envelope({"text": "hello", "count": 3}))
    refused("signature", lambda: unseal(msgpack.packb([[7, 1], *rest]), "note", RUN, Note))


@pytest.mark.parametrize(
    "version",
    [2, "2.0", b"\2\0", [], [2], [2, 0, 0], [2, "0"], [2, True], [2.0, 0], [2, None], [[2], 0], {"2": 0}],
    ids=repr,
)
def test_what_is_no_version_is_malformed(version: Any) -> None:
    _, *rest = msgpack.unpackb(envelope({"text": "hello", "count": 3}))
    refused("malformed", lambda: unseal(msgpack.packb([version, *rest]), "note", RUN, Note))


@pytest.mark.parametrize("number", [-1, 65_536, (1 << 64) - 1])
def test_no_version_has_such_a_number(number: int) -> None:
    for version in ([number, 0], [2, number]):
        refused("malformed", lambda v=version: check_version(v, "somebody"))  # type: ignore[misc]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(anything)
def test_no_version_fails_in_another_way(value: Any) -> None:
    try:
        version = check_version(value, "somebody")
    except ProtocolError as exc:
        version, kind = None, exc.kind
    assert kind in ("malformed", "version") if version is None else version.major == 7


@given(st.integers(0, 65_535), st.integers(0, 65_535))
@example(7, 6)
@example(6, 7)
def test_exactly_the_side_with_the_smaller_major_version_upgrades(major: int, minor: int) -> None:
    if major == 7:
        assert check_version([major, minor], "it") == (major, minor)
        return
    with pytest.raises(ProtocolError, match=f"it speaks protocol {major}.{minor}, this side 7.0: upgrade ") as error:
        check_version([major, minor], "it")
    assert error.value.detail.endswith("upgrade it" if major < 7 else "upgrade this side")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([]),
        msgpack.packb([[7, 0]]),
        msgpack.packb([[7, 0], b"", b"", b"", b""]),
        msgpack.packb([[7, 0], b"", "", b""]),
        msgpack.packb([b"a", b"b"]),
        msgpack.packb(["a", b"b", b"c"]),
        msgpack.packb({"a": 1}),
        msgpack.packb([b"", b"", b""]) + b"more",
        b"\x91" * 5000,
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb(msgpack.Timestamp(0)),
        msgpack.packb({1: 2}),
    ],
    ids=repr,
)
def test_what_is_no_envelope_is_malformed(data: bytes) -> None:
    refused("malformed", lambda: unseal(data, "note", RUN, Note))


def test_a_large_message_is_refused_before_it_is_read() -> None:
    refused("oversized", lambda: unseal(b"\0" * (MAX_MESSAGE_BYTES + 1), "note", RUN, Note))
    refused("oversized", lambda: unpack(b"\0" * 11, max_bytes=10))
    assert unpack(msgpack.packb(b"12345678"), max_bytes=10) == b"12345678"


@pytest.mark.slow
@given(st.binary(max_size=400))
def test_unsealing_never_fails_in_another_way(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal(data, "note", RUN, Note)
    with pytest.raises(ProtocolError):
        unseal(msgpack.packb([data, identity(0).public_key_der, data]), "note", RUN, Note)
    with pytest.raises(ProtocolError):
        unseal(envelope(data), "note", RUN, Note)
