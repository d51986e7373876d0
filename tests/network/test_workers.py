"""Where work is done: on the event loop or in threads, ahead of its use, and what a cancellation does to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing

import pytest

from spes_swarm.network.round import workers as workers_module
from spes_swarm.network.round.workers import Workers

LONG_S = 60.0
FEW = 10


@pytest.fixture(autouse=True)
def ten_values_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_FEW", FEW)


class Slow:
    """Work that ends when it is released."""

    def __init__(self) -> None:
        self.begun, self.released, self.ended = threading.Event(), threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.released.wait(LONG_S)
        self.ended.set()
        return "done"


def is_on_loop() -> bool:
    return threading.current_thread() is threading.main_thread()


def test_work_on_few_values_is_done_on_the_event_loop() -> None:
    async def test() -> None:
        workers = Workers()
        assert await workers.compute(FEW, is_on_loop)
        assert not await workers.compute(FEW + 1, is_on_loop)
        assert not await workers.compute_in_thread(is_on_loop)
        assert not await workers.compute_uncancellably(is_on_loop)

    asyncio.run(test())


@pytest.mark.parametrize("num_values", [FEW, FEW + 1])
def test_errors_come_to_whoever_awaits_the_result(num_values: int) -> None:
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        asyncio.run(Workers().compute(num_values, fail))
    with pytest.raises(MemoryError):
        asyncio.run(Workers().compute_uncancellably(fail))


@pytest.mark.parametrize("is_cancellable", [True, False])
def test_a_task_that_is_cancelled_ends_with_its_work(is_cancellable: bool) -> None:
    async def test() -> None:
        workers, work = Workers(), Slow()
        compute = workers.compute_in_thread if is_cancellable else workers.compute_uncancellably
        task = asyncio.create_task(compute(work))
        await asyncio.to_thread(work.begun.wait, LONG_S)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        work.released.set()
        if is_cancellable:
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert await task == "done"
        assert work.ended.is_set()

    asyncio.run(test())


def doubled(begun: list[int]) -> Callable[[int], int]:
    def double(value: int) -> int:
        begun.append(value)
        return 2 * value

    return double


@pytest.mark.parametrize("values", [[], [1], [11, 12, 13, 1, 2, 14]])
def test_results_come_in_order(values: list[int]) -> None:
    async def test() -> list[int]:
        async with aclosing(Workers().compute_ahead(values, lambda value: value, doubled([]))) as results:
            return [result async for result in results]

    assert asyncio.run(test()) == [2 * value for value in values]


def test_the_next_piece_is_computed_while_a_result_is_used_and_ends_with_its_user() -> None:
    begun, second = list[int](), Slow()

    def work(value: int) -> int:
        begun.append(value)
        if value == 12:
            second()
        return value

    async def use() -> None:
        async with aclosing(Workers().compute_ahead([11, 12, 13], lambda value: value, work)) as results:
            assert await anext(results) == 11
            await asyncio.to_thread(second.begun.wait, LONG_S)

    async def test() -> None:
        using = asyncio.create_task(use())
        await asyncio.to_thread(second.begun.wait, LONG_S)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not second.ended.is_set()
        second.released.set()
        await using
        assert second.ended.is_set()

    asyncio.run(test())
    assert begun == [11, 12]


def test_few_values_are_not_computed_ahead_of_their_use() -> None:
    begun: list[int] = []

    async def test() -> None:
        async with aclosing(Workers().compute_ahead([11, 1], lambda value: value, doubled(begun))) as results:
            await anext(results)
            await asyncio.sleep(0)
            assert begun == [11]

    asyncio.run(test())


def test_how_many_values_a_piece_has_is_asked_after_the_one_before() -> None:
    """The first piece of a batch computes all of it."""
    computed: list[int] = []
    on_loop: list[bool] = []

    def work(value: int) -> None:
        computed.append(value)
        on_loop.append(is_on_loop())

    async def test() -> None:
        work_on_all = Workers().compute_ahead([1, 2], lambda value: 0 if computed else FEW + 1, work)
        async with aclosing(work_on_all) as results:
            async for _ in results:
                pass

    asyncio.run(test())
    assert on_loop == [False, True]
