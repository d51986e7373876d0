"""Handover of optimiser moments: a peer that gives an expert up serves its moments to the peer that adopts it.

Both sides compute the same table of experts (see protocol/ownership/reassignment.py), so nothing is negotiated. The
giver's trainer puts the moments into shared memory. The adopter fetches them while it already trains with fresh ones.

moment_rules.py defines what the adopter accepts.

Shapes: N elements of one expert's block, K moments per weight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hivemind.p2p import P2P

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.run import TrainingConfig
from spes_swarm.network.link.wire import STREAM_ERRORS, Channel, FaultSink, Guests, open_channel, serve_channel
from spes_swarm.port.messages import ReceivedMoments
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.reference import CHUNK_ELEMENTS
from spes_swarm.protocol.ownership.moment_rules import (
    Limits,
    MomentLimits,
    MomentumLimit,
    check_moments,
    moments_digest,
)
from spes_swarm.protocol.rounds.frames import Frame, FrameKind

_MAX_HELLO_BYTES = 1024
_MAX_STEP = 1 << 40
_ATTEMPTS = 3
# Fetches at a time: one peer may give all of them, and it serves at most MAX_STREAMS_PER_PEER streams.
_MAX_FETCHES = 4


def moment_limits(training: TrainingConfig) -> Limits:
    """Returns what moments of experts must satisfy in a run."""
    if training.optimiser == "muon":
        return MomentumLimit.of(training.max_grad_norm, training.muon_momentum)
    return MomentLimits.of(training.max_grad_norm, training.adam_beta1, training.adam_beta2)


@dataclass(eq=False)
class Moments:
    """Serves the moments of experts that this peer gives up, and fetches those of experts that it adopts."""

    p2p: P2P
    run_id: str
    limits: Limits
    stall_timeout_s: float
    on_fault: FaultSink
    guests: Guests
    _round: int = -1
    # Expert -> peers that have not fetched its moments yet.
    _due: dict[int, set[str]] = field(default_factory=dict, init=False)
    _offered: dict[int, FloatArray] = field(default_factory=dict, init=False)
    _step: int = field(default=0, init=False)
    _changed: Changes = field(default_factory=Changes, init=False)

    @property
    def _name(self) -> str:
        return f"{self.run_id}/moments"

    async def start(self) -> None:
        """Registers the handler."""
        await serve_channel(self.p2p, self._name, self._serve, self.stall_timeout_s, self.on_fault, self.guests)

    # Giving.

    def expect(self, round_number: int, due: Mapping[int, Sequence[str]]) -> None:
        """Notes which peers adopt this peer's experts at a round's commit; earlier offers are dropped."""
        self._round = round_number
        self._due = {expert: set(peers) for expert, peers in due.items() if peers}
        self._offered = {}
        self._changed.notify()

    def offer(self, round_number: int, step: int, moments: Mapping[int, FloatArray]) -> None:
        """Serves these moments, each of shape (KN,), to the peers that adopt the experts."""
        if round_number == self._round:
            self._step, self._offered = step, dict(moments)
            self._changed.notify()

    async def wait_until_fetched(self, timeout_s: float) -> bool:
        """Waits until all moments that are due have been fetched. Returns False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._due:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _serve(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_HELLO_BYTES)
        number, expert = hello.get("round"), hello.get("expert")
        if type(number) is not int or type(expert) is not int:
            raise ProtocolError("malformed", "moments are asked for by round and expert")
        try:
            # The adopter may commit first, and this peer's trainer takes a while to hand over the moments.
            async with asyncio.timeout(self.stall_timeout_s / 2):
                while number > self._round or (number == self._round and expert not in self._offered):
                    await self._changed.wait()
        except TimeoutError:
            await channel.send_error("these moments are not available")
            return
        if number != self._round or channel.peer_id not in self._due.get(expert, ()):
            await channel.send_error("these moments are not available, or are for another peer")
            return
        moments_KN = self._offered[expert]
        for index, start in enumerate(range(0, moments_KN.size, CHUNK_ELEMENTS)):
            payload = EXACT.encode(moments_KN[start : start + CHUNK_ELEMENTS])
            await channel.send(
                Frame(FrameKind.DATA, part=index, extra=self._step.to_bytes(8, "little"), payload=payload)
            )
        # The adopter ends its side when it has everything, and closes the stream after the answer. This peer may leave
        # only then.
        answer = await channel.receive(max_payload_bytes=64)
        await channel.send(Frame(FrameKind.END))
        await channel.wait_until_closed()
        if answer.kind is FrameKind.END and number == self._round:
            self._note_fetched(expert, channel.peer_id)

    def _note_fetched(self, expert: int, peer_id: str) -> None:
        peers = self._due.get(expert, set())
        peers.discard(peer_id)
        if not peers:
            self._due.pop(expert, None)
        self._changed.notify()

    # Taking.

    async def fetch(
        self, round_number: int, sources: Mapping[int, Sequence[str]], out: Mapping[int, FloatArray]
    ) -> dict[int, ReceivedMoments]:
        """Fetches the moments of adopted experts into `out`, each of shape (KN,).

        Returns, by expert, those that arrived and that clipped gradients could have produced.
        """
        slots = asyncio.Semaphore(_MAX_FETCHES)
        frozen: set[str] = set()

        async def fetch_one(expert: int, peers: Sequence[str]) -> ReceivedMoments | None:
            async with slots:
                return await self._fetch_one(round_number, expert, peers, frozen, out[expert])

        found = await asyncio.gather(*(fetch_one(expert, peers) for expert, peers in sources.items()))
        return {expert: received for expert, received in zip(sources, found, strict=True) if received is not None}

    async def _fetch_one(
        self, round_number: int, expert: int, peers: Sequence[str], frozen: set[str], out_KN: FloatArray
    ) -> ReceivedMoments | None:
        for _ in range(_ATTEMPTS):
            for peer in peers:
                if peer in frozen:
                    continue
                try:
                    step = await self._receive(peer, round_number, expert, out_KN)
                except ProtocolError as exc:
                    self.on_fault(peer, exc)
                except TimeoutError:
                    frozen.add(peer)  # each further expert would also run into the timeout
                except STREAM_ERRORS:
                    pass  # the giver is gone: try the next one, or keep fresh moments
                else:
                    return ReceivedMoments(peer, step, moments_digest(out_KN))
        return None

    async def _receive(self, peer: str, round_number: int, expert: int, out_KN: FloatArray) -> int:
        step = 0
        async with open_channel(self.p2p, peer, self._name, self.stall_timeout_s) as channel:
            await channel.send_hello(round=round_number, expert=expert)
            for index, start in enumerate(range(0, out_KN.size, CHUNK_ELEMENTS)):
                size = min(CHUNK_ELEMENTS, out_KN.size - start)
                frame = await channel.receive(EXACT.num_bytes(size))
                if frame.kind is FrameKind.ERROR:
                    raise ConnectionError(frame.error_text())
                if frame.kind is not FrameKind.DATA or frame.part != index:
                    raise ProtocolError("malformed", "moments must arrive in order and without gaps")
                step = int.from_bytes(frame.extra, "little")
                out_KN[start : start + size] = EXACT.decode(frame.payload, size)
            check_moments(out_KN, self.limits)
            if step > _MAX_STEP:
                raise ProtocolError("moments", f"the optimiser claims to have taken {step} steps")
            await channel.end()
        return step
