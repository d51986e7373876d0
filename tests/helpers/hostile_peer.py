"""Hostile members for tests: an exchange that lies on all streams, and the real services around others like it.

`membership` joins a run properly (signed statements, records, leases, rendezvous), with another exchange in place of
the honest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.config.manifest import Manifest, open_manifest
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.network import run_services
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Channel, open_channel
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.port.commands import Called, Notification
from spes_swarm.port.messages import Presence
from spes_swarm.protocol.averaging.commitments import Commitment
from spes_swarm.protocol.bitmap import bitmap
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.protocol.rounds.plan import Form, Part
from spes_swarm.protocol.rounds.results import Result
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hosts import MEMBERS
from tests.helpers.run_settings import settings_without_trainer
from tests.helpers.signing import signed_result

# frames: every contribution and result is wrong in another way; bytes: streams carry no valid frame; silent: nothing is
# sent at all; slow: valid frames, but a trickle, and keepalives for ever; two_faced: other results for every member.
MODES = ("frames", "bytes", "silent", "slow", "two_faced")


@asynccontextmanager
async def joined(maddr: str, identity: Identity) -> AsyncIterator[tuple[Daemon, Rpc, Manifest]]:
    """A daemon of its own, connected to the run behind `maddr`."""
    daemon = await Daemon.start(identity.path, ["/ip4/127.0.0.1/tcp/0"])
    try:
        rpc = Rpc(daemon.transport, lambda peer_id, error: None)
        await rpc.start()
        (peer_id,) = await bootstrap(daemon, [maddr], 60.0)
        yield daemon, rpc, open_manifest(await rpc.call(peer_id, "manifest", {}, 60.0), source=peer_id)
    finally:
        await daemon.stop()


def spoil(frame: Frame, ways: Sequence[str], number: int) -> Frame:
    """The frame made wrong in one of these ways."""
    num_values = len(frame.payload) // 4
    match ways[number % len(ways)]:
        case "nonfinite":
            return dataclasses.replace(frame, payload=b"\x7f" * len(frame.payload))  # NaN as fp16 scale and as fp32
        case "norm":
            huge = np.float32(2.0**100).tobytes()
            is_encoded = frame.form == Form.DELTA
            rest = b"\x00\x3c" * (len(frame.payload) // 2) if is_encoded else huge * max(num_values - 1, 0)
            return dataclasses.replace(frame, payload=(huge + rest)[: len(frame.payload)])
        case "weight":
            return dataclasses.replace(frame, weight=1e300)
        case "nan weight":
            return dataclasses.replace(frame, weight=math.nan)
        case "form":
            return dataclasses.replace(frame, form=77)
        case "part":
            return dataclasses.replace(frame, part=2**32 - 1)
        case _:
            return dataclasses.replace(frame, payload=frame.payload[:-2])


BAD_RESULTS = ("nonfinite", "norm", "form", "part", "shape")
BAD_CONTRIBUTIONS = (*BAD_RESULTS, "weight", "nan weight")  # a result has no weight


class HostileExchange(Exchange):
    """Lies on all streams of a round."""

    mode = "frames"

    async def run(self, state: RoundState, *more: Any, **named: Any) -> CommitReport:
        """As an honest member, but what is reduced here stays at the old reference, as with those it is hidden from."""
        self.mine = {part.index for part in state.plan.parts if part.reducer == state.me}
        self.honest: dict[int, Result] = {}
        self._begin(state)
        with contextlib.suppress(TimeoutError, RoundError):
            async with asyncio.timeout(self._limits.timeout_s):
                await self._transfer(state)
        self._keep_signed(state)
        for index in self.mine:
            state.results.known.pop(index, None)
        return state.commit()

    def _keep_signed(self, state: RoundState) -> None:
        state.results.sign()
        self.honest |= {index: result for index, result in state.results.known.items() if index in self.mine}

    async def _roots(self, state: RoundState, part: Part) -> dict[int, Commitment]:
        """The signed roots of those whose work has come in time for the result of a part, by member."""
        while part.index not in state.reduction.reduced and state is self._round:
            await self._reduced.wait(self._limits.stall_timeout_s / 4)
        self._keep_signed(state)
        honest = self.honest.get(part.index)
        if honest is None or honest.signed is None:
            return {}
        return dict(zip(sorted(honest.included), honest.signed.commitments, strict=True))

    async def _push(self, state: RoundState, reducer: int, parts: list[Part], deadline: float) -> None:
        peer_id = state.group.members[reducer].peer_id
        with contextlib.suppress(ProtocolError, *STREAM_ERRORS):
            async with open_channel(self._transport, peer_id, self._push_name, self._limits.stall_timeout_s) as channel:
                if self.mode == "silent":
                    await asyncio.sleep(self._limits.timeout_s)
                await channel.send_hello(group=state.group.id)
                if self.mode == "bytes":
                    channel._writer.write(os.urandom(1000))
                    await channel.receive(1024)
                for number, part in enumerate(parts):
                    frame = state.contributions.push_frame(part)
                    await channel.send(
                        frame if self.mode in ("slow", "two_faced") else spoil(frame, BAD_CONTRIBUTIONS, number)
                    )
                    if self.mode == "slow":
                        await asyncio.sleep(self._limits.stall_timeout_s / 2)
                if self.mode == "frames":  # the header of a frame that never comes
                    channel._writer.write(b"\x01\x00\x00\x00")
                else:
                    await channel.send(Frame(FrameKind.END))
                    await channel.receive(1024)

    async def _serve_pull(self, channel: Channel) -> None:
        state, member = await self._find_round((await channel.receive_hello(1 << 20)).get("group"), channel.peer_id)
        if self.mode == "bytes":
            channel._writer.write(os.urandom(1000))
            return
        if self.mode == "silent":
            await asyncio.sleep(self._limits.timeout_s)
        while self.mode == "slow":
            await channel.send(Frame(FrameKind.KEEPALIVE))
            await asyncio.sleep(self._limits.stall_timeout_s / 2)
        for number, index in enumerate(sorted(self.mine)):
            part = state.plan.parts[index]
            values_N = np.full(part.size, 1e-4 * (member + 1), np.float32)
            included = bitmap((c.member for c in state.plan.block_of(part).contributions), state.plan.num_members)
            form = state.plan.block_of(part).result_form(member)
            if form is Form.DELTA:
                payload = state.averaging.codec_of_result(part).encode(values_N)
                frame = signed_result(state, part, payload, await self._roots(state, part))
            else:
                frame = Frame(FrameKind.DATA, form, index, 0.0, included, EXACT.encode(values_N))
            await channel.send(frame if self.mode == "two_faced" else spoil(frame, BAD_RESULTS, number + member))
        await channel.send(Frame(FrameKind.END))

    async def _serve_have(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        state, _ = await self._find_round(request.get("group"), peer_id)
        if self.mode in ("slow", "silent"):
            return {"finished": False, "held": bitmap(range(len(state.plan.parts)), len(state.plan.parts))}
        return {"finished": 1, "held": "everything"}


class _Listener:
    """Notices calls."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        print("fault", peer_id, error, flush=True)

    def on_round_over(self) -> None: ...

    def report(self, why: str) -> None: ...

    def notify(self, notification: Notification) -> None:
        if isinstance(notification, Called):
            self.called.set()


