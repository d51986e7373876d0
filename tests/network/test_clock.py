"""Peers agree on the time, whatever their wall clocks say."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hivemind import utils
from hivemind.utils.timed_storage import TimedStorage
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.link import clock
from spes_swarm.network.link.clock import (
    CALL_TIMEOUT_S,
    CHECK_EVERY_S,
    MAX_SLEW_S,
    MAX_TOTAL_S,
    NUM_SAMPLES,
    SLEW,
    TOLERANCE_S,
    SwarmClock,
    Timekeeper,
    measure_offset,
    parse_time,
)
from tests.helpers.dht_clock import in_hivemind

NOON = 1.8e9  # some moment, Unix seconds
RESOLUTION_S = 1e-6  # of a float that large


class Machine:
    """A machine's clocks, moved by hand: `steady` as it runs, `wall` as somebody sets it."""

    def __init__(self, steady: float = 1000.0, wall: float = NOON) -> None:
        self.steady, self.wall = steady, wall

    def pass_time(self, seconds: float) -> None:
        self.steady += seconds
        self.wall += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(clock, "steady_clock", lambda: made.steady)
    monkeypatch.setattr(clock, "wall_clock", lambda: made.wall)
    return made


@contextmanager
def machine_of(made: Machine) -> Iterator[Machine]:
    """The fixture, for hypothesis."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "steady_clock", lambda: made.steady)
        patch.setattr(clock, "wall_clock", lambda: made.wall)
        yield made


def offsets(own: SwarmClock, *differences: float) -> dict[str, float]:
    """What is measured when other peers' clocks differ from this one's by so many seconds."""
    return {f"peer{i}": own.offset + difference for i, difference in enumerate(differences)}


def settled(*differences: float) -> float:
    """How far a joiner's clock moves when the peers it meets differ from its wall clock by so many seconds."""
    own = SwarmClock()
    before = own.now()
    own.synchronise(offsets(own, *differences).values())
    return own.now() - before


def step(differences: Sequence[float], live: Sequence[str] = ()) -> float:
    """How far a running clock is set at once when other peers differ from it by so many seconds."""
    own = SwarmClock()
    before = own.now()
    reported = own.correct(offsets(own, *differences), live)
    assert own.now() - before == pytest.approx(reported)
    return reported


# The clock of one peer.


def test_a_peer_without_others_keeps_its_wall_clock(machine: Machine) -> None:
    own = SwarmClock()
    own.synchronise([])
    assert own.correct({}) == 0.0
    machine.pass_time(3600.0)
    assert own.now() == machine.wall == NOON + 3600.0


def test_a_wall_clock_that_is_set_moves_nothing(machine: Machine) -> None:
    own = SwarmClock()
    machine.wall -= 1e6
    machine.pass_time(5.0)
    assert own.now() == NOON + 5.0


def test_a_clock_of_this_machine_shows_its_time_and_counts_on() -> None:
    assert clock.steady_clock() <= clock.steady_clock()
    assert SwarmClock().now() == pytest.approx(time.time(), abs=5.0)


# Joining.


def test_a_joiner_takes_the_time_of_the_swarm(machine: Machine) -> None:
    assert settled(300.0) == pytest.approx(300.0)
    assert settled(-300.0, -300.001) == pytest.approx(-300.0, abs=0.01)
    assert settled(-300.0, -300.001, -299.999) == pytest.approx(-300.0, abs=0.01)


@pytest.mark.parametrize("lie", [1e8, -1e8, 40.0, -40.0])
def test_one_liar_among_those_asked_does_not_move_a_joiner(machine: Machine, lie: float) -> None:
    assert settled(-300.0, lie, -300.0) == pytest.approx(-300.0)
    assert settled(-300.0, -300.0, lie, -300.0) == pytest.approx(-300.0)
    # Of two, one lies: the wall clock decides, which is right as a rule.
    assert abs(settled(0.01, lie)) <= 0.01


# Running.


def test_two_peers_go_to_the_time_of_the_one_that_is_ahead(machine: Machine) -> None:
    assert step([300.0]) == pytest.approx(300.0)
    assert step([-300.0]) == 0.0


def test_of_two_halves_the_one_that_is_behind_follows(machine: Machine) -> None:
    assert step([0.0, 300.0, 300.0]) == pytest.approx(300.0)
    assert step([0.0, -300.0, -300.0]) == 0.0


def test_a_minority_follows_the_majority(machine: Machine) -> None:
    assert step([300.0, 300.0]) == pytest.approx(300.0)
    assert step([-300.0, -300.0]) == pytest.approx(-300.0)
    assert step([0.0, 0.0, 300.0, 300.0]) == 0.0
    assert step([0.0, 0.0, -300.0, -300.0]) == 0.0


@pytest.mark.parametrize("lie", [1e8, -1e8, 40.0, -40.0])
@pytest.mark.parametrize("honest", [1, 2, 3, 4])
def test_one_liar_does_not_move_a_swarm_of_three_or_more(machine: Machine, lie: float, honest: int) -> None:
    own = SwarmClock()
    own.correct(offsets(own, lie, *[0.0] * honest))
    machine.pass_time(600.0)
    assert own.now() == machine.wall


