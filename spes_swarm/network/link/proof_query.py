"""Asks a peer for the proof that another one has lied; network/round/proofs.py answers.

Members do so to exclude the culprit, and monitors to show it. What comes back is to be verified.
"""

from __future__ import annotations

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import open_channel
from spes_swarm.network.transport.interface import Transport
from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES
from spes_swarm.protocol.rounds.frames import FrameKind

FRAME_BYTES = 1 << 20


def stream_name(run_id: str) -> str:
    """The name of the stream on which a peer serves its proofs."""
    return f"{run_id}/proofs"


async def fetch_proof(
    transport: Transport, peer_id: str, run_id: str, culprit: str, stall_s: float, max_bytes: int = MAX_PROOF_BYTES
) -> bytes:
    """Fetches what a peer calls a proof against a culprit; empty if it has none.

    Raises:
        STREAM_ERRORS: the peer cannot be reached, or stalls.
        ProtocolError: it refuses, or sends more than `max_bytes`.
    """
    data = bytearray()
    async with open_channel(transport, peer_id, stream_name(run_id), stall_s) as channel:
        await channel.send_hello(culprit=culprit)
        while (frame := await channel.receive(FRAME_BYTES)).kind is FrameKind.DATA:
            data += frame.payload
            if not frame.payload or len(data) > max_bytes:  # empty ones could go on for ever
                raise ProtocolError("oversized", f"not a proof of at most {max_bytes} bytes")
    if frame.kind is not FrameKind.END:
        raise ProtocolError("refused", f"{peer_id} refuses to send its proofs")
    return bytes(data)
