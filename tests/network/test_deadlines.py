"""Answers of several members, one of which may be frozen."""

from __future__ import annotations

import asyncio

from spes_swarm.network.round.deadlines import answers_within


async def answer(value: int | None, event: asyncio.Event | None = None) -> int | None:
    if event is not None:
        await event.wait()
    return value


def test_a_frozen_member_is_waited_for_only_while_nobody_else_answers() -> None:
    async def ask() -> None:
        frozen = asyncio.Event()
        assert await answers_within({1: answer(7), 2: answer(8, frozen), 3: answer(None)}, 0.01) == {1: 7}
        asyncio.get_running_loop().call_later(0.05, frozen.set)
        assert await answers_within({2: answer(8, frozen), 3: answer(None)}, 0.01) == {2: 8}
        assert await answers_within({3: answer(None)}, -1.0) == {}
        assert await answers_within({}, 1.0) == {}

    asyncio.run(asyncio.wait_for(ask(), 30.0))
