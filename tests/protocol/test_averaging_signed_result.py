"""What goes along with a result: signatures, and the roots of its contributions, each sent once on a stream."""

from __future__ import annotations

import struct
from random import Random

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging import signed_result
from spes_swarm.protocol.averaging.commitments import Commitment, Opening
from spes_swarm.protocol.averaging.signed_result import (
    Head,
    SignedResult,
    contribution_leaf,
    decode,
    encode,
    head_of,
)
from tests.helpers.mutation import garbage, mutated
from tests.helpers.signed_exchange import hold_exchange

digests = st.binary(min_size=32, max_size=32)


def a_root(number: int) -> Commitment:
    return Commitment(bytes([number]) * 32, bytes([number]) * 64)


def an_opening(num_steps: int) -> Opening:
    return Opening(b"\7" * 64, tuple(bytes([i]) * 36 for i in range(num_steps)))


@given(st.integers(0, 2**32 - 1), digests, digests, digests)
def test_a_head_is_its_fields_in_order(part: int, recipe: bytes, payload: bytes, contributions: bytes) -> None:
    head = Head(part, recipe, payload, contributions)
    assert head.wire == struct.pack("<I", part) + recipe + payload + contributions
    assert len(head.wire) == Head.SIZE
    assert Head.from_wire(head.wire) == head
    assert head.leaf == part.to_bytes(4, "big") + blake3(b"result\0" + head.wire).digest()


def test_a_head_has_the_digests_of_the_payload_and_of_all_roots_in_order() -> None:
    roots = [a_root(2), a_root(1)]
    expected = blake3(roots[0].root + roots[0].signature + roots[1].root + roots[1].signature).digest()
    assert head_of(3, b"r" * 32, b"payload", roots) == Head(3, b"r" * 32, blake3(b"payload").digest(), expected)


def test_a_contribution_is_signed_with_its_part_and_content() -> None:
    content = blake3(b"payload").digest()
    assert contribution_leaf(9, b"payload") == b"\0\0\0\x09" + blake3(b"contribution\0" + content).digest()
    assert len({contribution_leaf(*each) for each in ((9, b""), (8, b""), (9, b"x"))}) == 3


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3)), max_size=8))
def test_a_stream_carries_each_root_once(results: list[tuple[list[int], int]]) -> None:
    sent: dict[Commitment, int] = {}
    known: list[Commitment] = []
    num_bytes = 0
    for numbers, num_steps in results:
        included = frozenset(range(len(numbers)))
        roots = tuple(map(a_root, numbers))
        signed = SignedResult(Head(0, b"", b"", b""), an_opening(num_steps), roots)
        data = encode(included, 9, signed, sent)
        num_bytes += len(data) - (2 + 1 + 64 + 36 * num_steps + 4 * len(roots))
        assert decode(data, 9, known) == (included, signed.opening, roots)
    assert num_bytes == 96 * len({number for numbers, _ in results for number in numbers})


def test_a_reference_to_a_root_that_was_not_sent_is_refused_and_changes_nothing() -> None:
    signed = SignedResult(Head(0, b"", b"", b""), an_opening(0), (a_root(1), a_root(2)))
    data = encode(frozenset({0, 1}), 2, signed, {a_root(2): 5})
    known: list[Commitment] = []
    with pytest.raises(ProtocolError, match="malformed: a result refers to a signed root that was not sent"):
        decode(data, 2, known)
    assert known == []


def test_a_result_has_no_more_new_roots_than_contributions() -> None:
    signed = SignedResult(Head(0, b"", b"", b""), an_opening(0), (a_root(1),))
    data = encode(frozenset({1}), 2, signed, {}) + a_root(2).wire
    with pytest.raises(ProtocolError, match="malformed: a result with more signed roots than contributions"):
        decode(data, 2, [])


def test_a_stream_has_a_limited_number_of_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_result, "MAX_COMMITMENTS", 3)
    signed = SignedResult(Head(0, b"", b"", b""), an_opening(0), (a_root(1), a_root(2)))
    data = encode(frozenset({0, 1}), 2, signed, {})
    known = [a_root(0), a_root(3)]
    with pytest.raises(ProtocolError, match="oversized: more than 3 signed roots on a stream"):
        decode(data, 2, known)
    assert len(known) == 2


def test_garbage_is_refused_and_changes_nothing() -> None:
    random = Random(5)
    wires = [
        encode(frozenset(range(3)), 3, each.signed, {}) for each in hold_exchange(np.random.default_rng(1), num_parts=3)
    ]
    for _ in range(3000):
        data = garbage(random) if random.random() < 0.3 else mutated(random, *random.sample(wires, 2))
        known: list[Commitment] = []
        try:
            decode(data, random.choice((3, 3, 1, 40)), known)
        except ProtocolError as exc:
            assert exc.kind in ("malformed", "oversized")  # noqa: PT017 - only if it is one
            assert known == []
