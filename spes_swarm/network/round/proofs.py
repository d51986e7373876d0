"""The proofs against members that have lied (protocol/averaging/proof.py): kept, passed on, and acted upon.

A peer lists in its record whom it has proofs against. Whoever reads a name there that it has no proof for fetches the
proof and verifies it itself. One for each culprit is enough.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from hivemind.p2p import P2P

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import STREAM_ERRORS, Channel, FaultSink, Guests, open_channel, serve_channel
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.averaging.proof import MAX_PROOF_BYTES, Proof, open_proof
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.storage.proofs import ProofFolder

_LOGGER = logging.getLogger(__name__)
_MAX_HELLO_BYTES = 1 << 16
_MAX_CULPRITS = 512  # against whom proofs are kept; each has taken part in a commit
_PAUSE_S = 600.0  # before a peer is asked again that listed culprits and had no proof


class Proofs:
    """One peer's proofs."""

    def __init__(self, p2p: P2P, run: RunState, on_fault: FaultSink, guests: Guests) -> None:
        self._p2p = p2p
        self._run = run
        self._on_fault = on_fault
        self._guests = guests
        self.on_new: Callable[[], None] = lambda: None
        self._name = f"{run.run_id}/proofs"
        self._stall_s = run.run.round.stall_timeout_s
        self._folder = None if run.settings.proofs is None else ProofFolder(run.settings.proofs)
        self._known: dict[str, Path | bytes] = {}  # by culprit
        self._not_before: dict[str, float] = {}  # monotonic time, by peer
        self._fetching: asyncio.Task[None] | None = None

    @property
    def culprits(self) -> list[str]:
        """Peer ids, in the order in which their proofs came."""
        return list(self._known)

    async def start(self) -> None:
        """Registers the handler, and reads the proofs of earlier sessions."""
        if self._folder is not None:
            for proof, path in await asyncio.to_thread(self._folder.read, self._run.run_id):
                self._keep(proof, path)
        await serve_channel(self._p2p, self._name, self._serve, self._stall_s, self._on_fault, self._guests)

    async def add(self, data: bytes) -> bool:
        """Verifies and keeps a proof, and trusts its culprit no more; returns False if there was one against it.

        Raises:
            ProtocolError: it proves nothing, or is about another run.
        """
        proof = await asyncio.to_thread(open_proof, data)
        if proof.run_id != self._run.run_id:
            raise ProtocolError("proof", f"a proof about the run {proof.run_id}")
        if proof.culprit in self._known or len(self._known) >= _MAX_CULPRITS:
            return False
        kept: Path | bytes = data
        self._keep(proof, kept)
        if self._folder is not None:
            try:
                kept = await asyncio.to_thread(self._folder.save, proof, data)
            except OSError as exc:
                _LOGGER.warning("a proof cannot be written: %s", exc)
        self._keep(proof, kept)
        where = f"the proof is in {kept}" if isinstance(kept, Path) else "the proof could not be written"
        what = f"it lied in round {proof.round}, part {proof.part}: {proof.what}; {where}"
        self._on_fault(proof.culprit, ProtocolError("proven", what))
        self.on_new()
        return True

    def _keep(self, proof: Proof, kept: Path | bytes) -> None:
        self._known[proof.culprit] = kept
        self._run.tracks.conduct.note_proof(proof.culprit)

    def compare(self, peer_id: str, culprits: Collection[str]) -> None:
        """Fetches the proofs of a peer that lists culprits unknown here; one peer is asked at a time."""
        busy = self._fetching is not None and not self._fetching.done()
        if busy or self._known.keys() >= set(culprits) or not self._guests.is_member(peer_id):
            return
        if time.monotonic() >= self._not_before.get(peer_id, 0.0):
            self._fetching = asyncio.create_task(self._fetch(peer_id))

    async def _fetch(self, peer_id: str) -> None:
        num_new = 0
        with suppress(*STREAM_ERRORS, ProtocolError):
            async with open_channel(self._p2p, peer_id, self._name, self._stall_s) as channel:
                await channel.send_hello(known=self.culprits)
                while (frame := await channel.receive(MAX_PROOF_BYTES)).kind is FrameKind.DATA:
                    if not await self.add(frame.payload):
                        break
                    num_new += 1
        if not num_new:
            self._not_before[peer_id] = time.monotonic() + _PAUSE_S

    async def _serve(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_HELLO_BYTES)
        known = hello.get("known")
        if not isinstance(known, list):
            raise ProtocolError("malformed", "proofs are asked for with a list of known culprits")
        if self._guests.is_member(channel.peer_id):
            for culprit, kept in list(self._known.items()):
                if culprit not in known:
                    with suppress(OSError):  # the file is gone
                        data = kept if isinstance(kept, bytes) else await asyncio.to_thread(kept.read_bytes)
                        await channel.send(Frame(FrameKind.DATA, payload=data))
        await channel.send(Frame(FrameKind.END))
