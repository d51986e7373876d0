"""What an exchange computes in threads: the event loop goes on meanwhile, and nothing of a cancelled round is left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network.link.wire import Channel, open_channel
from spes_swarm.network.round import workers as workers_module
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.protocol.averaging.commitments import MAX_BATCH, Commitment
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.contributions import Contributions
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Part, make_plan
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.results import Results
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hosts import MEMBERS, Endpoint, connected
from tests.helpers.rounds import KEY, RUN_ID, UNBOUNDED, form, peer, small_layout
from tests.helpers.virtual_time import run_at_once

LONG_S = 60.0


@pytest.fixture(autouse=True)
def no_part_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_FEW", 0)


def all_of(num_members: int, round_number: int = 1, *, others_reachable: bool = False) -> list[RoundState]:
    """The round of each member; if only the first one can be reached, it reduces everything."""
    layout, rng = small_layout(), np.random.default_rng(0)
    initial_N = np.zeros(layout.num_elements, np.float32)
    members = [peer(layout, initial_N, range(4), reachable=i == 0 or others_reachable) for i in range(num_members)]
    for member in members:
        member.live_N += rng.normal(1, 0.1, layout.num_elements).astype(np.float32)
    group = form(members, round_number)
    plan = make_plan(group, layout, 64)
    codec = get_codec("fp32")
    return [
        RoundState(group, plan, i, member.reference, member.live_N, codec, UNBOUNDED, KEY)
        for i, member in enumerate(members)
    ]


def first_of(num_members: int, *, others_reachable: bool = False) -> RoundState:
    """The round of a member that can be reached."""
    return all_of(num_members, others_reachable=others_reachable)[0]


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


@asynccontextmanager
async def meeting(
    num_members: int, on_fault: Callable[[str, ProtocolError], None] = lambda *_: None
) -> AsyncIterator[tuple[list[Exchange], Sequence[Endpoint]]]:
    """The exchanges of members that reach each other, which have registered their handlers."""
    async with connected(num_members) as endpoints:
        exchanges = [
            Exchange(host.transport, host.rpc, RUN_ID, ExchangeLimits(LONG_S, LONG_S), on_fault, MEMBERS)
            for host in sorted(endpoints, key=lambda host: host.peer_id)
        ]
        for each in exchanges:
            await each.start()
        yield exchanges, sorted(endpoints, key=lambda host: host.peer_id)


async def push(channel: Channel, sender: RoundState, num_parts: int | None = None) -> None:
    """Sends what a member owes to the first one, or the first parts of it."""
    await channel.send_hello(group=sender.group.id)
    for part in sender.plan.pushes(sender.me, 0)[:num_parts]:
        await channel.send(sender.contributions.push_frame(part))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("fails", ["_checked", "_mean"])
def test_an_error_in_what_another_member_has_sent_ends_the_round(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """At once, and that member is not to blame."""
    state, sender = all_of(2)
    does, failed, faults = getattr(Reduction, fails), threading.Event(), list[ProtocolError]()

    def fail(self: Reduction, part: Any, what: Any, *more: Any) -> Any:
        if self is state.reduction and getattr(what, "member", sender.me) == sender.me and not failed.is_set():
            failed.set()
            raise MemoryError
        return does(self, part, what, *more)

    monkeypatch.setattr(Reduction, fails, fail)

    async def hold() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the stream's error is reported, too
        async with meeting(2, lambda _, error: faults.append(error)) as (exchanges, hosts):
            under_way = asyncio.create_task(exchanges[0].run(state))
            await until(lambda: not any(state.me in a.outstanding for a in state.reduction._accumulators.values()))
            name = f"{RUN_ID}/push"
            async with open_channel(hosts[1].transport, hosts[0].peer_id, name, LONG_S) as channel:
                await push(channel, sender)
                with pytest.raises(MemoryError):
                    await asyncio.wait_for(under_way, LONG_S / 4)
            assert not exchanges[0]._completing
            wanted, roots = {part.index for part in sender.plan.parts if part.reducer == 0}, list[Commitment]()
            async with open_channel(hosts[1].transport, hosts[0].peer_id, f"{RUN_ID}/pull", LONG_S) as channel:
                await channel.send_hello(group=sender.group.id, parts=b"")
                while (frame := await channel.receive(1 << 20)).kind is not FrameKind.END:
                    sender.results.store(frame, roots)
            assert not wanted <= sender.results.known.keys(), "a round that fails here is not made up without it"
            assert all(sender.me in result.included for result in sender.results.known.values())

    asyncio.run(hold())
    assert failed.is_set()
    assert not faults


def test_a_stream_of_an_earlier_round_does_not_disturb_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (earlier, sent_earlier), (state, sender) = all_of(2), all_of(2, 2)

    def fail(index: int) -> None:
        raise MemoryError

    async def hold() -> None:
        name = f"{RUN_ID}/push"
        async with meeting(2) as (exchanges, hosts):
            under_way = asyncio.create_task(exchanges[0].run(earlier))
            async with open_channel(hosts[1].transport, hosts[0].peer_id, name, LONG_S) as channel:
                await push(channel, sent_earlier, 1)
                await until(lambda: earlier.payload_bytes_received)
                under_way.cancel()
                await asyncio.wait([under_way])
                monkeypatch.setattr(earlier.reduction, "complete", fail)
                under_way = asyncio.create_task(exchanges[0].run(state))
                await until(lambda: exchanges[0].current is state)
            await until(lambda: sender.me in earlier.reduction.given_up)
            async with open_channel(hosts[1].transport, hosts[0].peer_id, name, LONG_S) as channel:
                await push(channel, sender)
                await channel.end()
            assert (await under_way).parts_missing == 0
            assert state.results.contributors == {0, 1}

    asyncio.run(hold())


def test_small_parts_are_computed_on_the_event_loop_and_others_and_batches_in_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = 30
    monkeypatch.setattr(workers_module, "_FEW", few)
    states = all_of(3, others_reachable=True)
    plan, lives = states[0].plan, [state.live_N.copy() for state in states]
    on_loop: dict[str, set[tuple[bool, bool]]] = {}  # by what is done: (few values, on the event loop)

    def note(what: str, num_values: int) -> None:
        is_on_loop = threading.current_thread() is threading.main_thread()
        on_loop.setdefault(what, set()).add((num_values <= few, is_on_loop))

    accept, store, batch = Reduction.accept, Results.store, Contributions.batch

    def note_accept(self: Reduction, member: int, frame: Frame) -> None:
        note("accept", plan.parts[frame.part].size)
        accept(self, member, frame)

    def note_store(self: Results, frame: Frame, *more: Any) -> None:
        note("store", plan.parts[frame.part].size)
        store(self, frame, *more)

    def note_batch(self: Contributions, part: Part, values: Any) -> Any:
        frames = batch(self, part, values)
        note("batch", sum(plan.parts[index].size for index in frames))
        return frames

    monkeypatch.setattr(Reduction, "accept", note_accept)
    monkeypatch.setattr(Results, "store", note_store)
    monkeypatch.setattr(Contributions, "batch", note_batch)

    async def hold() -> None:
        async with meeting(3) as (exchanges, _):
            reports = await asyncio.gather(*(e.run(state) for e, state in zip(exchanges, states, strict=True)))
            assert [report.parts_missing for report in reports] == [0, 0, 0]

    asyncio.run(hold())
    assert on_loop["accept"] == on_loop["store"] == {(True, True), (False, False)}
    assert on_loop["batch"] == {(False, False)}  # no batch is small
    for state in states:
        np.testing.assert_allclose(state.reference.values_N, np.mean(lives, axis=0), rtol=0, atol=1e-6)
        assert state.reference.digest == states[0].reference.digest


@pytest.mark.parametrize("is_late", [False, True])
def test_results_that_come_soon_after_each_other_have_one_signature(is_late: bool) -> None:
    """The first one waits a little for the others of its batch."""
    state, other = all_of(2)
    for part in other.plan.pushes(1, 0):
        state.reduction.accept(1, other.contributions.push_frame(part))
    sent: list[Frame] = []

    async def send(frame: Frame) -> None:
        sent.append(frame)

    async def serve() -> None:
        serving = exchange()
        serving._begin(state)
        channel: Any = SimpleNamespace(send=send)
        streaming = asyncio.create_task(serving._stream_reduced(state, 1, channel))
        for number, (part, contribution) in enumerate(state.reduction.own_parts()):
            state.reduction.accept_own(part, contribution)
            await asyncio.sleep(0)
            if is_late and number == 0:
                await asyncio.sleep(1.0)
        await streaming

    run_at_once(serve(), LONG_S)
    results = [frame for frame in sent if frame.kind is FrameKind.DATA]
    assert [frame.part for frame in results] == state.reduction.reduced
    signed = [state.results.known[frame.part].signed for frame in results]
    signatures = [result.opening.signature for result in signed if result is not None]
    assert len(signatures) == len(results) > MAX_BATCH
    first = 1 if is_late else MAX_BATCH
    assert len(set(signatures[:first])) == 1
    assert signatures[first] != signatures[0]


def test_a_nan_of_its_own_is_reported_even_if_the_round_fails() -> None:
    state = first_of(2)
    state.live_N[:] = np.nan
    faults: list[str] = []
    with pytest.raises(RoundError):
        asyncio.run(exchange(0.5, lambda peer_id, error: faults.append(error.kind)).run(state))
    assert faults[0] == "nonfinite"
