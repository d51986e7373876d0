"""Audits among real daemons, after an exchange that was held in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import Channel, open_channel
from spes_swarm.network.round import audits as audits_module
from spes_swarm.network.round.audits import Audits
from spes_swarm.network.round.claims import own_contribution
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Part, Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.taking_back import Previous, Return
from spes_swarm.protocol.rounds.track_record import TrackRecords
from tests.helpers.hosts import MEMBERS, Host, hosts, run
from tests.helpers.rounds import KEY, RUN_ID, UNBOUNDED, form, peer, small_layout

LAYOUT = small_layout()
STALL_S = 8.0  # a member that shows nothing is asked again after a quarter of it
LIAR, SILENT = 0, 3


class Liar(RoundState):
    """Reduces to the mean with its sign flipped."""

    def _mean(self, part: Part, accumulator: Any) -> FloatArray:
        return -super()._mean(part, accumulator)


@dataclass
class Auditor:
    """A member after the exchange."""

    state: RoundState
    audits: Audits
    faults: list[tuple[str, ProtocolError]]

    @property
    def proven(self) -> list[str]:
        return self.state.tracks.conduct.exclusions.culprits

    async def done(self) -> None:
        assert self.audits._task is not None
        await asyncio.wait_for(self.audits._task, 120)
        await self.audits.proofs.added()


def exchanged(num_members: int = 4, *, lying: bool = True, keeping: bool = True) -> list[RoundState]:
    """A committed exchange; the first member may lie, and the last may keep nothing of it."""
    rng = np.random.default_rng(0)
    initial_N = np.zeros(LAYOUT.num_elements, np.float32)
    members = [peer(LAYOUT, initial_N, range(4), previous=kept(keeping or i != SILENT)) for i in range(num_members)]
    for who in members:
        who.live_N += rng.normal(0, 1, LAYOUT.num_elements).astype(np.float32)
    group = form(members, 3)
    plan = make_plan(group, LAYOUT, 64)
    states = [
        (Liar if lying and i == LIAR else RoundState)(
            group, plan, i, m.reference, m.live_N, get_codec("fp16"), UNBOUNDED, KEY, TrackRecords(), None, m.previous
        )
        for i, m in enumerate(members)
    ]
    for sender in states:
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                target.accept(sender.me, sender.push_frame(part))
    for state in states:
        for index, part in state.wanted.items():
            if part.reducer != state.me:
                frame = states[part.reducer].result_frame(index, state.me)
                assert frame is not None
                state.store_result(frame)
    for state in states:
        state.commit()
    return states


def kept(whether: bool) -> Previous:
    vectors = [np.zeros(LAYOUT.num_elements, np.float32) for _ in range(2)] if whether else []
    return Previous(*vectors)


@asynccontextmanager
async def auditors(states: list[RoundState], folder: Path | None = None) -> AsyncIterator[list[Auditor]]:
    """The members, connected with each other."""
    async with hosts(len(states)) as found:
        by_id = {host.peer_id: host for host in found}
        for host in found[1:]:
            for other in found[: found.index(host)]:
                await host.connect(other)
        started = [await auditor(by_id[state.averaging.peer_ids[state.me]], state, folder) for state in states]
        try:
            yield started
        finally:
            for each in started:
                each.audits.end(keep=False)
                each.audits._current = lambda: None
            for each in started:
                each.audits._begun.notify()  # nobody waits for a commit any more
            await asyncio.sleep(0.1)


async def auditor(host: Host, state: RoundState, folder: Path | None) -> Auditor:
    settings = SimpleNamespace(proofs=None if folder is None else folder / host.peer_id)
    round_config = SimpleNamespace(round=SimpleNamespace(stall_timeout_s=STALL_S))
    run_state: Any = SimpleNamespace(run_id=RUN_ID, run=round_config, settings=settings, tracks=state.tracks)
    faults: list[tuple[str, ProtocolError]] = []
    audits = Audits(host.daemon.p2p, run_state, lambda *fault: faults.append(fault), MEMBERS, lambda: state)
    await audits.start()
    return Auditor(state, audits, faults)


def audit_all(each: Auditor, later: int = 0) -> None:
    """Begins an audit of all parts, as if the commit had been some rounds later."""
    plan = replace(each.state.plan, round=each.state.plan.round + later)
    each.audits.begin(replace_plan(each.state, plan))


def replace_plan(state: RoundState, plan: Plan) -> RoundState:
    other = copy(state)
    other.plan = plan
    return other


def begin(members: list[Auditor]) -> None:
    """All have committed."""
    for each in members:
        each.audits.begin(each.state)


@pytest.fixture(autouse=True)
def audits_are_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "num_audits", lambda num_members: 1000)


def test_a_liar_is_proven_by_what_the_others_show(tmp_path: Path) -> None:
    states = exchanged()
    liar = states[0].averaging.peer_ids[LIAR]

    async def test() -> None:
        async with auditors(states, tmp_path) as members:
            begin(members)
            for each in members:
                await each.done()
            assert [each.proven for each in members] == [[], [liar], [liar], [liar]]
            for each in members[1:]:
                ((culprit, error),) = each.faults
                assert (culprit, error.kind) == (liar, "proven")
                assert each.state.tracks.conduct.doubts(liar, 3) == ("proven",)
                (file,) = (tmp_path / each.state.averaging.peer_ids[each.state.me]).glob("*.proof")
                assert str(file) in str(error)
                proof = open_proof(file.read_bytes())
                assert (proof.culprit, proof.round, proof.kind) == (liar, 3, "result")

    run(test)


def test_nothing_is_proven_against_honest_members() -> None:
    states = exchanged(lying=False)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for each in members:
                await each.done()
                assert not each.proven
                assert not each.faults
                assert not each.state.tracks.conduct.doubted(4)

    run(test)


def test_who_does_not_show_its_work_in_three_rounds_is_doubted() -> None:
    """Without its contributions, nothing can be said about the results that include them."""
    states = exchanged(keeping=False)
    silent = states[0].averaging.peer_ids[SILENT]

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            judge = members[1]
            conduct = judge.state.tracks.conduct
            for _ in range(3):  # a round counts once
                audit_all(judge)
                await judge.done()
            for later in (1, 2):
                assert silent not in conduct.doubted(3 + later)
                audit_all(judge, later)
                await judge.done()
            assert conduct.doubts(silent, 5) == ("audit",)
            assert not judge.proven
            assert not judge.faults

    run(test)


def test_if_half_of_the_others_show_nothing_it_may_be_the_line() -> None:
    states = exchanged(lying=False)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for each in members[2:]:
                each.audits.end(keep=False)  # they have begun another exchange
                each.audits._current = lambda: None
            for later in range(3):
                audit_all(members[1], later)
                await members[1].done()
            assert not members[1].state.tracks.conduct.doubted(5)

    run(test)


def test_other_bytes_than_were_pushed_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(lying=False)
    other = states[0].averaging.peer_ids[SILENT]
    honest = own_contribution

    def spoiled(state: RoundState, part: Part) -> Frame | None:
        frame = honest(state, part)
        return replace(frame, payload=bytes(len(frame.payload))) if frame is not None and state.me == SILENT else frame

    monkeypatch.setattr(audits_module, "own_contribution", spoiled)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for later in range(3):
                audit_all(members[1], later)
                await members[1].done()
            assert members[1].state.tracks.conduct.doubts(other, 5) == ("audit",)
            assert not members[1].proven

    run(test)


def test_audits_end_when_the_next_exchange_begins() -> None:
    states = exchanged()

    async def test() -> None:
        async with auditors(states) as members:
            task = None
            for each in members[1:]:
                each.audits.begin(each.state)
                task = each.audits._task
                each.audits.end(keep=False)
                assert task is not None
                await asyncio.wait({task})
                assert task.cancelled()
                assert not each.proven

    run(test)


def test_after_a_return_the_members_share_out_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "num_audits", lambda num_members: 0)
    states = exchanged()
    liar = states[0].averaging.peer_ids[LIAR]
    lies = {part.index for part in states[0].plan.parts if part.reducer == LIAR}
    drawn: list[set[int]] = []

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for each in members:
                await each.done()
                assert not each.proven
                each.audits.end(keep=True)
                plan = replace(each.state.plan, taken_back=Return(3, b"", frozenset(), frozenset(range(4))))
                later: Any = SimpleNamespace(plan=plan, group=each.state.group, me=each.state.me)
                audit = each.audits._run_audits

                async def noted(state: RoundState, parts: list[int], audit: Any = audit) -> None:
                    drawn.append(set(parts))
                    await audit(state, parts)

                monkeypatch.setattr(each.audits, "_run_audits", noted)
                each.audits.begin(later)
            for each in members:
                await each.done()
            assert set().union(*drawn) == {part.index for part in states[0].plan.parts}
            assert sum(map(len, drawn)) == len(states[0].plan.parts)
            assert lies
            assert liar in {culprit for each in members for culprit in each.proven}

    run(test)


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        ({"group": b"x", "parts": "all"}, "malformed"),
        ({"group": 7, "parts": b""}, "malformed"),
        ({"group": b"x", "parts": b"123"}, "malformed"),
        ({"parts": bytes(4 * 100)}, None),
    ],
    ids=["no numbers", "no group", "half a number", "a part twice"],
)
def test_what_auditors_may_ask_for(hello: dict[str, Any], why: str | None) -> None:
    states = exchanged(lying=False)

    async def test() -> None:
        async with auditors(states) as members:
            members[1].audits._state = members[1].state
            frames = await asked(members, {"group": states[0].group.id, **hello})
            assert frames[-1].kind is (FrameKind.END if why is None else FrameKind.ERROR)
            if why is not None:
                assert frames[-1].error_text().startswith(why)

    run(test)


async def asked(members: list[Auditor], hello: dict[str, Any]) -> list[Frame]:
    """What the second member answers to the first."""
    other = members[1].state.averaging.peer_ids[1]
    async with open_channel(members[0].audits._p2p, other, f"{RUN_ID}/audit", 60.0) as channel:
        await channel.send_hello(**hello)
        return [frame async for frame in frames_of(channel)]


async def frames_of(channel: Channel) -> AsyncIterator[Frame]:
    while True:
        frame = await channel.receive(1 << 20)
        yield frame
        if frame.kind is not FrameKind.DATA:
            return


def test_an_exchange_that_is_over_is_not_shown() -> None:
    states = exchanged(lying=False)

    async def test() -> None:
        async with auditors(states) as members:
            members[1].audits._state = members[1].state
            part = next(p.index for p in states[0].plan.parts if p.reducer == 2)
            hello = {"group": states[0].group.id, "parts": part.to_bytes(4, "little")}
            assert [frame.kind for frame in await asked(members, hello)] == [FrameKind.DATA, FrameKind.END]
            members[1].audits.end(keep=False)
            members[1].audits._current = lambda: None
            assert [frame.kind for frame in await asked(members, hello)] == [FrameKind.END]
            assert not members[1].faults

    run(test)


def test_a_member_gets_so_many_contributions_and_no_more() -> None:
    states = exchanged(lying=False)
    most = max(audits_module._SERVED_PARTS, len(states[0].plan.parts))

    async def test() -> None:
        async with auditors(states) as members:
            members[1].audits._state = members[1].state
            part = next(p.index for p in states[0].plan.parts if p.reducer == 2)
            hello = {"group": states[0].group.id, "parts": part.to_bytes(4, "little")}
            for _ in range(most):
                assert len(await asked(members, hello)) == 2
            (refusal,) = await asked(members, hello)
            assert refusal.error_text().startswith("busy")

    run(test)
