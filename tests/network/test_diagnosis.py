"""What a network process says about itself when something hangs."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base import log
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.network import client
from spes_swarm.network.client import NetworkClient
from spes_swarm.network.diagnosis import exchange_lines, roster_lines, stream_lines, task_lines
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import open_channel
from spes_swarm.network.process import NetworkProcess
from spes_swarm.network.round.deadlines import ExchangeLimits
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.network.run_services import RunServices
from spes_swarm.network.transport.daemon import _Output
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.meeting.gathering import Gathering
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.members.roster import Roster
from spes_swarm.protocol.rounds.plan import make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers import rounds
from tests.helpers.hosts import MEMBERS
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.records import progress
from tests.helpers.tiny_model import tiny_layout


def two_members() -> RoundState:
    """The first of two members, who has delivered all that it owes itself."""
    layout = tiny_layout()
    values_N = np.zeros(layout.num_elements, dtype=np.float32)
    peers = [rounds.peer(layout, values_N, held) for held in ((0, 1), (1, 2))]
    group = rounds.form(peers, 1)
    plan = make_plan(group, layout, 64, clip=0.0, experts=True)
    return rounds.open_round(
        group, plan, 0, peers[0].reference, peers[0].live_N, get_codec("fp32"), rounds.UNBOUNDED, rounds.KEY
    )


def test_whoever_an_exchange_waits_for_is_named_with_the_parts() -> None:
    state = two_members()
    other = state.group.members[1].peer_id
    lines = list(exchange_lines(state, {0: 0.0, 1: 0.0}))
    done, num_parts = (
        len(state.reduction.reduced),
        state.reduction.num_to_reduce,
    )  # parts that nobody else contributes to are done
    assert 0 < done < num_parts
    assert lines[0].startswith(
        f"exchange of round 1 with 2 members, under way: {done} of {num_parts} parts reduced here, "
    )
    (line,) = (line for line in lines if other in line)
    owed = state.reduction.outstanding()[1]
    results = [index for index in state.results.missing() if state.plan.parts[index].reducer == 1]
    assert owed
    assert results
    assert f"contributions to parts {owed[0]}" in line
    assert f"results of parts {results[0]}" in line
    assert "last heard" in line
    assert list(exchange_lines(None, {})) == ["no exchange yet"]


def test_an_exchange_that_takes_too_long_is_reported_before_anybody_is_given_up() -> None:
    state = two_members()
    reports: list[list[str]] = []

    async def silence(*arguments: Any, **more: Any) -> Any:
        await asyncio.Event().wait()

    async def hold() -> None:
        transport: Any = SimpleNamespace(open_stream=silence)
        rpc: Any = SimpleNamespace(call=silence)
        exchange = Exchange(transport, rpc, "run", ExchangeLimits(stall_timeout_s=60.0, timeout_s=0.5), ignore, MEMBERS)
        try:
            await exchange.run(state, on_late=lambda: reports.append(list(exchange.describe())))
        except RoundError:
            reports.append(["failed"])

    asyncio.run(hold())
    (line,) = (line for line in reports[0] if state.group.members[1].peer_id in line)
    assert "contributions to parts" in line
    assert reports[1:] == [["failed"]]


def ignore(peer_id: str, error: ProtocolError) -> None:
    del peer_id, error


def test_every_task_is_shown_with_all_calls_that_it_is_in() -> None:
    async def innermost() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await innermost()

    async def look() -> list[str]:
        task = asyncio.create_task(outer(), name="the stuck one")
        await asyncio.sleep(0)
        lines = list(task_lines())
        task.cancel()
        return lines

    lines = asyncio.run(look())
    shown = lines[lines.index("task the stuck one") :]
    names = [line.rpartition(" ")[2].rpartition(".")[2] for line in shown[1:4]]
    assert names == ["outer", "innermost", "wait"]


def test_peers_are_shown_with_what_their_word_counts() -> None:
    roster = Roster("me", reputation=Reputation(()))
    roster.reputation.note_answer("a")
    roster.update({"a": progress(round=7, name="first"), "b": progress(state="waiting")})
    first, second = roster_lines(roster)
    assert first.startswith("peer a 'first': training, round 7, ")
    assert "has answered" in first
    assert second.startswith("peer b '': waiting, round 3, ")
    assert "has answered" not in second


def test_open_streams_are_shown_until_they_are_closed() -> None:
    async def talk() -> tuple[list[str], list[str]]:
        here, there = socket.socketpair()

        async def connect(peer_id: str, name: str, timeout_s: float) -> Any:
            return await asyncio.open_connection(sock=here)

        transport: Any = SimpleNamespace(open_stream=connect)
        peer = rounds.identity(0).peer_id
        with there:
            async with open_channel(transport, peer, "run/push", 60.0):
                during = [line for line in stream_lines() if peer in line]
        return during, [line for line in stream_lines() if peer in line]

    during, after = asyncio.run(talk())
    assert len(during) == 1
    assert during[0].startswith("stream run/push with ")
    assert after == []


def test_a_gathering_says_who_is_here_and_who_is_not() -> None:
    gathering = Gathering(window_s=10.0)
    gathering.add("here", b"statement", now=1.0)
    gathering.lost.add("gone")
    assert "here ['here'], lost ['gone']" in gathering.describe(now=2.0)


def test_a_report_that_cannot_be_made_fails_no_round() -> None:
    async def report() -> list[str]:
        failures: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(str(context)))
        nothing: Any = SimpleNamespace()
        process = NetworkProcess(nothing, nothing)
        process._run = nothing  # cannot be described
        process.report("the round has failed")
        await asyncio.sleep(0)
        return failures

    (failure,) = asyncio.run(report())
    assert "describe" in failure


def test_an_error_that_comes_again_and_again_is_logged_once_until_another_one_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons = ["one", "one", "one", "two", "one"]
    faults: list[ProtocolError] = []

    async def fail() -> None:
        if len(faults) == len(reasons):
            raise asyncio.CancelledError
        raise ValueError(reasons[len(faults)])

    async def repeat() -> None:
        services: Any = SimpleNamespace(_tasks=[], state=SimpleNamespace(identity=SimpleNamespace(peer_id="me")))
        services._on_fault = lambda peer_id, error: faults.append(error)
        RunServices.repeat(services, fail, 0.0)
        await asyncio.gather(*services._tasks, return_exceptions=True)

    asyncio.run(repeat())
    logged = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert len(faults) == len(reasons)
    assert logged == ["one", "two", "one"]


def test_each_line_of_the_daemon_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def listen() -> str:
        program = [sys.executable, "-c", r"print('first\n\nsecond', flush=True); print(end='the reason')"]
        with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
            output = await _Output.read(process)
            await output._ended.wait()
            return await output.last_line()

    with caplog.at_level(logging.INFO, "spes_swarm"):
        assert asyncio.run(listen()) == "the reason"
    assert [record.message for record in caplog.records] == ["p2pd: first", "p2pd: second", "p2pd: the reason"]


def test_each_reason_is_logged_although_states_are_not_so_often(caplog: pytest.LogCaptureFixture) -> None:
    async def report() -> None:
        nothing: Any = SimpleNamespace()
        process = NetworkProcess(nothing, nothing)
        for why in ("the first reason", "the second reason"):
            process.report(why)
            await asyncio.sleep(0)

    asyncio.run(report())
    said = [record.message.partition("\n")[0] for record in caplog.records]
    assert said == ["the first reason", "the first reason: state of the network process", "the second reason"]


def test_a_call_that_fails_here_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    async def planted(caller: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("planted")

    async def serve() -> None:
        network = MemoryNetwork()
        rpc = Rpc(network.join("called"), ignore)
        await rpc.start()
        await rpc.serve("fail", planted)
        await Rpc(network.join("caller"), ignore).call("called", "fail", {}, 60.0)

    with pytest.raises(ConnectionError, match="planted"):
        asyncio.run(serve())
    (record,) = caplog.records
    assert record.message == "a call of caller failed"
    assert record.exc_info is not None


def test_an_error_that_ends_the_network_process_is_logged_and_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def planted(*arguments: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(log, "_path", None)
    monkeypatch.setattr(client, "run_network_process", planted)
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        network = NetworkClient(tmp_path / "identity.key", lambda event: None)
        network._reader.join()
        network._process.join()
        network.stop(timeout_s=0.1)
    assert network._process.exitcode == 1
    assert "in planted" in (tmp_path / "log.txt").read_text()
    assert capfd.readouterr().err == ""


def test_an_event_that_cannot_be_handled_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def planted(event: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(log, "_path", None)
    monkeypatch.setattr(client, "run_network_process", lambda pipe, *others: (pipe.send("an event"), pipe.poll(None)))
    with log.writing(tmp_path / "log.txt", "info", "trainer"):
        network = NetworkClient(tmp_path / "identity.key", planted)
        network._reader.join()
        network.stop(timeout_s=0.1)
    assert "in planted" in (tmp_path / "log.txt").read_text()
    said = "unexpected error in thread spes-network-reader: ValueError('planted'); traceback in "
    assert capfd.readouterr().err.startswith(said)
