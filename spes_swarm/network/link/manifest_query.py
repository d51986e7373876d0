"""Asks peers for the manifest of their run, and for its tokenizer if the founder made that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from contextlib import suppress

from blake3 import blake3

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES
from spes_swarm.base.errors import BootstrapError, InvitationError, ProtocolError, VersionError
from spes_swarm.config.manifest import Manifest, open_manifest
from spes_swarm.network.link.rpc import RefusedError, Rpc

_CALL_TIMEOUT_S, _LEAST_TIMEOUT_S = 10.0, 2.0
_PAUSE_S = 1.0
_TOKENIZER_TIMEOUT_S = 60.0  # for all of it, from one peer


async def ask_for_manifest(
    rpc: Rpc, peers: Collection[str], run_id: str | None, timeout_s: float, *, joins: bool = False
) -> Manifest:
    """Asks peers for the manifest of the run they take part in, until one of them sends it.

    `joins`: this peer is going to take part, not only to watch.

    Raises:
        BootstrapError: none of them takes part in a run yet.
        InvitationError: one of them refuses this peer, and no other has a manifest.
        VersionError: one of them speaks another major version of the protocol, and no other has a manifest.
        ManifestError: the manifest fails verification, or is not of `run_id`.
    """
    deadline = time.monotonic() + timeout_s
    reasons: dict[str, str] = {}
    while True:
        other_version: ProtocolError | None = None
        refusal: RefusedError | None = None
        for peer in peers:
            left_s = max(deadline - time.monotonic(), _LEAST_TIMEOUT_S)
            try:
                answer = await rpc.call(peer, "manifest", {"joins": joins}, min(_CALL_TIMEOUT_S, left_s))
            except RefusedError as exc:
                reasons[peer], refusal = str(exc), exc
                continue
            except (OSError, ProtocolError) as exc:
                reasons[peer] = str(exc) or type(exc).__name__
                if isinstance(exc, ProtocolError) and exc.kind == "version":
                    other_version = exc
                continue
            return open_manifest(answer, source=peer, expected_run_id=run_id)
        if other_version is not None:  # waiting does not change that
            raise VersionError(other_version.detail) from other_version
        if refusal is not None:
            raise InvitationError(str(refusal)) from refusal
        if time.monotonic() + _PAUSE_S > deadline:
            details = "; ".join(f"{peer}: {reason}" for peer, reason in reasons.items())
            raise BootstrapError(f"the initial peers answer, but none of them takes part in a run: {details}")
        await asyncio.sleep(_PAUSE_S)


async def ask_for_tokenizer(rpc: Rpc, peers: Collection[str], digest: str) -> bytes | None:
    """Asks peers, one after the other, for packed files with this digest (hex); returns None if none delivers them."""
    for peer in peers:
        with suppress(OSError, ProtocolError):
            async with asyncio.timeout(_TOKENIZER_TIMEOUT_S):
                packed = await _tokenizer_of(rpc, peer)
            if blake3(packed).hexdigest() == digest:
                return packed
    return None


async def _tokenizer_of(rpc: Rpc, peer: str) -> bytes:
    packed = bytearray()
    while True:
        answer = await rpc.call(peer, "tokenizer", {"offset": len(packed)}, _CALL_TIMEOUT_S)
        piece, size = answer.get("piece"), answer.get("size")
        if not isinstance(piece, bytes) or not isinstance(size, int) or size > MAX_TOKENIZER_BYTES:
            raise ProtocolError("malformed", "not a piece of a tokenizer")
        packed += piece
        if not piece or len(packed) >= size:
            return bytes(packed)
