"""Signed messages: everything that one peer writes and others relay or store.

A message is msgpack [payload, public key, signature]; the payload is a msgpack map that must match a strict schema. The
signature covers the message's kind and the run id, so that a message of one kind or run is never accepted as another.
"""

from __future__ import annotations

from typing import TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from spes_swarm.base.decoding import first_complaint, unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.members.identity import Identity, verify


class SignedModel(BaseModel):
    """Base of all signed payloads: strict types, no extra fields, immutable."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, ser_json_inf_nan="constants")


Model = TypeVar("Model", bound=SignedModel)


def _signed_bytes(kind: str, run_id: str, payload: bytes) -> bytes:
    return b"\0".join((b"spes_swarm/1", kind.encode(), run_id.encode(), payload))


def seal(identity: Identity, kind: str, run_id: str, message: SignedModel) -> bytes:
    """Serialises and signs a message."""
    payload = msgpack.packb(message.model_dump(), use_bin_type=True)
    signature = identity.sign(_signed_bytes(kind, run_id, payload))
    return bytes(msgpack.packb([payload, identity.public_key_der, signature], use_bin_type=True))


def unseal(data: bytes, kind: str, run_id: str, schema: type[Model]) -> tuple[str, Model]:
    """Verifies a message and returns (peer id of its writer, message).

    Raises:
        ProtocolError: (`oversized`, `malformed`, `signature`, `schema`) the message is invalid.
    """
    envelope = unpack(data)
    if not (isinstance(envelope, list) and len(envelope) == 3 and all(isinstance(x, bytes) for x in envelope)):
        raise ProtocolError("malformed", f"a signed {kind} is not [payload, public key, signature]")
    payload, public_key, signature = envelope
    peer_id = verify(public_key, _signed_bytes(kind, run_id, payload), signature)
    try:
        return peer_id, schema.model_validate(unpack(payload))
    except ValidationError as exc:
        raise ProtocolError("schema", f"{kind} of {peer_id}: {first_complaint(exc)}") from exc
