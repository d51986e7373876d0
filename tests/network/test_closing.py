"""The side that asked closes a stream, once it has everything. Through real daemons and in memory, without training."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import (
    Channel,
    ChannelHandler,
    open_channel,
    serve_channel,
)
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hosts import MEMBERS, connected, run
from tests.helpers.rounds import KEY, RUN_ID, UNBOUNDED, form, identities, identity, peer, small_layout

LONG_S = 60.0  # for what succeeds
SHORT_S = 0.5  # for what is expected to run into its deadline


async def is_open(channel: Channel) -> bool:
    """Returns True if the other side neither sends anything nor closes the stream."""
    try:
        async with asyncio.timeout(SHORT_S):
            await channel.receive(0)
    except TimeoutError:
        return True
    except EOFError:
        return False
    raise AssertionError("a frame after the last one")


async def answers(channel: Channel) -> None:
    await channel.receive_hello(100)
    await channel.send(Frame(FrameKind.END))


async def refuses(channel: Channel) -> None:
    await channel.receive_hello(100)
    raise ProtocolError("group", "no round of that group is open here")


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
@pytest.mark.parametrize("handler", [answers, refuses])
def test_a_stream_that_has_been_served_stays_open_until_the_other_side_closes_it(
    handler: ChannelHandler, real: bool
) -> None:
    async def test() -> None:
        async with connected(2, real=real) as (server, client):
            await serve_channel(server.transport, "stream", handler, LONG_S, lambda peer_id, error: None, MEMBERS)
            async with open_channel(client.transport, server.peer_id, "stream", LONG_S) as channel:
                await channel.send_hello()
                assert (await channel.receive(1000)).kind in (FrameKind.END, FrameKind.ERROR)
                await channel.send_hello()  # made in advance: no reason to close, either
                assert await is_open(channel)

    run(test)


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
def test_a_member_has_been_served_once_it_closes_its_stream(real: bool) -> None:
    """Only then may a reducer leave: what its daemon has not forwarded would end with it."""
    layout = small_layout()
    initial_N = np.zeros(layout.num_elements, np.float32)
    # One that cannot be reached reduces nothing.
    members = [peer(layout, initial_N, range(4), reachable=who is identity(0)) for who in identities(2)]
    for member in members:
        member.live_N += 1.0
    group = form(members, 1)
    plan = make_plan(group, layout, 64)
    states = [
        RoundState(group, plan, i, m.reference, m.live_N, get_codec("fp32"), UNBOUNDED, KEY)
        for i, m in enumerate(members)
    ]

    async def test() -> None:
        async with connected(2, real=real) as (server, client):
            reducer, puller = group.index_of(server.peer_id), group.index_of(client.peer_id)
            assert reducer is not None
            assert puller is not None
            faults: list[ProtocolError] = []
            exchange = Exchange(
                server.transport,
                server.rpc,
                RUN_ID,
                ExchangeLimits(LONG_S, LONG_S),
                lambda peer_id, error: faults.append(error),
                MEMBERS,
            )
            await exchange.start()
            round_of_reducer = asyncio.create_task(exchange.run(states[reducer]))
            async with open_channel(client.transport, server.peer_id, f"{RUN_ID}/push", LONG_S) as channel:
                await channel.send_hello(group=group.id)
                for part in plan.pushes(puller, reducer):
                    await channel.send(states[puller].contributions.push_frame(part))
                await channel.end()
            num_bytes = 0
            async with open_channel(client.transport, server.peer_id, f"{RUN_ID}/pull", LONG_S) as channel:
                await channel.send_hello(group=group.id, parts=b"")
                while (frame := await channel.receive(1 << 16)).kind is not FrameKind.END:
                    num_bytes += len(frame.payload)
                assert (await round_of_reducer).parts_missing == 0
                traffic = asyncio.create_task(exchange.traffic())
                assert await is_open(channel)
                assert not traffic.done()
            sent, _ = await traffic
            assert not states[reducer].unserved
            assert sent == num_bytes > 0
            assert not faults

    run(test)