def test_one_peers_word_is_not_enough_when_the_others_are_silent(machine: Machine) -> None:
    assert step([300.0], live=["peer0", "silent"]) == 0.0
    assert step([300.0], live=["peer0"]) == pytest.approx(300.0)


def test_one_peer_alone_cannot_take_another_further_than_an_hour(machine: Machine) -> None:
    own = SwarmClock()
    for _ in range(10):
        own.correct(offsets(own, MAX_TOTAL_S / 2 - 1))
        machine.pass_time(CHECK_EVERY_S)
    assert own.now() - machine.wall <= MAX_TOTAL_S


def test_a_machine_that_was_halted_for_a_night_returns_to_the_only_other_peer(machine: Machine) -> None:
    own = SwarmClock()
    machine.wall += 8 * 3600.0  # a virtual machine's steady clock stands still; its wall clock is set afterwards
    assert own.correct(offsets(own, 8 * 3600.0)) == pytest.approx(8 * 3600.0)


@pytest.mark.slow
def test_disagreement_within_the_tolerance_is_left_alone(machine: Machine) -> None:
    for difference in (TOLERANCE_S * 0.99, -TOLERANCE_S * 0.99):
        own = SwarmClock()
        assert own.correct(offsets(own, difference, difference)) == 0.0
        machine.pass_time(100.0)
        assert own.now() == machine.wall


@pytest.mark.slow
@given(st.floats(TOLERANCE_S * 1.01, MAX_SLEW_S), st.lists(st.floats(0.0, 20.0), max_size=20))
def test_a_clock_that_is_ahead_runs_slower_and_never_back(ahead: float, pauses: list[float]) -> None:
    with machine_of(Machine()) as made:
        own = SwarmClock()
        assert own.correct(offsets(own, -ahead, -ahead)) == 0.0
        last = own.now()
        assert last == pytest.approx(NOON)
        for pause in pauses:
            made.pass_time(pause)
            assert own.now() >= last - RESOLUTION_S
            last = own.now()
        made.pass_time(ahead / SLEW)
        assert own.now() == pytest.approx(made.wall - ahead, abs=1e-3)


def test_slowing_down_ends_when_the_others_have_come(machine: Machine) -> None:
    own = SwarmClock()
    own.correct(offsets(own, -MAX_SLEW_S, -MAX_SLEW_S))
    machine.pass_time(1.0)
    own.correct(offsets(own, 0.0, 0.0))
    there = own.now()
    machine.pass_time(100.0)
    assert own.now() == there + 100.0


@pytest.mark.slow
@given(st.lists(st.floats(-500.0, 500.0), min_size=1, max_size=40))
def test_expirations_of_a_peers_own_records_never_go_back(corrections: list[float]) -> None:
    with machine_of(Machine()) as made:
        own = SwarmClock()
        announcer: Any = SimpleNamespace(_expires={}, now=own.now)
        last = 0.0
        for correction in corrections:
            expires = Announcer._next_expiration(announcer, "progress", 30.0)
            assert expires > last
            assert expires >= own.now() + 30.0
            last = expires
            own.correct(offsets(own, correction, correction))
            made.pass_time(2.0)


