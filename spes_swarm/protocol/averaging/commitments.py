"""Signatures of what a member sends in an exchange: one for several parts, so that they cost little.

A member signs the root of a Merkle tree over a few parts, and each part comes with its *opening*: the signature and the
path from the part's leaf to the root. An opening is valid on its own, whoever passes it on.

The tree is a search tree: an inner node has the first part of its right side in its digest, so the number of a part
decides whether a path goes left or right. Under one root there is therefore one leaf of a part, however its signer made
the tree. Otherwise a contributor could sign two contributions to a part with one root, give the reducer one of them,
and let the other prove that the reducer's result is wrong.

The keys are Ed25519 keys, which are short and fast. Each process makes one for a run; a *certificate*, which is part of
its statements, binds it to the peer's identity. A proof contains the certificates of those whose signatures it needs,
so it does not depend on the statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple, Self

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.members.identity import Identity, verify

DIGEST_BYTES = 32
SIGNATURE_BYTES = 64
_PART_BYTES = 4
LEAF_BYTES = _PART_BYTES + DIGEST_BYTES
STEP_BYTES = _PART_BYTES + DIGEST_BYTES  # of a path
KEY_BYTES = 32
MAX_CERTIFICATE_BYTES = KEY_BYTES + 512  # with the signature of an RSA key of 4096 bits
# Parts under one signature: their encodings are in memory at the same time.
MAX_BATCH = 8
MAX_BATCH_ELEMENTS = 1 << 19
_MAX_PATH = (MAX_BATCH - 1).bit_length()
CONTRIBUTION: Final = b"contribution"
RESULT: Final = b"result"


class Exchange(NamedTuple):
    """What a signature is good for: one exchange of one run."""

    run_id: str
    round: int
    group_id: bytes

    def message(self, kind: bytes, root: bytes) -> bytes:
        """What is signed."""
        where = self.run_id.encode(), str(self.round).encode()
        return b"\0".join((b"spes_swarm", kind, *where, self.group_id + root))


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The private key of one process."""

    private: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> Self:
        """Makes a new key."""
        return cls(Ed25519PrivateKey.generate())

    @property
    def public(self) -> bytes:
        """The public key."""
        return self.private.public_key().public_bytes_raw()

    def certificate(self, identity: Identity, run_id: str) -> bytes:
        """The public key, and the identity's signature that it is its own in this run."""
        return self.public + identity.sign(_certified(run_id, self.public))

    def commit(self, kind: bytes, exchange: Exchange, leaves: Sequence[bytes]) -> list[Opening]:
        """Signs leaves of different parts, at most MAX_BATCH; returns the opening of each."""
        root, paths = _tree(sorted(leaves))
        signature = self.private.sign(exchange.message(kind, root))
        return [Opening(signature, paths[leaf]) for leaf in leaves]


@dataclass(frozen=True, slots=True)
class Opening:
    """Shows that a leaf is under a signed root."""

    signature: bytes
    path: tuple[bytes, ...]  # from the leaf to the root: the first part on the right of a node, and the leaf's sibling

    def root(self, leaf: bytes) -> bytes:
        """The root that must have been signed if the leaf is right."""
        return _root(leaf[:_PART_BYTES], leaf, self.path)

    def root_without(self, part: int, leaf: bytes) -> bytes | None:
        """The root that has this leaf where that of another part would be, so that it has none of that part.

        None if the leaf is of that part, or is not a leaf.
        """
        sought = _encoded(part)
        return None if leaf[:_PART_BYTES] == sought or len(leaf) != LEAF_BYTES else _root(sought, leaf, self.path)

    @property
    def wire(self) -> bytes:
        """Its encoding."""
        return b"".join((self.signature, *self.path))

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of `wire`.

        Raises:
            ProtocolError: (`malformed`) it is not an opening.
        """
        num_path, rest = divmod(len(data) - SIGNATURE_BYTES, STEP_BYTES)
        if rest or not 0 <= num_path <= _MAX_PATH:
            raise ProtocolError("malformed", f"not an opening: {len(data)} bytes")
        begins = range(SIGNATURE_BYTES, len(data), STEP_BYTES)
        return cls(data[:SIGNATURE_BYTES], tuple(data[begin : begin + STEP_BYTES] for begin in begins))


@dataclass(frozen=True, slots=True)
class Commitment:
    """A signed root."""

    root: bytes
    signature: bytes

    SIZE = DIGEST_BYTES + SIGNATURE_BYTES

    @property
    def wire(self) -> bytes:
        """Its encoding, of SIZE bytes."""
        return self.root + self.signature

    @classmethod
    def from_wire(cls, data: bytes) -> Self:
        """The inverse of `wire`, for SIZE bytes."""
        return cls(data[:DIGEST_BYTES], data[DIGEST_BYTES:])


class Credentials(NamedTuple):
    """What shows which key is a peer's."""

    public_key_der: bytes  # of its identity
    certificate: bytes  # see SigningKey.certificate


