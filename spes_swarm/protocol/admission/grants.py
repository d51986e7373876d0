"""Invitations to a private run: chains of signatures that everybody verifies offline.

    founder's identity ──signs──▶ grant ──its key signs──▶ grant ... ──the last key signs──▶ a peer id

A *grant* lets whoever has its key admit peers on the grant's terms and, if they say so, make further grants. An
*invitation* is a chain of grants with the private key of the last one, in one word. A newcomer signs its own peer id
with that key. The chain with this signature is its *admission*, which is useless to any other peer. In place of a key,
the last grant of a chain may name a peer: an entry of an allow-list.

Keys of grants are Ed25519 keys, which are short; the founder's is the RSA key of its identity.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Final

import msgpack
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, ValidationError, model_validator

from spes_swarm.base.decoding import first_complaint, unpack
from spes_swarm.base.errors import InvitationError, ProtocolError
from spes_swarm.protocol.members.identity import Identity, verify
from spes_swarm.protocol.members.signed import SignedModel

MAX_GRANTS = 4
MAX_ADMISSION_BYTES = 2048
MAX_USES = 200
MAX_PEER_ID_CHARS = 128
INVITATION: Final = re.compile(r"spes1\.[A-Za-z0-9_-]{40,4096}")
ROOT = bytes(32)  # in place of the grant before the first one
_KEY_BYTES = 32


class Terms(SignedModel):
    """What those admitted may do."""

    name: Annotated[str, Field(max_length=40, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""  # for whom it was made
    expires: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None  # Unix seconds, of all participation
    experts: Annotated[int, Field(ge=1, lt=1 << 20)] | None = None  # the most that a peer may hold
    weight: Annotated[float, Field(gt=0, lt=1)] | None = None  # the largest share of a block's average
    may_invite: bool = False
    may_publish: bool = True


class Grant(Terms):
    """One link of a chain."""

    key: Annotated[bytes, Field(max_length=_KEY_BYTES)] = b""  # public
    peer: Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)] = ""
    uses: Annotated[int, Field(ge=1, le=MAX_USES)] | None = None  # how many peers its key may admit, at any depth

    @model_validator(mode="after")
    def _check(self) -> Grant:
        if (len(self.key) == _KEY_BYTES) == bool(self.peer) or len(self.key) not in (0, _KEY_BYTES):
            raise ValueError("a grant has either a key or a peer")
        return self


@dataclass(frozen=True)
class Chain:
    """Verified grants, the founder's first."""

    grants: tuple[Grant, ...]
    ids: tuple[bytes, ...]  # digest of each grant and, with it, of those before
    wire: tuple[tuple[bytes, bytes], ...]

    @property
    def limits(self) -> list[tuple[bytes, int]]:
        """The grants that admit only so many peers: (id, number)."""
        limited = zip(self.ids, self.grants, strict=True)
        return [(grant_id, grant.uses) for grant_id, grant in limited if grant.uses is not None]

    @cached_property
    def terms(self) -> Terms:
        """What those admitted may do: of each limit, the strictest in the chain."""
        grants, last = self.grants, self.grants[-1]
        return Terms(
            name=last.name,
            expires=min((one.expires for one in grants if one.expires is not None), default=None),
            experts=min((one.experts for one in grants if one.experts is not None), default=None),
            weight=min((one.weight for one in grants if one.weight is not None), default=None),
            may_invite=last.may_invite,
            may_publish=all(one.may_publish for one in grants),
        )


def pack(content: object) -> bytes:
    """Encodes what is signed or sent."""
    return bytes(msgpack.packb(content, use_bin_type=True))


def signed_bytes(kind: bytes, run_id: str, grant_id: bytes, payload: bytes) -> bytes:
    """What a grant's key signs: a payload of one kind. `grant_id` is that of the grant, zeros for the founder."""
    return b"\0".join((b"spes_swarm", kind, run_id.encode(), grant_id, payload))


def _grant_id(run_id: str, parent_id: bytes, payload: bytes) -> bytes:
    return blake3(signed_bytes(b"grant", run_id, parent_id, payload)).digest()


