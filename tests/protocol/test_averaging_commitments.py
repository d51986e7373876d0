"""Signed roots of a few parts: what an opening shows, and what nobody can make it show."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    MAX_BATCH,
    MAX_BATCH_ELEMENTS,
    MAX_CERTIFICATE_BYTES,
    RESULT,
    Commitment,
    Credentials,
    Exchange,
    Opening,
    Signer,
    SigningKey,
    batches,
    leaf_of,
)
from tests.helpers.mutation import garbage, mutated
from tests.helpers.rounds import identity
from tests.helpers.signed_exchange import EXCHANGE, RUN_ID, member

part_numbers = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_BATCH, unique=True)


def leaves_of(parts: list[int]) -> list[bytes]:
    return [leaf_of(CONTRIBUTION, part, b"content of %d" % part) for part in parts]


def root_of(parts: list[int]) -> bytes:
    """The root of a batch, from its definition: halves of the sorted parts, the first half no shorter."""

    def node(ordered: list[int]) -> bytes:
        if len(ordered) == 1:
            key = ordered[0].to_bytes(4, "big")
            content = b"contribution\0content of " + str(ordered[0]).encode()
            return blake3(b"\0" + key + blake3(content).digest()).digest()
        half = (len(ordered) + 1) // 2
        split = ordered[half].to_bytes(4, "big")
        return blake3(b"\1" + split + node(ordered[:half]) + node(ordered[half:])).digest()

    return node(sorted(parts))


@given(part_numbers)
def test_each_leaf_of_a_batch_opens_the_root_that_was_signed(parts: list[int]) -> None:
    who, leaves = member(0), leaves_of(parts)
    signer = Signer.of(who.credentials, RUN_ID)
    openings = who.key.commit(CONTRIBUTION, EXCHANGE, leaves)
    for leaf, opening in zip(leaves, openings, strict=True):
        assert Opening.from_wire(opening.wire) == opening
        commitment = signer.commitment(CONTRIBUTION, EXCHANGE, leaf, opening)
        assert commitment == Commitment(root_of(parts), opening.signature)
        assert Commitment.from_wire(commitment.wire) == commitment
        assert len(commitment.wire) == Commitment.SIZE


@given(part_numbers, st.data())
def test_an_opening_is_of_one_leaf_only(parts: list[int], data: st.DataObject) -> None:
    who, leaves = member(0), leaves_of(parts)
    signer = Signer.of(who.credentials, RUN_ID)
    opening = data.draw(st.sampled_from(who.key.commit(CONTRIBUTION, EXCHANGE, leaves)))
    fitting = [
        leaf
        for leaf in leaves
        if signer.has_signed(CONTRIBUTION, EXCHANGE, Commitment(opening.root(leaf), opening.signature))
    ]
    assert len(fitting) == 1
    other = leaf_of(CONTRIBUTION, data.draw(st.sampled_from(parts)), b"other content")
    with pytest.raises(ProtocolError, match=r"signature: a contribution that .* has not signed"):
        signer.commitment(CONTRIBUTION, EXCHANGE, other, opening)


def test_a_root_has_one_leaf_of_a_part_however_its_tree_was_made() -> None:
    """With two, a contributor could show the reducer one and everybody else the other."""
    one, two = leaf_of(CONTRIBUTION, 5, b"one"), leaf_of(CONTRIBUTION, 5, b"two")
    bottoms = [blake3(b"\0" + leaf).digest() for leaf in (one, two)]
    signature = bytes(64)
    for split in range(4, 8):
        key = split.to_bytes(4, "big")
        root = blake3(b"\1" + key + bottoms[0] + bottoms[1]).digest()
        openings = {one: Opening(signature, (key + bottoms[1],)), two: Opening(signature, (key + bottoms[0],))}
        assert sum(opening.root(leaf) == root for leaf, opening in openings.items()) == 1
    # A leaf is not an inner node, nor an inner node a leaf.
    assert Opening(signature, ()).root(one) not in (one, root)


def test_signatures_are_good_for_one_kind_exchange_and_run() -> None:
    who = member(0)
    (opening,) = who.key.commit(CONTRIBUTION, EXCHANGE, (leaf := leaves_of([3])))
    commitment = Commitment(opening.root(leaf[0]), opening.signature)
    signer = Signer.of(who.credentials, RUN_ID)
    assert signer.has_signed(CONTRIBUTION, EXCHANGE, commitment)
    others = [
        EXCHANGE._replace(round=8),
        EXCHANGE._replace(group_id=bytes(32)),
        EXCHANGE._replace(run_id="other"),
        Exchange(f"{RUN_ID}\x007", 7, EXCHANGE.group_id),
    ]
    assert not any(signer.has_signed(CONTRIBUTION, other, commitment) for other in others)
    assert not signer.has_signed(RESULT, EXCHANGE, commitment)
    assert not Signer.of(member(1).credentials, RUN_ID).has_signed(CONTRIBUTION, EXCHANGE, commitment)


def test_a_certificate_is_good_for_one_identity_key_and_run() -> None:
    key = SigningKey.generate()
    certificate = key.certificate(identity(0), RUN_ID)
    signer = Signer.of(Credentials(identity(0).public_key_der, certificate), RUN_ID)
    assert signer == Signer(identity(0).peer_id, key.private.public_key().public_bytes_raw())
    assert len(certificate) <= MAX_CERTIFICATE_BYTES
    others = [
        (Credentials(identity(1).public_key_der, certificate), RUN_ID),
        (Credentials(identity(0).public_key_der, certificate), "other"),
        (Credentials(identity(0).public_key_der, bytes(32) + certificate[32:]), RUN_ID),
        (Credentials(identity(0).public_key_der, certificate[:-1]), RUN_ID),
        (Credentials(identity(0).public_key_der, b""), RUN_ID),
        (Credentials(b"", certificate), RUN_ID),
    ]
    for credentials, run_id in others:
        with pytest.raises(ProtocolError, match="signature: "):
            Signer.of(credentials, run_id)


def test_a_key_that_is_not_one_has_signed_nothing() -> None:
    for key in (b"", bytes(31), b"\xff" * 32):
        assert not Signer("x", key).has_signed(CONTRIBUTION, EXCHANGE, Commitment(bytes(32), bytes(64)))


def test_what_is_not_an_opening_is_refused() -> None:
    random = Random(3)
    openings = [o.wire for n in (1, 2, 8) for o in member(0).key.commit(RESULT, EXCHANGE, leaves_of([*range(n)]))]
    for _ in range(2000):
        data = garbage(random) if random.random() < 0.5 else mutated(random, *random.sample(openings, 2))
        try:
            assert Opening.from_wire(data).wire == data
        except ProtocolError as exc:
            assert exc.kind == "malformed"  # noqa: PT017 - only if it is one
    for length in (0, 63, 65, 99, 64 + 4 * 36):
        with pytest.raises(ProtocolError, match=f"malformed: not an opening: {length} bytes"):
            Opening.from_wire(bytes(length))


@given(st.lists(st.integers(1, 2 * MAX_BATCH_ELEMENTS), max_size=40))
def test_batches_are_consecutive_and_small(sizes: list[int]) -> None:
    made = batches(sizes)
    assert [i for batch in made for i in batch] == [*range(len(sizes))]
    for batch in made:
        assert 1 <= len(batch) <= MAX_BATCH
        assert len(batch) == 1 or sum(sizes[i] for i in batch) <= MAX_BATCH_ELEMENTS
    for batch, after in pairwise(made):  # none could be larger
        assert len(batch) == MAX_BATCH or sum(sizes[i] for i in [*batch, after[0]]) > MAX_BATCH_ELEMENTS
