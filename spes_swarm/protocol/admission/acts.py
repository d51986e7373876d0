"""What everybody in a run has to know besides the members' admissions: signed acts. In an open run, only pardons count.

    allow    the founder, or somebody who may invite, admits a peer by its id
    revoke   whoever made an invitation, or made one before it, takes it back: for one peer, or for all that it admitted
    use      an invitation for a limited number of peers has been used by one
    pardon   the founder forgives a peer, which has been excluded by proof, its lies up to a round

Acts are never undone, so peers that exchange theirs, in whatever order, end with the same ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from blake3 import blake3
from pydantic import Field, ValidationError, model_validator

from spes_swarm.base.decoding import first_complaint, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.admission.grants import (
    MAX_ADMISSION_BYTES,
    MAX_PEER_ID_CHARS,
    ROOT,
    Chain,
    check_signature,
    open_admission,
    open_chain,
    pack,
    sign,
    signed_bytes,
)
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.signed import SignedModel

MAX_ACT_BYTES = 2 * MAX_ADMISSION_BYTES
_REVOKE: Final = b"revoke"
_PARDON: Final = b"pardon"


_Model = TypeVar("_Model", bound=SignedModel)


class Target(SignedModel):
    """What is revoked: a peer, or a grant with everything that follows from it."""

    peer: Annotated[str, Field(max_length=MAX_PEER_ID_CHARS)] = ""
    grant: Annotated[bytes, Field(max_length=32)] = b""
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # Unix seconds; for people

    @model_validator(mode="after")
    def _check(self) -> Target:
        if bool(self.peer) == (len(self.grant) == len(ROOT)):
            raise ValueError("either a peer or a grant is revoked")
        return self


@dataclass(frozen=True)
class Allow:
    """A chain whose last grant names a peer."""

    chain: Chain

    @property
    def peer_id(self) -> str:
        """Whom it admits."""
        return self.chain.grants[-1].peer


@dataclass(frozen=True)
class Revoke:
    """A revocation. It has no effect on peers that its signer did not invite, directly or not."""

    target: Target
    signer: bytes  # id of the grant whose key has signed it; ROOT: the founder
    chain: Chain | None = None  # that ends with this grant


@dataclass(frozen=True)
class Use:
    """A peer's admission by a chain in which the number of uses is limited."""

    peer_id: str
    chain: Chain
    admission: bytes


class Pardon(SignedModel):
    """The founder forgives a peer its lies; see exclusion.py."""

    peer: Annotated[str, Field(min_length=1, max_length=MAX_PEER_ID_CHARS)]
    round: Annotated[int, Field(ge=0, lt=1 << 40)]  # the last one that is forgiven
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # Unix seconds; for people


Act = Allow | Revoke | Use | Pardon


def _pack(*content: object) -> bytes:
    return pack(content)


def allow(chain: Chain) -> bytes:
    """The act that admits the peer named by the last grant of a chain."""
    return _pack("allow", chain.wire)


def use(peer_id: str, admission: bytes) -> bytes:
    """The act that notes the use of a limited invitation."""
    return _pack("use", peer_id, admission)


def revoke(signer: Identity | bytes, chain: Chain | None, run_id: str, target: Target) -> bytes:
    """A revocation, by the founder's identity (without a chain) or by the private key of a chain's last grant."""
    payload = pack(target.model_dump(exclude_defaults=True))
    grant_id, wire = (ROOT, ()) if chain is None else (chain.ids[-1], chain.wire)
    return _pack("revoke", payload, wire, sign(signer, signed_bytes(_REVOKE, run_id, grant_id, payload)))


def pardon(founder: Identity, run_id: str, content: Pardon) -> bytes:
    """A pardon by the founder."""
    payload = pack(content.model_dump())
    return _pack("pardon", payload, founder.sign(signed_bytes(_PARDON, run_id, ROOT, payload)))


def has_revoked_grant(chain: Chain, revoked: Mapping[bytes, Collection[bytes]]) -> bool:
    """Returns True if a grant of a chain is revoked by the founder or the key of an earlier grant.

    `revoked`: for each grant, the ids of those whose keys have revoked it (ROOT: the founder's).
    """
    ids = (ROOT, *chain.ids)
    return any(signer in ids[:i] for i, one in enumerate(ids) for signer in revoked.get(one, ()))


def act_id(data: bytes) -> bytes:
    """Digest of an act."""
    return blake3(data).digest()


def open_act(data: bytes, run_id: str, founder_key: bytes) -> Act:
    """Verifies an act.

    Args:
        data: as received.
        run_id: of the run.
        founder_key: the founder's public key, in DER.

    Raises:
        ProtocolError: (`malformed`, `oversized`, `signature`, `schema`, `admission`) it has no effect.
    """
    content = unpack(data, MAX_ACT_BYTES)
    if pack(content) != data:  # other encodings would be other acts, made of one by anybody
        raise ProtocolError("malformed", "an act in another encoding")
    match content:
        case ["allow", wire]:
            chain = open_chain(wire, run_id, founder_key)
            if not chain.grants[-1].peer:
                raise ProtocolError("admission", "an allowance names no peer")
            return Allow(chain)
        case ["use", str(peer_id), bytes(admission)]:
            chain = open_admission(admission, peer_id, run_id, founder_key)
            if not chain.limits or len(peer_id) > MAX_PEER_ID_CHARS:
                raise ProtocolError("admission", "a use of an invitation that is not limited")
            return Use(peer_id, chain, admission)
        case ["revoke", bytes(payload), list(wire), bytes(signature)]:
            return _open_revocation(payload, wire, signature, run_id, founder_key)
        case ["pardon", bytes(payload), bytes(signature)]:
            check_signature(founder_key, signed_bytes(_PARDON, run_id, ROOT, payload), signature)
            return _validated(Pardon, payload)
    raise ProtocolError("malformed", "not an act of a run")


def _validated(schema: type[_Model], payload: bytes) -> _Model:
    try:
        return schema.model_validate(unpack(payload, MAX_ACT_BYTES))
    except ValidationError as exc:
        raise ProtocolError("schema", f"{schema.__name__.lower()}: {first_complaint(exc)}") from exc


def _open_revocation(payload: bytes, wire: list[Any], signature: bytes, run_id: str, founder_key: bytes) -> Revoke:
    key, signer, chain = founder_key, ROOT, None
    if wire:
        chain = open_chain(wire, run_id, founder_key)
        if not chain.grants[-1].may_invite:
            raise ProtocolError("admission", "a revocation by somebody who may not invite")
        key, signer = chain.grants[-1].key, chain.ids[-1]
    check_signature(key, signed_bytes(_REVOKE, run_id, signer, payload), signature)
    return Revoke(_validated(Target, payload), signer, chain)
