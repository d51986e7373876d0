"""Identities: their files, their keys, and what these sign."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from math import gcd
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2

from spes_swarm.base.errors import ProtocolError, UserError
from spes_swarm.protocol.members.identity import Identity, verify
from tests.helpers.refusals import refused
from tests.helpers.rounds import identity
from tests.helpers.small_disk import mounted_disk


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


def test_a_full_disk_leaves_no_part_of_an_identity(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 64 << 10) as disk:
        with suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with pytest.raises(UserError, match=r"identity\.key: No space left on device"):
            Identity.load_or_create(disk / "identity.key")
        assert [path.name for path in disk.iterdir()] == ["filler"]


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
