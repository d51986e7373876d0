"""Handing over AdamW moments: who gives an expert up serves its moments to the peer that adopts it.

Both sides know from the same table (see ownership.py) who gives what to whom, so nothing is negotiated. The giver's
trainer puts the moments into shared memory; the adopter fetches them while it already trains, from fresh ones.

Moments are the one thing that a peer takes from a single other one, without a vote. What it takes must therefore be
possible: with decays b1 and b2, b1^2 < b2, no sequence of gradients makes |m| larger than
(1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)) * sqrt(v) (Cauchy-Schwarz on the two moving averages), so no forged pair can
make AdamW take steps larger than it could have taken by itself.

Nor may v be so large that the adopter's expert stands still. Every gradient is clipped to a norm of max_grad_norm over
all that a peer trains, so the squares of one expert's entries add up to at most max_grad_norm^2 in each step, and so do
their moving averages v. An adopted v keeps within this bound, too, since both sides clip alike. Clipping cannot be
switched off, but a run may set max_grad_norm so high that nothing is ever clipped; then only the first bound says
anything.

Shapes: N elements of one expert's block.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from hivemind.p2p import P2P

from spes_swarm.changes import Changes
from spes_swarm.codec import EXACT, FloatArray
from spes_swarm.config import TrainingConfig
from spes_swarm.errors import ProtocolError
from spes_swarm.frames import Frame, FrameKind
from spes_swarm.layout import Layout
from spes_swarm.reference import CHUNK_ELEMENTS
from spes_swarm.wire import STREAM_ERRORS, Channel, open_channel, serve_channel

_MAX_HELLO_BYTES = 1024
_MAX_STEP = 1 << 40
_ATTEMPTS = 3
_ROUNDING = 1.01  # moments are running sums in fp32
_EPSILON = float(np.finfo(np.float32).eps)
_TINY = 1e-12  # and squares of tiny gradients underflow


@dataclass(frozen=True, slots=True)
class Received:
    """One expert's moments as they arrived."""

    peer_id: str
    step: int  # of the giver's optimiser
    digest: str  # hex BLAKE3 of the values


def moments_digest(moments_2N: FloatArray) -> str:
    """Names the moments of one expert in the metrics."""
    return blake3(moments_2N.astype("<f4", copy=False).view(np.uint8).data).hexdigest()


@dataclass(frozen=True, slots=True)
class MomentLimits:
    """What gradients can bring about; see the head of this file."""

    ratio: float  # largest |m| / sqrt(v); infinite where the decays do not bound it
    second: float  # largest sum of one expert's v; infinite where gradients are as good as unclipped

    @classmethod
    def of(cls, training: TrainingConfig) -> MomentLimits:
        """The limits of a run."""
        return cls(
            largest_ratio(training.adam_beta1, training.adam_beta2),
            largest_second(training.max_grad_norm, training.adam_beta2),
        )


def largest_ratio(beta1: float, beta2: float) -> float:
    """The largest |m| / sqrt(v) that gradients can bring about."""
    if beta1 * beta1 >= beta2:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1 * beta1 / beta2))


def largest_second(max_grad_norm: float, beta2: float) -> float:
    """The largest sum of one expert's second moments that clipped gradients can bring about, rounding included.

    In each step a moving average in fp32 is rounded three times, and forgets 1 - beta2 of the error so far.
    """
    return max_grad_norm * max_grad_norm * (_ROUNDING + 3 * _EPSILON / (1 - beta2))


def check_moments(moments_2N: FloatArray, limits: MomentLimits) -> None:
    """Checks first moments (the first half) and second moments that another peer sent.

    Raises:
        ProtocolError: (`moments`) no training could have led to them.
    """
    first_N, second_N = np.split(moments_2N, 2)
    if not np.isfinite(moments_2N).all() or (second_N < 0).any():
        raise ProtocolError("moments", "not finite, or a negative second moment")
    if float(second_N.sum(dtype=np.float64)) > limits.second:
        raise ProtocolError("moments", "second moments that are impossible with gradients clipped to max_grad_norm")
    ratio = limits.ratio
    if math.isfinite(ratio) and (np.abs(first_N) > _ROUNDING * ratio * np.sqrt(second_N) + _TINY).any():
        raise ProtocolError("moments", "a first moment that is impossible with its second moment")