async def beat_forever(services: run_services.RunServices) -> None:
    while True:
        services.announcer.beat()
        await asyncio.sleep(0.5)


@dataclasses.dataclass(frozen=True)
class Membership:
    """What a hostile member has at hand."""

    services: run_services.RunServices
    exchange: Exchange
    listener: _Listener
    presence: Presence
    reference_N: FloatArray
    contribution_N: FloatArray


@asynccontextmanager
async def membership(
    maddr: str, directory: Path, make_exchange: Callable[..., Exchange], *, num_experts: int, tokens_per_step: int
) -> AsyncIterator[Membership]:
    """Joins a run properly: reads the reference, claims experts and says that it trains."""
    identity = Identity.load_or_create(directory / "identity.key")
    async with joined(maddr, identity) as (daemon, rpc, manifest):
        run = manifest.run
        layout = layout_of(build_model(run.model.type, run.model.settings, 0, "cpu", on_meta=True))
        settings, reference, contribution = settings_without_trainer(manifest, layout, maddr)
        listener = _Listener()
        limits = ExchangeLimits.of(run.round)
        exchange = make_exchange(daemon.transport, rpc, manifest.run_id, limits, listener.on_fault, MEMBERS)
        with mock.patch.object(run_services, "Exchange", return_value=exchange):
            services = run_services.RunServices(listener, daemon, rpc, identity, settings)
        await services.start()
        await services.commands.download(if_newer=False)
        presence = Presence(
            name="hostile",
            state="training",
            step=1,
            tokens=0,
            tokens_per_step=tokens_per_step,
            tokens_per_second=1.0,
            loss=1.0,
            experts=await services.commands.claim(num_experts, room=num_experts, fixed=False),
        )
        await services.commands.set_presence(presence)
        beating = asyncio.create_task(beat_forever(services))  # what a trainer does to show that it is alive
        yield Membership(services, exchange, listener, presence, reference.values_N, contribution.values_N)
        beating.cancel()
        await services.commands.set_presence(dataclasses.replace(presence, state="leaving", experts=()))
        await asyncio.Event().wait()