@pytest.mark.slow
@given(
    st.lists(st.floats(-MAX_TOTAL_S / 3, MAX_TOTAL_S / 3), min_size=2, max_size=9),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_clocks_that_meet_converge(starts: list[float], together: bool, random: Any) -> None:
    """However they differ: two halves of a swarm, restarted peers that find each other, one that has lost hours."""
    with machine_of(Machine()) as made:
        clocks = {}
        for i, start in enumerate(starts):
            made.wall = NOON + start
            clocks[f"peer{i}"] = SwarmClock()
        made.wall = NOON
        for _ in range(4):
            measured = {peer: other.offset for peer, other in clocks.items()}
            for peer in random.sample(sorted(clocks), len(clocks)):
                if not together:
                    measured = {other: c.offset for other, c in clocks.items()}
                clocks[peer].correct({other: offset for other, offset in measured.items() if other != peer})
            made.pass_time(CHECK_EVERY_S)
        times = [own.now() for own in clocks.values()]
        assert max(times) - min(times) <= 2 * TOLERANCE_S
        assert min(starts) - 1e-3 <= times[0] - made.wall <= max(starts) + 1e-3


# Asking.


def test_of_several_samples_the_one_with_the_shortest_round_trip_counts(machine: Machine) -> None:
    ways = iter([(0.1, 1.5), (0.02, 0.03), (1.0, 0.1), (0.2, 0.2)])  # there and back, seconds
    asked = 0

    async def ask() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        there, back = next(ways)
        machine.pass_time(there)
        answer = {"time": machine.wall + 300.0}
        machine.pass_time(back)
        return answer

    offset = asyncio.run(measure_offset(ask))
    assert asked == NUM_SAMPLES
    assert offset + machine.steady - machine.wall - 300.0 == pytest.approx((0.02 - 0.03) / 2, abs=1e-5)


def test_samples_may_get_lost_but_not_all(machine: Machine) -> None:
    answers: list[dict[str, Any] | None] = []

    async def ask() -> dict[str, Any]:
        answer = answers.pop()
        if answer is None:
            raise TimeoutError
        return answer

    answers[:] = [None, {"time": NOON + 7.0}, None, None]
    assert asyncio.run(measure_offset(ask)) == NOON + 7.0 - machine.steady
    answers[:] = [None] * NUM_SAMPLES
    with pytest.raises(TimeoutError):
        asyncio.run(measure_offset(ask))


@pytest.mark.parametrize(
    "answer",
    [{}, *({"time": bad} for bad in (None, True, 5, "1.8e9", b"", [NOON], math.nan, math.inf, -math.inf, -1.0, 1e11))],
    ids=str,
)
def test_answers_that_are_no_time_are_refused(answer: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="malformed"):
        parse_time(answer)


class FakeRpc:
    """Other peers by their answers: what `clock` returns, or the error that the call raises."""

    def __init__(self, **peers: Any) -> None:
        self.peers = peers
        self.served: dict[str, Any] = {}

    async def serve(self, method: str, handler: Any) -> None:
        self.served[method] = handler

    async def call(self, peer_id: str, method: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert (method, arguments, timeout_s) == ("clock", {"run": "run-1"}, CALL_TIMEOUT_S)
        answer = self.peers[peer_id]
        if isinstance(answer, Exception):
            raise answer
        return {"time": answer}


def keeper(rpc: Any) -> tuple[Timekeeper, list[tuple[str, ProtocolError]]]:
    faults: list[tuple[str, ProtocolError]] = []
    return Timekeeper(rpc, "run-1", "me", lambda peer_id, error: faults.append((peer_id, error))), faults


def test_only_answers_that_make_sense_count_and_others_are_named(machine: Machine) -> None:
    rpc = FakeRpc(a=NOON + 300.0, gone=ConnectionError("gone"), slow=TimeoutError(), mad=math.nan, b=NOON + 300.0)
    own, faults = keeper(rpc)
    asyncio.run(own.synchronise(rpc.peers.keys()))
    assert own.clock.now() == NOON + 300.0
    assert [(peer, fault.kind) for peer, fault in faults] == [("mad", "malformed")]


def test_a_wrong_wall_clock_is_reported_once(machine: Machine) -> None:
    rpc = FakeRpc(a=NOON + 300.0)
    own, faults = keeper(rpc)

    async def stay() -> None:
        await own.synchronise(["a"])
        await own.serve()
        for _ in range(3):
            assert await own.check(["a"]) == 0.0

    asyncio.run(stay())
    ((peer, fault),) = faults
    assert (peer, fault.kind) == ("me", "clock")
    assert "300.0 s behind the swarm" in fault.detail
    assert "\n" not in fault.detail


def test_a_right_wall_clock_is_not_reported(machine: Machine) -> None:
    rpc = FakeRpc(a=NOON + 4.0)
    own, faults = keeper(rpc)
    asyncio.run(own.synchronise(["a"]))
    asyncio.run(own.serve())
    assert faults == []


def test_the_time_is_told_to_peers_of_the_same_run(machine: Machine) -> None:
    rpc = FakeRpc()
    own, _ = keeper(rpc)
    asyncio.run(own.serve())
    assert asyncio.run(rpc.served["clock"]("who", {"run": "run-1"})) == {"time": NOON}
    for request in ({}, {"run": "run-2"}, {"run": None}, {"run": [1]}):
        assert "error" in asyncio.run(rpc.served["clock"]("who", request))


@given(st.floats(0.0, 1e10))
def test_peers_that_agree_check_at_the_same_time(wall: float) -> None:
    with machine_of(Machine(wall=wall)) as made:
        own, _ = keeper(FakeRpc())
        wait = own.until_check_s()
        assert 0.0 < wait <= CHECK_EVERY_S
        made.pass_time(wait)
        assert math.remainder(own.clock.now(), CHECK_EVERY_S) == pytest.approx(0.0, abs=1e-4)


# hivemind.


def test_the_whole_dht_goes_by_the_swarm_clock(machine: Machine) -> None:
    own = SwarmClock()
    with in_hivemind(own):
        for name in ("dht.protocol", "dht.node", "dht.routing", "utils.timed_storage", "utils.auth"):
            assert sys.modules[f"hivemind.{name}"].get_dht_time == own.now
        assert utils.get_dht_time() == NOON
        storage: TimedStorage[str, str] = TimedStorage()
        assert storage.store("key", "value", NOON + 10.0)
        assert not storage.store("late", "value", NOON - 1.0)
        machine.pass_time(9.0)
        assert "key" in storage
        machine.pass_time(2.0)
        assert "key" not in storage
    assert utils.get_dht_time is time.time
