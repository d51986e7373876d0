"""Answers of several members, one of which may be frozen, and results that are signed together."""

from __future__ import annotations

import asyncio

from spes_swarm.base.changes import Changes
from spes_swarm.network.round.deadlines import a_batch, answers_within


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


def test_results_wait_until_there_are_enough_of_them() -> None:
    async def reduce() -> None:
        reduced, changes, loop = list[int](), Changes(), asyncio.get_running_loop()

        def another() -> None:
            reduced.append(len(reduced))
            changes.notify()

        for _ in range(4):
            loop.call_soon(another)
        await a_batch(changes, reduced, 3)
        assert len(reduced) >= 3
        await a_batch(changes, reduced, 3)
        await a_batch(changes, reduced, 5)  # but no more comes
        assert len(reduced) == 4

    asyncio.run(asyncio.wait_for(reduce(), 30.0))
