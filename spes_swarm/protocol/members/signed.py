"""Signed messages: everything that one peer writes and others relay or store.

A message is msgpack [version, payload, public key, signature]; the payload is a msgpack map that must match a strict
schema. The signature covers the version, the message's kind and the run id, so that a message of one kind or run is
never accepted as another. Of another major version, only the version is read. Before version 2 there was none.
"""

from __future__ import annotations

from typing import TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from spes_swarm.base.decoding import first_complaint, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.members.identity import Identity, verify
from spes_swarm.protocol.version import PROTOCOL, Version, check_version


class SignedModel(BaseModel):
    """Base of all signed payloads: strict types, no extra fields, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")


Model = TypeVar("Model", bound=SignedModel)


def _signed_bytes(version: Version, kind: str, run_id: str, payload: bytes) -> bytes:
    return b"\0".join((b"spes_swarm", str(version).encode(), kind.encode(), run_id.encode(), payload))


def seal(identity: Identity, kind: str, run_id: str, message: SignedModel) -> bytes:
    """Serialises and signs a message."""
    payload = msgpack.packb(message.model_dump(), use_bin_type=True)
    signature = identity.sign(_signed_bytes(PROTOCOL, kind, run_id, payload))
    return bytes(msgpack.packb([PROTOCOL, payload, identity.public_key_der, signature], use_bin_type=True))


def writer_key(data: bytes) -> bytes:
    """The public key of a message that `unseal` has accepted, in DER."""
    return bytes(unpack(data)[2])


def unseal(data: bytes, kind: str, run_id: str, schema: type[Model]) -> tuple[str, Model]:
    """Verifies a message and returns (peer id of its writer, message).

    Raises:
        ProtocolError: (`oversized`, `malformed`, `version`, `signature`, `schema`) the message must not be used.
    """
    envelope = unpack(data)
    if not (isinstance(envelope, list) and envelope):
        raise ProtocolError("malformed", f"a signed {kind} is not a list")
    if len(envelope) == 3 and isinstance(envelope[0], bytes):
        envelope = [None, *envelope]  # as before version 2
    version = check_version(envelope[0], f"the writer of a {kind}")
    if not (len(envelope) == 4 and all(isinstance(part, bytes) for part in envelope[1:])):
        raise ProtocolError("malformed", f"a signed {kind} is not [version, payload, public key, signature]")
    payload, public_key, signature = envelope[1:]
    peer_id = verify(public_key, _signed_bytes(version, kind, run_id, payload), signature)
    try:
        return peer_id, schema.model_validate(unpack(payload), extra="ignore" if version > PROTOCOL else "forbid")
    except ValidationError as exc:
        raise ProtocolError("schema", f"{kind} of {peer_id}: {first_complaint(exc)}") from exc