@dataclass(frozen=True, slots=True)
class Signer:
    """A peer with its certified key."""

    peer_id: str
    key: bytes

    @classmethod
    def of(cls, credentials: Credentials, run_id: str) -> Self:
        """Verifies a peer's credentials for a run.

        Raises:
            ProtocolError: (`signature`) the identity has not signed the key.
        """
        return cls(_certifier(credentials, run_id), credentials.certificate[:KEY_BYTES])

    def has_signed(self, kind: bytes, exchange: Exchange, commitment: Commitment) -> bool:
        """Returns True if the signature of a root is this peer's."""
        return _is_signed(self.key, exchange.message(kind, commitment.root), commitment.signature)

    def commitment(self, kind: bytes, exchange: Exchange, leaf: bytes, opening: Opening) -> Commitment:
        """The signed root above a leaf.

        Raises:
            ProtocolError: (`signature`) this peer has not signed it.
        """
        commitment = Commitment(opening.root(leaf), opening.signature)
        if not self.has_signed(kind, exchange, commitment):
            raise ProtocolError("signature", f"a {kind.decode()} that {self.peer_id} has not signed")
        return commitment


def batches(sizes: Sequence[int]) -> list[range]:
    """Which parts, with these numbers of elements, are signed together: consecutive ones."""
    ends, elements = [0], 0
    for i, size in enumerate(sizes):
        if i - ends[-1] == MAX_BATCH or (i > ends[-1] and elements + size > MAX_BATCH_ELEMENTS):
            ends.append(i)
            elements = 0
        elements += size
    return [range(begin, end) for begin, end in zip(ends, [*ends[1:], len(sizes)], strict=True) if end > begin]


def digest(*content: bytes) -> bytes:
    """BLAKE3 digest."""
    return blake3(b"".join(content)).digest()


def leaf_of(kind: bytes, part: int, content: bytes) -> bytes:
    """The leaf of a tree that stands for some content about a part."""
    return _encoded(part) + digest(kind, b"\0", content)


def in_place_of(part: int, leaves: Sequence[bytes]) -> bytes:
    """The leaf of a tree that is where that of a part would be, if the tree has none of that part."""
    return max((leaf for leaf in leaves if leaf < _encoded(part)), default=min(leaves))


def _encoded(part: int) -> bytes:
    return part.to_bytes(_PART_BYTES, "big")


def _tree(leaves: Sequence[bytes]) -> tuple[bytes, dict[bytes, tuple[bytes, ...]]]:
    """The root above ascending leaves, and the path of each."""
    if len(leaves) == 1:
        return _bottom(leaves[0]), {leaves[0]: ()}
    half = (len(leaves) + 1) // 2
    split = leaves[half][:_PART_BYTES]
    (left, left_paths), (right, right_paths) = _tree(leaves[:half]), _tree(leaves[half:])
    paths = {leaf: (*path, split + right) for leaf, path in left_paths.items()}
    return _parent(split, left, right), paths | {leaf: (*path, split + left) for leaf, path in right_paths.items()}


def _root(part: bytes, leaf: bytes, path: Sequence[bytes]) -> bytes:
    """The root above a leaf, on the path of a part."""
    node = _bottom(leaf)
    for step in path:
        split, sibling = step[:_PART_BYTES], step[_PART_BYTES:]
        node = _parent(split, node, sibling) if part < split else _parent(split, sibling, node)
    return node


def _bottom(leaf: bytes) -> bytes:
    return digest(b"\0", leaf)


def _parent(split: bytes, left: bytes, right: bytes) -> bytes:
    return digest(b"\1", split, left, right)


def _certified(run_id: str, public: bytes) -> bytes:
    return b"\0".join((b"spes_swarm", b"signing key", run_id.encode(), public))


@lru_cache(maxsize=1024)
def _certifier(credentials: Credentials, run_id: str) -> str:
    public, signature = credentials.certificate[:KEY_BYTES], credentials.certificate[KEY_BYTES:]
    return verify(credentials.public_key_der, _certified(run_id, public), signature)


@lru_cache(maxsize=4096)  # many parts are under one root
def _is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
