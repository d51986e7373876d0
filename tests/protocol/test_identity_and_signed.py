"""Who says what: identities, signatures, and what must not pass for signed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import permutations
from math import gcd
from pathlib import Path
from typing import Any

import msgpack
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_swarm.base.decoding import MAX_MESSAGE_BYTES, unpack
from spes_swarm.base.errors import ProtocolError, UserError
from spes_swarm.protocol.consensus.lineage import MARK_BYTES
from spes_swarm.protocol.members.identity import Identity, verify
from spes_swarm.protocol.members.signed import SignedModel, seal, unseal
from spes_swarm.protocol.rounds.statement import Statement, form_group, open_statement
from spes_swarm.protocol.rounds.vouchers import MAX_VOUCHED, VOUCHER_BYTES
from spes_swarm.protocol.version import check_version
from tests.helpers.rounds import identity, sign_statement
from tests.helpers.small_disk import mounted_disk

RUN = "run-1"


class Note(SignedModel):
    """A message of the tests."""

    text: str
    count: int
    share: float = 0.5


NOTE = Note(text="hello", count=3)


# The identity file.


@pytest.mark.slow
def test_an_identity_is_made_once_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.key"
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    assert Identity.load_or_create(tmp_path / "other.key").peer_id != made.peer_id


def test_the_peer_id_is_the_one_that_libp2p_derives_from_the_file() -> None:
    me = identity(0)
    assert me.peer_id == str(PeerID.from_identity(me.path.read_bytes()))


def test_a_signature_is_plain_rsa_that_anybody_can_check() -> None:
    me = identity(0)
    signature = me.sign(b"payload")
    me.private_key.public_key().verify(signature, b"payload", padding.PKCS1v15(), hashes.SHA256())
    assert verify(me.public_key_der, b"payload", signature) == me.peer_id


def elliptic_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    return key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a key",
        os.urandom(1200),
        crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=b"rubbish").SerializeToString(),
        crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=elliptic_key()).SerializeToString(),
    ],
    ids=["empty", "text", "random", "rubbish in an envelope", "not RSA"],
)
def test_a_file_that_is_no_identity_is_named_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"identity\.key .*move it away"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_truncated_identity_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(identity(0).path.read_bytes()[:-100])
    with pytest.raises(UserError, match="not a libp2p RSA key"):
        Identity.load_or_create(path)


def test_an_identity_that_cannot_be_written_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/identity\.key: "):
        Identity.load_or_create(tmp_path / "file" / "identity.key")
    with pytest.raises(UserError, match="Is a directory"):
        Identity.load_or_create(tmp_path)


# Signed messages.


def refused(kind: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolError) as error:
        call()
    assert error.value.kind == kind, error.value


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


def envelope(payload: Any, version: Sequence[int] = (6, 0)) -> bytes:
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


@pytest.mark.parametrize("version", [(6, 0), (6, 1), (6, 65_535)])
def test_a_field_that_is_not_known_is_ignored_only_in_a_message_of_a_newer_version(version: tuple[int, int]) -> None:
    data = envelope({"text": "hello", "count": 3, "more": {"than": ["this"]}}, version)
    if version <= (6, 0):
        refused("schema", lambda: unseal(data, "note", RUN, Note))
    else:
        assert unseal(data, "note", RUN, Note)[1] == NOTE


def test_a_field_that_is_not_known_is_ignored_in_what_a_newer_message_contains_too() -> None:
    class Notes(SignedModel):
        notes: list[Note]

    inner = {"notes": [{"text": "hello", "count": 3, "more": 1}]}
    assert unseal(envelope(inner, (6, 1)), "note", RUN, Notes)[1].notes == [NOTE]
    refused("schema", lambda: unseal(envelope(inner), "note", RUN, Notes))
    wrong = {"notes": [{"text": "hello", "count": "3", "more": 1}]}
    refused("schema", lambda: unseal(envelope(wrong, (6, 1)), "note", RUN, Notes))


@pytest.mark.parametrize(
    "payload", [{"text": "hello", "more": 1}, {"text": "hello", "count": "3", "more": 1}, ["hello", 3], None, 7]
)
def test_what_is_known_must_fit_in_a_newer_version_too(payload: Any) -> None:
    refused("schema", lambda: unseal(envelope(payload, (6, 1)), "note", RUN, Note))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (envelope({"text": "hello", "count": 3}, (7, 1)), "speaks protocol 7.1, this side 6.0: upgrade this side"),
        (msgpack.packb([[7, 1]]), "speaks protocol 7.1, this side 6.0: upgrade this side"),
        (msgpack.packb([[65_535, 0], {"a": "form"}, 5]), "speaks protocol 65535.0, this side 6.0: upgrade this side"),
        (envelope({"text": "hello", "count": 3}, (1, 7)), "protocol 1.7, this side 6.0: upgrade the writer of a note"),
        (msgpack.packb([b"", b"", b""]), "protocol 1.0, this side 6.0: upgrade the writer of a note"),  # as it was then
    ],
    ids=["newer", "nothing else", "another form", "older", "without a version"],
)
def test_of_another_major_version_only_the_version_is_read(data: bytes, words: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(words)) as error:
        unseal(data, "note", RUN, Note)
    assert error.value.kind == "version"


def test_the_signature_covers_the_version() -> None:
    _, *rest = msgpack.unpackb(envelope({"text": "hello", "count": 3}))
    refused("signature", lambda: unseal(msgpack.packb([[6, 1], *rest]), "note", RUN, Note))


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
    assert kind in ("malformed", "version") if version is None else version.major == 6


@given(st.integers(0, 65_535), st.integers(0, 65_535))
@example(6, 5)
@example(5, 6)
def test_exactly_the_side_with_the_smaller_major_version_upgrades(major: int, minor: int) -> None:
    if major == 6:
        assert check_version([major, minor], "it") == (major, minor)
        return
    with pytest.raises(ProtocolError, match=f"it speaks protocol {major}.{minor}, this side 6.0: upgrade ") as error:
        check_version([major, minor], "it")
    assert error.value.detail.endswith("upgrade it" if major < 6 else "upgrade this side")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(3),
        msgpack.packb([]),
        msgpack.packb([[6, 0]]),
        msgpack.packb([[6, 0], b"", b"", b"", b""]),
        msgpack.packb([[6, 0], b"", "", b""]),
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


def test_weak_and_foreign_keys_are_refused() -> None:
    keys: list[rsa.RSAPublicKey | ec.EllipticCurvePublicKey] = [
        rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key(),
        ec.generate_private_key(ec.SECP256R1()).public_key(),
    ]
    for key in keys:
        der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
        refused("signature", lambda der=der: verify(der, b"payload", b"\0" * 256))  # type: ignore[misc]
    refused("signature", lambda: verify(b"\x30" * 1025, b"payload", b""))


def public_der(key: rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def with_exponent(exponent: int) -> rsa.RSAPrivateKey:
    """The key of identity 0 with another public exponent: the same modulus, and another peer id."""
    known = identity(0).private_key.private_numbers()
    order = (known.p - 1) * (known.q - 1)
    while gcd(exponent, order) > 1:
        exponent += 2
    private = pow(exponent, -1, order)
    return rsa.RSAPrivateNumbers(
        known.p,
        known.q,
        private,
        rsa.rsa_crt_dmp1(private, known.p),
        rsa.rsa_crt_dmq1(private, known.q),
        known.iqmp,
        rsa.RSAPublicNumbers(exponent, known.public_numbers.n),
    ).private_key()


@pytest.mark.parametrize("exponent", [3, 17, 65539, (1 << 64) - 1, (1 << 2046) + 1], ids=int.bit_length)
def test_keys_with_another_exponent_are_refused_although_their_signatures_fit(exponent: int) -> None:
    key = with_exponent(exponent)
    assert key.public_key().public_numbers().n == identity(0).private_key.public_key().public_numbers().n
    signature = key.sign(b"payload", padding.PKCS1v15(), hashes.SHA256())
    key.public_key().verify(signature, b"payload", padding.PKCS1v15(), hashes.SHA256())
    refused("signature", lambda: verify(public_der(key.public_key()), b"payload", signature))


def test_only_moduli_of_usual_sizes_are_accepted() -> None:
    for bits, is_accepted in ((2048, True), (3072, True), (4096, True), (4104, False), (7000, False)):
        # Not a product of two primes, which nobody can see; no signature fits.
        der = public_der(rsa.RSAPublicNumbers(65537, (1 << bits) - 1).public_key())
        with pytest.raises(ProtocolError, match="not signed by its key" if is_accepted else f"{bits} bits"):
            verify(der, b"payload", b"\1" * (bits // 8))


def test_one_key_has_one_peer_id() -> None:
    """Its DER is unique; what a lenient parser takes as well would be as many identities as one likes."""
    me = identity(0)
    der, signature = me.public_key_der, me.sign(b"payload")
    assert verify(der, b"payload", signature) == me.peer_id
    key = identity(0).private_key.public_key()
    null = der.index(b"\x05\x00")  # the parameters of the algorithm, which parsers do not miss
    length = (len(der) - 6).to_bytes(2, "big")
    without_null = b"\x30\x82" + length + der[4:5] + bytes([der[5] - 2]) + der[6:null] + der[null + 2 :]
    for other in (key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.PKCS1), without_null):
        parsed = serialization.load_der_public_key(other)
        assert isinstance(parsed, rsa.RSAPublicKey)
        assert parsed.public_numbers() == key.public_numbers()
        with pytest.raises(ProtocolError, match="not in DER"):
            verify(other, b"payload", signature)


def test_an_identity_file_that_others_would_refuse_is_named(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    der = with_exponent(3).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    path.write_bytes(crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())
    with pytest.raises(UserError, match=r"identity\.key: .*exponent.*move it away"):
        Identity.load_or_create(path)


@pytest.mark.slow
@given(st.binary(max_size=400))
def test_unsealing_never_fails_in_another_way(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unseal(data, "note", RUN, Note)
    with pytest.raises(ProtocolError):
        unseal(msgpack.packb([data, identity(0).public_key_der, data]), "note", RUN, Note)
    with pytest.raises(ProtocolError):
        unseal(envelope(data), "note", RUN, Note)


# Statements and groups.

NUM_BLOCKS = 5


def statement(**changes: Any) -> Statement:
    fields: dict[str, Any] = {
        "round": 3,
        "held": [0, 2],
        "tokens": 100,
        "routed": [10, 20],
        "rms": [0.01, 0.02, 0.03],
        "usual_rms": [0.0, 0.0],
        "vouched": b"",
        "bandwidth_mbps": 50.0,
        "reachable": True,
        "versions": [0] * NUM_BLOCKS,
        "digests": [b"\1" * 32] * NUM_BLOCKS,
        "commits": [1, 2],
        "marks": b"\1" * 2 * MARK_BYTES,
        "room": 2,
        "fixed": False,
        "leaving": False,
        "leased": b"\0",
        "certificate": b"",
    }
    return Statement(**{**fields, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"held": [2, 0]},
        {"held": [2, 2]},
        {"held": [0, 4]},  # there are four experts: 0 to 3
        {"held": [-1, 2]},
        {"routed": [10]},
        {"routed": [10, -1]},
        {"tokens": -1},
        {"tokens": 1 << 49},
        {"rms": [0.01, 0.02]},
        {"rms": [0.01, 0.02, -0.01]},
        {"rms": [0.01, 0.02, float("nan")]},
        {"rms": [1e31, 0.02, 0.03]},
        {"usual_rms": [0.01]},
        {"usual_rms": [0.01, float("inf")]},
        {"vouched": bytes(VOUCHER_BYTES - 1)},
        {"vouched": bytes(VOUCHER_BYTES * (MAX_VOUCHED + 1))},
        {"bandwidth_mbps": 0.0},
        {"bandwidth_mbps": float("nan")},
        {"bandwidth_mbps": float("inf")},
        {"versions": [0] * 4},
        {"versions": [-1] * NUM_BLOCKS},
        {"digests": [b"\1" * 31] * NUM_BLOCKS},
        {"digests": [b"\1" * 32] * 2, "versions": [0] * 2},
        {"round": -1},
        {"reachable": 1},
        {"commits": [2, 1]},
        {"commits": [1, 3]},
        {"commits": [1]},
        {"marks": b""},
        {"leased": b""},
        {"loss_rose": 1},
        {"before": b"\1" * 31},
        {"before": b"\1" * 33},
    ],
    ids=repr,
)
def test_a_statement_that_contradicts_itself_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        statement(**changes)


def test_a_statement_is_for_one_run_round_and_model() -> None:
    data = sign_statement(identity(0), RUN, statement())
    member = open_statement(data, RUN, 3, NUM_BLOCKS)
    assert (member.peer_id, member.statement.tokens) == (identity(0).peer_id, statement().tokens)
    refused("signature", lambda: open_statement(data, "run-2", 3, NUM_BLOCKS))
    refused("round", lambda: open_statement(data, RUN, 4, NUM_BLOCKS))
    refused("shape", lambda: open_statement(data, RUN, 3, NUM_BLOCKS + 1))


@pytest.mark.slow
def test_a_group_is_the_same_in_whatever_order_it_was_gathered() -> None:
    gathered = [sign_statement(identity(i), RUN, statement(tokens=i)) for i in range(3)]
    groups = [form_group(RUN, 3, order, NUM_BLOCKS) for order in permutations(gathered)]
    assert len({group.id for group in groups}) == 1
    for group in groups:
        assert [m.peer_id for m in group.members] == sorted(identity(i).peer_id for i in range(3))
        assert [group.index_of(m.peer_id) for m in group.members] == [0, 1, 2]
        assert group.index_of(identity(3).peer_id) is None


def test_every_group_has_a_name_of_its_own() -> None:
    one, two, other = (sign_statement(identity(i), RUN, statement(tokens=t)) for i, t in ((0, 1), (1, 1), (1, 2)))
    ids = [form_group(RUN, 3, gathered, NUM_BLOCKS).id for gathered in ([one], [two], [one, two], [one, other])]
    assert len(set(ids)) == 4


def test_a_peer_is_in_a_group_once() -> None:
    gathered = [sign_statement(identity(0), RUN, statement(tokens=t)) for t in (1, 2)]
    refused("duplicate", lambda: form_group(RUN, 3, gathered, NUM_BLOCKS))


def test_a_full_disk_leaves_no_part_of_an_identity(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 64 << 10) as disk:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(UserError, match=r"identity\.key: No space left on device"):
            Identity.load_or_create(disk / "identity.key")
        assert [path.name for path in disk.iterdir()] == ["filler"]
