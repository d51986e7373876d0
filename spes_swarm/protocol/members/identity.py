"""A peer's identity: one RSA key that identifies it in libp2p and signs all its messages.

The identity file is the private key in libp2p's protobuf envelope, the format that the P2P daemon reads. So the peer id
that others see on a connection is by construction that of the key that signs the records. The envelope (libp2p spec
peer-ids.md) is encoded by hand here, because hivemind's protobuf module imports torch, which takes seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from spes_swarm.base.errors import ProtocolError, UserError

_NEW_ONE = "move it away to get a new one (a private run then has to invite this peer again)"
_KEY_BITS = 2048
_MAX_KEY_BITS = 4096
# The only public exponent accepted. With one as long as the modulus, a signature takes 56 times as long to verify. If
# any exponent were allowed, one modulus would give its owner any number of identities for free.
_EXPONENT = 65537
_MAX_PUBLIC_KEY_BYTES = 1024
_ENVELOPE_START = b"\x08\x00\x12"  # field 1, the key type: RSA; field 2, the key; its length follows
_PADDING = padding.PKCS1v15()
_HASH = hashes.SHA256()


def _peer_id_of(public_key_der: bytes) -> str:
    """Base58 libp2p peer id of an RSA public key (multihash of its protobuf envelope, libp2p spec peer-ids.md)."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(_envelope(public_key_der))
    sha2_256_multihash_prefix = b"\x12\x20"
    encoded: bytes = base58.b58encode(sha2_256_multihash_prefix + digest.finalize())
    return encoded.decode("ascii")


def protobuf_varint(number: int) -> bytes:
    """Encodes a non-negative number as a protobuf varint."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _envelope(key_der: bytes) -> bytes:
    """The protobuf message of an RSA key."""
    return _ENVELOPE_START + protobuf_varint(len(key_der)) + key_der


def _key_in(envelope: bytes) -> bytes:
    """The inverse of `_envelope`.

    Raises:
        ValueError: it is not the envelope of an RSA key.
    """
    for num_length_bytes in (1, 2, 3):
        key_der = envelope[len(_ENVELOPE_START) + num_length_bytes :]
        if _envelope(key_der) == envelope:
            return key_der
    raise ValueError("not the envelope of an RSA key")


@dataclass(frozen=True)
class Identity:
    """The key pair of this peer."""

    private_key: rsa.RSAPrivateKey
    path: Path

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Reads the identity file, or creates it (mode 0400) if there is none.

        Raises:
            UserError: the file exists but is not an RSA identity, or it cannot be read or written.
        """
        try:
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                _write_new_identity(path)
        except OSError as exc:
            raise UserError(f"identity file {path}: {exc.strerror}") from exc
        return cls.load(path)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Reads the identity file.

        Raises:
            UserError: it is not an RSA identity, or it cannot be read.
        """
        try:
            data = path.read_bytes()
        except OSError as exc:
            raise UserError(f"identity file {path}: {exc.strerror}") from exc
        try:
            key = serialization.load_der_private_key(_key_in(data), password=None)
        except Exception as exc:  # cryptography raises many types here; all mean the same to the user
            raise UserError(f"identity file {path} is not a libp2p RSA key; {_NEW_ONE}") from exc
        if not isinstance(key, rsa.RSAPrivateKey):
            raise UserError(f"identity file {path} holds a key that is not RSA; {_NEW_ONE}")
        if (fault := _fault_of(key.public_key())) is not None:
            raise UserError(f"identity file {path}: {fault}; {_NEW_ONE}")
        return cls(private_key=key, path=path)

    @cached_property
    def public_key_der(self) -> bytes:
        """SubjectPublicKeyInfo in DER, as sent inside signed messages."""
        return self.private_key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @cached_property
    def peer_id(self) -> str:
        """Base58 libp2p peer id."""
        return _peer_id_of(self.public_key_der)

    def sign(self, payload: bytes) -> bytes:
        """RSA PKCS#1 v1.5 signature with SHA-256, as long as the key (deterministic: equal payloads, equal bytes)."""
        return self.private_key.sign(payload, _PADDING, _HASH)


def _write_new_identity(path: Path) -> None:
    key = rsa.generate_private_key(public_exponent=_EXPONENT, key_size=_KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    envelope = _envelope(der)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(envelope)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:  # the disk is full, for instance
        temporary.unlink(missing_ok=True)
        raise


def _fault_of(key: rsa.RSAPublicKey) -> str | None:
    """Why a key cannot be an identity; None if it can."""
    if not _KEY_BITS <= key.key_size <= _MAX_KEY_BITS:
        return f"an RSA key of {key.key_size} bits, expected {_KEY_BITS} to {_MAX_KEY_BITS}"
    if (exponent := key.public_numbers().e) != _EXPONENT:
        return f"an RSA key with a public exponent of {exponent.bit_length()} bits, expected {_EXPONENT}"
    return None


@lru_cache(maxsize=4096)
def _parse_public_key(public_key_der: bytes) -> tuple[rsa.RSAPublicKey, str]:
    if len(public_key_der) > _MAX_PUBLIC_KEY_BYTES:
        raise ProtocolError("signature", f"public key of {len(public_key_der)} bytes")
    try:
        key = serialization.load_der_public_key(public_key_der)
    except Exception as exc:  # malformed DER surfaces as several exception types
        raise ProtocolError("signature", "malformed public key") from exc
    if not isinstance(key, rsa.RSAPublicKey):
        raise ProtocolError("signature", "the public key is not RSA")
    if (fault := _fault_of(key)) is not None:
        raise ProtocolError("signature", fault)
    if key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo) != public_key_der:
        raise ProtocolError("signature", "the public key is not in DER")  # another encoding would be another peer id
    return key, _peer_id_of(public_key_der)


def verify(public_key_der: bytes, payload: bytes, signature: bytes) -> str:
    """Verifies a signature and returns the base58 peer id of the signer.

    Raises:
        ProtocolError: (`signature`) the signature does not match, or the key is malformed or not an RSA key of 2048 to
            4096 bits with the exponent 65537.
    """
    key, peer_id = _parse_public_key(public_key_der)
    try:
        key.verify(signature, payload, _PADDING, _HASH)
    except InvalidSignature as exc:
        raise ProtocolError("signature", f"a message from {peer_id} is not signed by its key") from exc
    return peer_id