def new_key() -> tuple[bytes, bytes]:
    """Returns a new key of a grant: (private, public), of 32 bytes each."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def sign(signer: Identity | bytes, data: bytes) -> bytes:
    """Signs with an identity, or with the private key of a grant."""
    return Ed25519PrivateKey.from_private_bytes(signer).sign(data) if isinstance(signer, bytes) else signer.sign(data)


def check_signature(key: bytes, data: bytes, signature: bytes) -> None:
    """Verifies a signature of a grant's key, or of an identity's public key in DER.

    Raises:
        ProtocolError: (`signature`) it does not match.
    """
    if len(key) != _KEY_BYTES:
        verify(key, data, signature)
        return
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError) as exc:
        raise ProtocolError("signature", "not signed by the key of the grant") from exc


def extend(chain: Chain | None, signer: Identity | bytes, run_id: str, grant: Grant) -> Chain:
    """Adds a grant to a chain, or begins one.

    Args:
        chain: None begins a chain.
        signer: the founder's identity for a new chain, otherwise the private key of the chain's last grant.
        run_id: of the run.
        grant: to be signed.

    Raises:
        ValueError: the chain has as many grants as allowed, or its last one may not invite.
    """
    grants, ids, wire = (chain.grants, chain.ids, chain.wire) if chain is not None else ((), (), ())
    if len(grants) >= MAX_GRANTS:
        raise ValueError(f"a chain has at most {MAX_GRANTS} invitations")
    if grants and not grants[-1].may_invite:
        raise ValueError("the invitation does not include the right to invite others")
    parent_id = ids[-1] if ids else ROOT
    payload = pack(grant.model_dump(exclude_defaults=True))
    signature = sign(signer, signed_bytes(b"grant", run_id, parent_id, payload))
    return Chain((*grants, grant), (*ids, _grant_id(run_id, parent_id, payload)), (*wire, (payload, signature)))


def open_chain(wire: object, run_id: str, founder_key: bytes) -> Chain:
    """Verifies a chain.

    Args:
        wire: as received.
        run_id: of the run.
        founder_key: the founder's public key, in DER.

    Raises:
        ProtocolError: (`malformed`, `signature`, `schema`, `admission`) it admits nobody.
    """
    if not (isinstance(wire, list | tuple) and 0 < len(wire) <= MAX_GRANTS):
        raise ProtocolError("malformed", "a chain is a list of one to four grants")
    key, parent_id = founder_key, ROOT
    grants: list[Grant] = []
    ids: list[bytes] = []
    for link in wire:
        if not (isinstance(link, list | tuple) and [type(part) for part in link] == [bytes, bytes]):
            raise ProtocolError("malformed", "a grant is a payload and a signature")
        if grants and not (grants[-1].may_invite and key):
            raise ProtocolError("admission", "an invitation was made by somebody who may not invite")
        payload, signature = link
        check_signature(key, signed_bytes(b"grant", run_id, parent_id, payload), signature)
        try:
            grant = Grant.model_validate(unpack(payload, MAX_ADMISSION_BYTES))
        except ValidationError as exc:
            raise ProtocolError("schema", f"grant: {first_complaint(exc)}") from exc
        parent_id = _grant_id(run_id, parent_id, payload)
        grants.append(grant)
        ids.append(parent_id)
        key = grant.key
    return Chain(tuple(grants), tuple(ids), tuple((bytes(payload), bytes(signature)) for payload, signature in wire))


def open_admission(data: bytes, peer_id: str, run_id: str, founder_key: bytes) -> Chain:
    """Verifies an admission of a peer.

    Raises:
        ProtocolError: (`malformed`, `oversized`, `signature`, `schema`, `admission`) it does not admit this peer.
    """
    content = unpack(data, MAX_ADMISSION_BYTES)
    is_pair = isinstance(content, list) and len(content) == 2 and isinstance(content[1], bytes)
    if not is_pair or pack(content) != data:  # with other encodings, one admission would be many
        raise ProtocolError("malformed", "an admission is a chain and a signature")
    chain = open_chain(content[0], run_id, founder_key)
    if not chain.grants[-1].key:
        raise ProtocolError("admission", "the last grant names a peer")
    check_signature(
        chain.grants[-1].key, signed_bytes(b"admission", run_id, chain.ids[-1], peer_id.encode()), content[1]
    )
    return chain


@dataclass(frozen=True)
class Invitation:
    """A chain that its reader has not verified, since only the run's manifest has the founder's key."""

    run_id: str
    wire: tuple[tuple[bytes, bytes], ...]
    secret: bytes  # private key of the last grant

    @property
    def grants(self) -> list[dict[str, Any]]:
        """The terms as they are written in the chain."""
        return [unpack(payload, MAX_ADMISSION_BYTES) for payload, _ in self.wire]

    def to_text(self) -> str:
        """The word that a newcomer pastes."""
        packed = pack([self.run_id, self.wire, self.secret])
        return "spes1." + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def admit(self, peer_id: str) -> bytes:
        """Returns the admission of a peer."""
        last_id = ROOT
        for payload, _ in self.wire:
            last_id = _grant_id(self.run_id, last_id, payload)
        signature = sign(self.secret, signed_bytes(b"admission", self.run_id, last_id, peer_id.encode()))
        return pack([self.wire, signature])


def read_invitation(text: str) -> Invitation:
    """Reads the word that `Invitation.to_text` returns.

    Raises:
        InvitationError: it is not an invitation, or only part of one.
    """
    word = "".join(text.split())  # mail programs break long lines
    if not INVITATION.fullmatch(word):
        raise InvitationError("this is not an invitation: paste the whole word that begins with spes1.")
    encoded = word.removeprefix("spes1.")
    try:
        content = unpack(base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_"), 2 * MAX_ADMISSION_BYTES)
        run_id, wire, secret = content
        links = tuple((payload, signature) for payload, signature in wire)
        if type(run_id) is not str or {type(part) for part in (secret, *sum(links, ()))} != {bytes}:
            raise TypeError("of other types")
        invitation = Invitation(run_id, links, secret)
        for grant in invitation.grants:
            Grant.model_validate(grant)
        if not links or len(secret) != _KEY_BYTES:
            raise ValueError("incomplete")
    except (ProtocolError, ValueError, TypeError, binascii.Error) as exc:
        raise InvitationError("the invitation is damaged: copy the whole word, from spes1. to its end") from exc
    return invitation
