"""Audits among peers, after an exchange that was held in one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.network.round import audits as audits_module
from spes_swarm.network.round.claims import own_contribution
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.taking_back import Return
from tests.helpers.auditors import LIAR, SILENT, asked, audit_all, auditors, begin, exchanged
from tests.helpers.hosts import run
from tests.helpers.virtual_time import run_at_once

LIMIT_S = 600.0  # of virtual time


@pytest.fixture(autouse=True)
def audits_are_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "num_audits", lambda num_members: 1000)


@pytest.mark.parametrize(
    ("kind", "kinds_of_proofs", "real"),
    [
        ("flipped", {"result"}, False),
        ("flipped", {"result"}, True),
        ("forged", {"forged"}, False),
        ("two-faced", {"result", "two-results"}, False),
    ],
    ids=["in memory", "through daemons", "forged", "two-faced"],
)
def test_a_liar_is_proven_by_what_the_others_show(
    tmp_path: Path, kind: str, kinds_of_proofs: set[str], real: bool
) -> None:
    states = exchanged(lying=kind)
    liar = states[0].averaging.peer_ids[LIAR]

    async def test() -> None:
        async with auditors(states, tmp_path, real=real) as members:
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
                assert (proof.culprit, proof.round) == (liar, 3)
                assert proof.kind in kinds_of_proofs

    run(test) if real else run_at_once(test(), LIMIT_S)


def test_nothing_is_proven_against_honest_members() -> None:
    states = exchanged(lying=None)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for each in members:
                await each.done()
                assert not each.proven
                assert not each.faults
                assert not each.state.tracks.conduct.doubted(4)

    run_at_once(test(), LIMIT_S)


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
                for each in members:
                    each.audits._silence.end(keep=False)
                audit_all(judge, later)
                await judge.done()
            assert conduct.doubts(silent, 5) == ("audit",)
            assert not judge.proven
            assert not judge.faults

    run_at_once(test(), LIMIT_S)


def test_if_half_of_the_others_show_nothing_it_may_be_the_line() -> None:
    states = exchanged(lying=None)

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

    run_at_once(test(), LIMIT_S)


def test_other_bytes_than_were_pushed_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(lying=None)
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
                for each in members:
                    each.audits._silence.end(keep=False)
                audit_all(members[1], later)
                await members[1].done()
            assert members[1].state.tracks.conduct.doubts(other, 5) == ("audit",)
            assert not members[1].proven

    run_at_once(test(), LIMIT_S)


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

    run_at_once(test(), LIMIT_S)


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

    run_at_once(test(), LIMIT_S)


@pytest.mark.parametrize("length", [-1.0, 0.0])
def test_auditors_see_who_opposes_the_others_unless_the_round_is_taken_back(length: float) -> None:
    """Also in parts that others reduce: there may be members that reduce no part of the shared layers."""
    states = exchanged(lying=None, opposing=2, length=length)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for each in members:
                await each.done()
                records = {peer_id: list(r.opposition) for peer_id, r in each.state.tracks.conduct.known.items()}
                if each.state.me == 2:
                    assert not any(records.values())  # most others are against it, so it does not judge
                    continue
                shared = [part for part in each.state.plan.parts if part.block == 0 and part.reducer != each.state.me]
                large = sum(part.size == 64 for part in shared)  # of eight values, only the length says something
                counts = large if length else len(shared)
                for i, peer_id in enumerate(each.state.averaging.peer_ids):
                    if i != each.state.me:
                        ((number, total, parts),) = records[peer_id]
                        assert (number, parts) == (3, len(shared))
                        assert total == pytest.approx(counts if i == 2 else 0, abs=0.01)
                each.audits.end(keep=True)
                plan = replace(each.state.plan, taken_back=Return(3, b"", frozenset(), frozenset(range(4))))
                later: Any = SimpleNamespace(plan=plan, group=each.state.group, me=each.state.me)
                each.audits.begin(later)
                await each.done()
                for peer_id, before in records.items():
                    assert list(each.state.tracks.conduct.known[peer_id].opposition) == before

    run_at_once(test(), LIMIT_S)


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
    states = exchanged(lying=None)

    async def test() -> None:
        async with auditors(states) as members:
            members[1].audits._state = members[1].state
            frames = await asked(members, {"group": states[0].group.id, **hello})
            assert frames[-1].kind is (FrameKind.END if why is None else FrameKind.ERROR)
            if why is not None:
                assert frames[-1].error_text().startswith(why)

    run_at_once(test(), LIMIT_S)


def test_an_exchange_that_is_over_is_not_shown() -> None:
    states = exchanged(lying=None)

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

    run_at_once(test(), LIMIT_S)


def test_a_member_gets_so_many_contributions_and_no_more() -> None:
    states = exchanged(lying=None)
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

    run_at_once(test(), LIMIT_S)
