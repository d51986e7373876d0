"""What an exchange computes in threads: the event loop goes on meanwhile, and nothing of a cancelled round is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network.round import exchange as exchange_module
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.plan import make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hosts import MEMBERS
from tests.helpers.rounds import KEY, UNBOUNDED, form, peer, small_layout

LONG_S = 60.0


@pytest.fixture(autouse=True)
def no_part_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "_SMALL", 0)


def first_of(num_members: int, *, others_reachable: bool = False) -> RoundState:
    """The round of a member that can be reached; if no other can, it reduces everything."""
    layout = small_layout()
    initial_N = np.zeros(layout.num_elements, np.float32)
    members = [peer(layout, initial_N, range(4), reachable=i == 0 or others_reachable) for i in range(num_members)]
    for member in members:
        member.live_N += 1.0
    group = form(members, 1)
    plan = make_plan(group, layout, 64)
    me = next(i for i, member in enumerate(group.members) if member.statement.reachable)
    return RoundState(group, plan, me, members[0].reference, members[0].live_N, get_codec("fp32"), UNBOUNDED, KEY)


def exchange(timeout_s: float = LONG_S, on_fault: Callable[[str, ProtocolError], None] | None = None) -> Exchange:
    async def silence(*arguments: Any, **more: Any) -> Any:
        await asyncio.Event().wait()

    transport: Any = SimpleNamespace(open_stream=silence)
    rpc: Any = SimpleNamespace(call=silence)
    return Exchange(transport, rpc, "run", ExchangeLimits(LONG_S, timeout_s), on_fault or (lambda *_: None), MEMBERS)


def test_the_event_loop_runs_during_a_commit_which_cannot_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    state, begun, released = first_of(1), threading.Event(), threading.Event()
    apply = RoundState.apply

    def wait_and_apply(self: RoundState) -> Any:
        begun.set()
        assert released.wait(LONG_S)
        return apply(self)

    monkeypatch.setattr(RoundState, "apply", wait_and_apply)

    async def hold() -> None:
        round_under_way = asyncio.create_task(exchange().run(state))
        await asyncio.to_thread(begun.wait, LONG_S)
        for _ in range(2):
            round_under_way.cancel()
            await asyncio.sleep(0)
        assert state.reference.round == 0
        released.set()
        assert (await round_under_way).parts_missing == 0
        assert state.reference.round == 1

    asyncio.run(hold())


@pytest.mark.parametrize("others_reachable", [False, True])
@pytest.mark.parametrize("ends", ["cancelled", "too late"])
def test_a_round_that_fails_takes_in_no_more_of_this_peers_work(
    monkeypatch: pytest.MonkeyPatch, ends: str, others_reachable: bool
) -> None:
    """Its weights may change then. Others still get the parts that they have contributed to."""
    state = first_of(2, others_reachable=others_reachable)
    begun, released = threading.Event(), threading.Event()
    taken = []
    accept_own = state.reduction.accept_own

    def accept_slowly(part: Any, contribution: Any) -> None:
        accept_own(part, contribution)
        taken.append(part.index)
        begun.set()
        assert released.wait(LONG_S)

    monkeypatch.setattr(state.reduction, "accept_own", accept_slowly)

    async def hold() -> None:
        under_way = asyncio.create_task(exchange(LONG_S if ends == "cancelled" else 0.2).run(state))
        await asyncio.to_thread(begun.wait, LONG_S)
        if ends == "cancelled":
            under_way.cancel()
        else:
            await asyncio.sleep(0.3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not under_way.done()  # it waits for the piece of work that has begun
        released.set()
        with pytest.raises(asyncio.CancelledError if ends == "cancelled" else RoundError):
            await under_way
        assert len(taken) == 1
        state.reduction.give_up(1 - state.me)
        for index in state.reduction.ready():
            state.reduction.complete(index)
        assert len(state.reduction.reduced) == state.reduction.num_to_reduce
        assert state.results.contributors == {state.me}
        assert set(taken) == {i for i, result in state.results.known.items() if result.included}

    asyncio.run(hold())


@pytest.mark.parametrize("fails", ["accept_own", "complete"])
def test_an_error_in_a_thread_ends_the_round(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    state = first_of(1)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(state.reduction, fails, fail)
    with pytest.raises(MemoryError):
        asyncio.run(exchange().run(state))


def test_a_nan_of_its_own_is_reported_even_if_the_round_fails() -> None:
    state = first_of(2)
    state.live_N[:] = np.nan
    faults: list[str] = []
    with pytest.raises(RoundError):
        asyncio.run(exchange(0.5, lambda peer_id, error: faults.append(error.kind)).run(state))
    assert faults[0] == "nonfinite"