class Moments:
    """Serves the moments of experts that this peer gives up, and fetches those of experts that it adopts."""

    def __init__(
        self,
        p2p: P2P,
        run_id: str,
        layout: Layout,
        *,
        limits: MomentLimits,
        stall_timeout_s: float,
        on_fault: Callable[[str, ProtocolError], None],
    ) -> None:
        self._p2p = p2p
        self._layout = layout
        self._limits = limits
        self._stall_timeout_s = stall_timeout_s
        self._on_fault = on_fault
        self._name = f"{run_id}/moments"
        self._round = -1
        self._due: dict[int, set[str]] = {}  # who will come for what
        self._offered: dict[int, FloatArray] = {}
        self._step = 0
        self._changed = Changes()

    async def start(self) -> None:
        """Registers the handler."""
        await serve_channel(self._p2p, self._name, self._serve, self._stall_timeout_s, self._on_fault)

    # Giving.

    def expect(self, round_number: int, due: Mapping[int, Sequence[str]]) -> None:
        """Notes who adopts which of this peer's experts with a round's commit; what was offered before is dropped."""
        self._round = round_number
        self._due = {expert: set(peers) for expert, peers in due.items() if peers}
        self._offered = {}
        self._changed.notify()

    def offer(self, round_number: int, step: int, moments: Mapping[int, FloatArray]) -> None:
        """Serves these moments, each of shape (2N,), to those who are due to come for them."""
        if round_number == self._round:
            self._step, self._offered = step, dict(moments)
            self._changed.notify()

    async def wait_until_fetched(self, timeout_s: float) -> bool:
        """Waits until everybody who is due has come; whether that was so before the deadline."""
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
            # The adopter may know of the commit first, and the trainer takes a moment to hand its moments over.
            async with asyncio.timeout(self._stall_timeout_s / 2):
                while number > self._round or (number == self._round and expert not in self._offered):
                    await self._changed.wait()
        except TimeoutError:
            await channel.send_error("these moments are not here")
            return
        if number != self._round or channel.peer_id not in self._due.get(expert, ()):
            await channel.send_error("these moments are not here, or are for somebody else")
            return
        moments_2N = self._offered[expert]
        for index, start in enumerate(range(0, moments_2N.size, CHUNK_ELEMENTS)):
            payload = EXACT.encode(moments_2N[start : start + CHUNK_ELEMENTS])
            await channel.send(
                Frame(FrameKind.DATA, part=index, extra=self._step.to_bytes(8, "little"), payload=payload)
            )
        await channel.send(Frame(FrameKind.END))
        # The adopter closes its side when it has everything: only then may this peer go.
        answer = await channel.receive(max_payload_bytes=64)
        if answer.kind is FrameKind.END and number == self._round:
            self._due[expert].discard(channel.peer_id)
            if not self._due[expert]:
                del self._due[expert]
            self._changed.notify()

    # Taking.

    async def fetch(
        self, round_number: int, sources: Mapping[int, Sequence[str]], out: Mapping[int, FloatArray]
    ) -> dict[int, Received]:
        """Fetches the moments of adopted experts into `out` (2N,) each; returns those that came and are possible."""
        found = await asyncio.gather(
            *(self._fetch_one(round_number, expert, peers, out[expert]) for expert, peers in sources.items())
        )
        return {expert: received for expert, received in zip(sources, found, strict=True) if received is not None}

    async def _fetch_one(
        self, round_number: int, expert: int, peers: Sequence[str], out_2N: FloatArray
    ) -> Received | None:
        for _ in range(_ATTEMPTS):
            for peer in peers:
                try:
                    step = await self._receive(peer, round_number, expert, out_2N)
                except ProtocolError as exc:
                    self._on_fault(peer, exc)
                except STREAM_ERRORS:
                    pass  # it has gone: the next one, or fresh moments
                else:
                    return Received(peer, step, moments_digest(out_2N))
        return None

    async def _receive(self, peer: str, round_number: int, expert: int, out_2N: FloatArray) -> int:
        step = 0
        async with open_channel(self._p2p, peer, self._name, self._stall_timeout_s) as channel:
            await channel.send_hello(round=round_number, expert=expert)
            for index, start in enumerate(range(0, out_2N.size, CHUNK_ELEMENTS)):
                size = min(CHUNK_ELEMENTS, out_2N.size - start)
                frame = await channel.receive(EXACT.num_bytes(size))
                if frame.kind is FrameKind.ERROR:
                    raise ConnectionError(frame.error_text())
                if frame.kind is not FrameKind.DATA or frame.part != index:
                    raise ProtocolError("malformed", "moments come in order and without gaps")
                step = int.from_bytes(frame.extra, "little")
                out_2N[start : start + size] = EXACT.decode(frame.payload, size)
            check_moments(out_2N, self._limits)
            if step > _MAX_STEP:
                raise ProtocolError("moments", f"an optimiser that has done {step} steps")
            await channel.send(Frame(FrameKind.END))
            await channel.receive(max_payload_bytes=0)  # END: the giver has seen everything through
        return step


def slices(values: FloatArray, experts: Sequence[int], layout: Layout) -> dict[int, FloatArray]:
    """Cuts shared memory into the moments (2N,) of each expert."""
    cut: dict[int, FloatArray] = {}
    start = 0
    for expert in experts:
        size = 2 * layout.expert_block(expert).size
        cut[expert] = values[start : start + size]
        start += size
    return cut


def num_moments(experts: Sequence[int], layout: Layout) -> int:
    """Size of the memory that `slices` cuts."""
    return sum(2 * layout.expert_block(expert).size for expert in experts)
