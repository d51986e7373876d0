"""Contributors that do not show their work, after an exchange that was held in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import Channel
from spes_swarm.network.round import audits as audits_module
from spes_swarm.network.round import silence as silence_module
from spes_swarm.network.round.claims import Claim, own_contribution
from spes_swarm.network.round.silence import MAX_FOR_ONE, NO_COMMIT, Answer, Silence
from spes_swarm.protocol.averaging.lottery import num_audits
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.auditors import LIAR, STALL_S, Auditor, asked, audit_all, auditors, begin, exchanged
from tests.helpers.hosts import run
from tests.helpers.rounds import KEY
from tests.helpers.virtual_time import run_at_once

LIMIT_S = 600.0  # of virtual time
AUDITOR, HELPER, HIDING = 1, 2, 3  # members; the first one, LIAR, reduces falsely unless it is honest


@pytest.fixture(autouse=True)
def nothing_is_audited_by_lot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits_module, "num_audits", lambda num_members: 0)


def hide(each: Auditor, member_ids: Collection[int] | None = None) -> list[int]:
    """Has a member show its work to these members no longer, None: to nobody; returns a list of those who ask it."""
    show, ids, asking = each.audits._show, each.state.averaging.peer_ids, list[int]()

    async def selective(state: RoundState, channel: Channel, indices: list[int]) -> None:
        asking.append(ids.index(channel.peer_id))
        if member_ids is not None and asking[-1] not in member_ids:
            await show(state, channel, indices)

    each.audits._show = selective  # type: ignore[method-assign]
    return asking


def reduced_by(state: RoundState, reducer: int, count: int = MAX_FOR_ONE) -> list[int]:
    return [part.index for part in state.plan.parts if part.reducer == reducer][:count]


async def audit(each: Auditor, parts: Sequence[int]) -> None:
    await asyncio.wait_for(each.audits._run_audits(each.state, parts), 120)
    await each.audits.proofs.added()


async def settled(members: Sequence[Auditor]) -> None:
    """Waits until helpers have asked once more."""
    for each in members:
        for task in each.audits._silence._again.values():
            await asyncio.wait_for(task, 60)


def noted(each: Auditor) -> set[int]:
    """The members whose silence a member has noted."""
    records, ids = each.state.tracks.conduct._peers, each.state.averaging.peer_ids
    return {ids.index(peer_id) for peer_id, record in records.items() if record.silences}


def hidden_from(each: Auditor, round_number: int) -> set[int]:
    """The members that hide, as a member sees it."""
    conduct, ids = each.state.tracks.conduct, each.state.averaging.peer_ids
    return {member for member, peer_id in enumerate(ids) if conduct.hides(peer_id, round_number)}


def request(state: RoundState, of: object, *parts: int) -> dict[str, Any]:
    """Asks for a member's contributions; `of`: its index, or anything else instead of its id."""
    about = state.averaging.peer_ids[of] if isinstance(of, int) else of
    return {"group": state.group.id, "parts": b"".join(part.to_bytes(4, "little") for part in parts), "of": about}


# Asking through others.


def test_who_is_silent_to_one_member_only_is_audited_through_another_and_noted_by_nobody() -> None:
    states = exchanged()
    lies = reduced_by(states[0], LIAR)

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING], [AUDITOR])
            begin(members)
            await audit(members[AUDITOR], lies)
            await settled(members)
            assert asking == [AUDITOR, AUDITOR, HELPER]
            assert members[AUDITOR].proven == [states[0].averaging.peer_ids[LIAR]]
            assert not any(each.faults for each in members if each is not members[AUDITOR])
            assert [f.kind for f in await asked(members, request(states[0], HIDING, lies[0]))] == [FrameKind.END]
            await settled(members)  # as a helper, it has got nothing either, but knows better
            assert asking[3:] == [AUDITOR, AUDITOR]
            assert [noted(each) for each in members] == [set()] * 4

    run_at_once(test(), LIMIT_S)


@pytest.mark.parametrize("real", [False, True], ids=["in memory", "through daemons"])
def test_who_is_silent_to_all_is_noted_by_all_that_were_asked(real: bool) -> None:
    states = exchanged(6)

    async def test() -> None:
        async with auditors(states, real=real) as members:
            hide(members[HIDING])
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            assert [noted(each) for each in members] == [set(), {3}, {3}, set(), {3}, {3}]
            silences = members[HELPER].state.tracks.conduct._peers[states[0].averaging.peer_ids[HIDING]].silences
            assert [(each.round, each.key) for each in silences] == [(3, KEY.public)]
            assert not members[AUDITOR].proven

    run(test) if real else run_at_once(test(), LIMIT_S)


def test_if_the_first_helpers_get_nothing_all_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_module, "FIRST_HELPERS", 1)
    monkeypatch.setattr(silence_module, "_RANDOM", SimpleNamespace(shuffle=lambda members: None, random=lambda: 0.0))
    states = exchanged(6)

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING], [AUDITOR, HELPER])
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], 4))  # the first helper is the liar, which shows it
            assert asking == [AUDITOR, AUDITOR, LIAR]
            members[AUDITOR].audits.end(keep=False)
            members[AUDITOR].audits.begin(states[AUDITOR])
            liar_asked: list[object] = []

            async def note(state: RoundState, channel: Channel, of: object, indices: Sequence[int]) -> None:
                liar_asked.append(of)

            monkeypatch.setattr(members[LIAR].audits._silence, "help", note)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            assert members[AUDITOR].proven == [states[0].averaging.peer_ids[LIAR]]
            assert asking[3:5] == [AUDITOR, AUDITOR]
            assert not liar_asked  # about its own result
            assert noted(members[AUDITOR]) == set()

    run_at_once(test(), LIMIT_S)


def test_a_claim_is_judged_although_the_fetch_that_completed_it_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged()
    may_end, wrong_result = threading.Event(), Claim.wrong_result

    def slow(claim: Claim) -> bytes | None:
        assert may_end.wait(60)
        return wrong_result(claim)

    monkeypatch.setattr(Claim, "wrong_result", slow)

    async def test() -> None:
        async with auditors(states) as members:
            audits = members[AUDITOR].audits
            claim = Claim.of(states[AUDITOR], reduced_by(states[0], LIAR)[0])
            for member in claim.members:
                frame = own_contribution(states[member], claim.part)
                assert frame is not None
                assert claim.take(member, frame)
            judging = asyncio.create_task(audits._judge(claim))
            await asyncio.sleep(0)
            judging.cancel()
            await asyncio.wait({judging})
            may_end.set()
            await asyncio.wait(audits._examining)
            await audits.proofs.added()
            assert members[AUDITOR].proven == [states[0].averaging.peer_ids[LIAR]]

    run(test)


def test_a_member_asks_others_for_no_more_than_they_grant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_module, "MAX_FOR_ONE", 1)
    states = exchanged()
    lies = reduced_by(states[0], LIAR)
    assert len(lies) > 1

    async def test() -> None:
        async with auditors(states) as members:
            asking, shown = hide(members[HIDING], [AUDITOR]), list[int]()
            help_others = members[HELPER].audits._silence.help

            async def note_and_help(state: RoundState, channel: Channel, of: object, indices: Sequence[int]) -> None:
                shown.extend(indices)
                await help_others(state, channel, of, indices)

            monkeypatch.setattr(members[HELPER].audits._silence, "help", note_and_help)
            begin(members)
            for _ in range(2):
                await audit(members[AUDITOR], lies)
            assert asking == [AUDITOR, AUDITOR, HELPER]  # after the first audit, the liar is proven
            assert len(shown) == 1
            assert not members[HELPER].faults

    run_at_once(test(), LIMIT_S)


def test_a_helper_that_passes_on_something_else_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(5)

    async def other(state: RoundState, channel: Channel, of: object, indices: Sequence[int]) -> None:
        for index in indices:
            frame = own_contribution(states[HELPER], states[HELPER].plan.parts[index])
            assert frame is not None
            await channel.send(replace(frame, extra=bytes([len(frame.extra)]) + frame.extra))

    async def test() -> None:
        async with auditors(states) as members:
            hide(members[HIDING], [AUDITOR])
            monkeypatch.setattr(members[HELPER].audits._silence, "help", other)
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            assert members[AUDITOR].proven == [states[0].averaging.peer_ids[LIAR]]
            assert [noted(each) for each in members] == [set()] * 5

    run_at_once(test(), LIMIT_S)


def test_other_bytes_than_were_pushed_are_noted_by_helpers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged()
    honest = own_contribution

    def spoiled(state: RoundState, part: Part) -> Frame | None:
        frame = honest(state, part)
        return replace(frame, payload=bytes(len(frame.payload))) if frame is not None and state.me == HIDING else frame

    monkeypatch.setattr(audits_module, "own_contribution", spoiled)

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            assert [noted(each) for each in members] == [set(), {3}, {3}, set()]

    run_at_once(test(), LIMIT_S)


def test_silence_that_may_have_another_reason_is_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that others cannot reach, one that leaves, or an auditor that has missed the next rounds."""
    states = exchanged(4, clients=[HIDING])

    async def test() -> None:
        async with auditors(states) as members:
            hide(members[HIDING])
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            assert [noted(each) for each in members] == [set()] * 4

    run_at_once(test(), LIMIT_S)
    states = exchanged(4)

    async def behind() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING])
            begin(members)
            monkeypatch.setattr(members[AUDITOR].audits._run.roster, "swarm_round", lambda own_round: own_round + 1)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            assert HELPER in asking
            assert [noted(each) for each in members] == [set(), set(), {3}, set()]

    run(behind)


@pytest.mark.parametrize(("times", "is_noted"), [(1.01, True), (0.99, False)])
def test_who_cannot_send_what_all_may_ask_for_in_time_is_not_noted(
    times: float, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = exchanged()
    parts = states[0].plan.parts
    mean_bytes = sum(states[0].codec.num_bytes(part.size) for part in parts) / len(parts)
    num_others, each_asks_for = len(states) - 1, num_audits(len(states))
    needed_mbps = num_others * each_asks_for * mean_bytes * 8 / 1e6 / STALL_S

    async def test() -> None:
        async with auditors(states) as members:
            for each in members:
                rates = {states[0].averaging.peer_ids[HIDING]: times * needed_mbps}
                monkeypatch.setattr(each.state.tracks.conduct, "rates", lambda rates=rates: rates)
            hide(members[HIDING])
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            assert [HIDING in noted(each) for each in members] == [False, is_noted, is_noted, False]

    run_at_once(test(), LIMIT_S)


def test_who_has_not_committed_yet_says_so_and_that_is_another_silence() -> None:
    states = exchanged()

    async def test() -> None:
        async with auditors(states) as members:
            begin([each for number, each in enumerate(members) if number != HIDING])
            hello = {"group": states[0].group.id, "parts": bytes(4)}
            (frame,) = await asked(members, hello, by=AUDITOR, whom=HIDING)
            assert (frame.kind, frame.extra) == (FrameKind.END, NO_COMMIT)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            await settled(members)
            for each in (members[AUDITOR], members[HELPER]):
                (silence,) = each.state.tracks.conduct._peers[states[0].averaging.peer_ids[HIDING]].silences
                assert (silence.round, silence.key) == (3, b"")

    run_at_once(test(), LIMIT_S)


def test_of_two_members_neither_notes_the_silence_of_the_other() -> None:
    states = exchanged(2)

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[0])
            begin(members)
            await audit(members[1], reduced_by(states[0], 0))
            assert asking
            assert noted(members[1]) == set()

    run_at_once(test(), LIMIT_S)


def test_if_all_helpers_refuse_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_module, "MAX_FOR_ONE", 0)
    states = exchanged()

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING])
            begin(members)
            await audit(members[AUDITOR], reduced_by(states[0], LIAR))
            assert set(asking) == {AUDITOR}
            assert noted(members[AUDITOR]) == set()

    run_at_once(test(), LIMIT_S)


def test_when_the_next_exchange_begins_helpers_ask_no_further_and_note_nothing() -> None:
    states = exchanged()
    lies = reduced_by(states[0], LIAR)

    async def test() -> None:
        async with auditors(states) as members:
            hide(members[HIDING])
            begin(members)
            (end,) = await asked(members, request(states[0], HIDING, lies[0]))
            assert end.kind is FrameKind.END
            (again,) = members[1].audits._silence._again.values()
            members[1].audits.end(keep=False)
            await asyncio.wait({again})
            assert again.cancelled()
            assert noted(members[1]) == set()

    run_at_once(test(), LIMIT_S)


def test_a_liar_that_shows_its_work_to_nobody_hides_after_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(5)

    async def test() -> None:
        async with auditors(states) as members:
            hide(members[LIAR])
            for later in range(3):
                assert [hidden_from(each, 3 + later) for each in members] == [set()] * 5
                monkeypatch.setattr(audits_module, "num_audits", lambda num_members: 4)
                for each in members:
                    audit_all(each, later)
                for each in members:
                    await each.done()
                await settled(members)
            assert [hidden_from(each, 6) for each in members] == [set(), {LIAR}, {LIAR}, {LIAR}, {LIAR}]
            assert not any(each.proven for each in members)

    run_at_once(test(), LIMIT_S)


# Helping others.


def test_a_helper_grants_each_auditor_little_and_all_together_not_much_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_module, "MAX_FOR_ALL", MAX_FOR_ONE + 1)
    states = exchanged(5, lying=None)
    part = reduced_by(states[0], 4)[0]

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            for _ in range(MAX_FOR_ONE):
                shown, end = await asked(members, request(states[0], HIDING, part))
                assert (shown.kind, shown.part, end.kind) == (FrameKind.DATA, part, FrameKind.END)
            (refusal,) = await asked(members, request(states[0], HIDING, part))
            assert refusal.error_text() == "busy: too many audits through this member"
            assert len(await asked(members, request(states[0], HIDING, part), by=2)) == 2
            assert [error.kind for _, error in members[1].faults] == ["busy"]
            (refusal,) = await asked(members, request(states[0], HIDING, part), by=4)
            assert refusal.error_text() == "busy: too many audits through this member by all together"
            assert [error.kind for _, error in members[1].faults] == ["busy"]  # which is not the auditor's fault

    run_at_once(test(), LIMIT_S)


def test_those_who_ask_for_the_same_share_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(5, lying=None)
    part = reduced_by(states[0], 4)[0]

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            both, silence = asyncio.Event(), members[1].audits._silence
            asking = hide(members[HIDING], [])
            show, ask = members[HIDING].audits._show, silence._answer
            helped: list[int] = []

            async def wait_for_both(state: RoundState, channel: Channel, indices: list[int]) -> None:
                await both.wait()
                await show(state, channel, indices)

            async def note_and_ask(state: RoundState, member: int, indices: tuple[int, ...]) -> Answer:
                helped.append(member)
                if len(helped) == 2:
                    asyncio.get_running_loop().call_soon(both.set)
                return await ask(state, member, indices)

            monkeypatch.setattr(members[HIDING].audits, "_show", wait_for_both)
            monkeypatch.setattr(silence, "_answer", note_and_ask)
            first = asyncio.create_task(asked(members, request(states[0], HIDING, part)))
            second = asyncio.create_task(asked(members, request(states[0], HIDING, part), by=2))
            assert [len(await task) for task in (first, second)] == [2, 2]
            assert asking == [1]

    run_at_once(test(), LIMIT_S)


def test_who_was_silent_to_a_helper_is_not_asked_for_each_auditor_again() -> None:
    states = exchanged(5, lying=None)
    parts = reduced_by(states[0], 4)

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING])
            begin(members)
            for by in (0, 2, 4):
                for part in parts:
                    assert [f.kind for f in await asked(members, request(states[0], HIDING, part), by)] == [
                        FrameKind.END
                    ]
            assert members[1].audits._silence._num_granted == 1  # the rest costs nothing
            await settled(members)
            assert asking == [1, 1]
            assert noted(members[1]) == {HIDING}

    run_at_once(test(), LIMIT_S)


def test_a_helper_takes_nothing_longer_than_a_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    states = exchanged(lying=None)
    honest = own_contribution

    def longer(state: RoundState, part: Part) -> Frame | None:
        frame = honest(state, part)
        return None if frame is None else replace(frame, payload=frame.payload + b"\0")

    async def test() -> None:
        async with auditors(states) as members:
            begin(members)
            part = reduced_by(states[0], 2)[0]
            monkeypatch.setattr(audits_module, "own_contribution", longer)
            assert [f.kind for f in await asked(members, request(states[0], HIDING, part))] == [FrameKind.END]
            monkeypatch.undo()
            members[1].audits.end(keep=False)
            begin(members)
            assert len(await asked(members, request(states[0], HIDING, part))) == 2

    run_at_once(test(), LIMIT_S)


@pytest.mark.parametrize("of", [0, 1, "somebody", b"bytes", 1.5, [], {}], ids=repr)
def test_a_third_member_of_the_group_is_asked_about(of: object) -> None:
    """Not the auditor or the helper itself, nor anybody else."""
    states = exchanged(lying=None)

    async def test() -> None:
        async with auditors(states) as members:
            asking = [hide(each, []) for each in members]
            begin(members)
            (refusal,) = await asked(members, request(states[0], of, reduced_by(states[0], 2)[0]))
            assert refusal.error_text().startswith("malformed: others are asked for the contributions of a third")
            assert asking == [[]] * 4

    run_at_once(test(), LIMIT_S)


def test_other_groups_and_parts_are_not_asked_for() -> None:
    states = exchanged(lying=None)

    async def test() -> None:
        async with auditors(states) as members:
            asking = hide(members[HIDING], [])
            begin(members)
            num_parts = len(states[0].plan.parts)
            own, foreign = reduced_by(states[0], 1)[0], {**request(states[0], HIDING, 0), "group": b"another"}
            for hello in (request(states[0], HIDING, own, num_parts, (1 << 32) - 1), foreign):
                assert [frame.kind for frame in await asked(members, hello)] == [FrameKind.END]
            assert asking == []

    run_at_once(test(), LIMIT_S)


ANYTHING = st.recursive(st.none() | st.text() | st.binary() | st.floats(), st.lists, max_leaves=3)
NUMBER = st.integers(0, 30) | st.integers(0, (1 << 32) - 1)


@pytest.fixture(scope="module")
def honest_states() -> list[RoundState]:
    return exchanged(lying=None)


@settings(deadline=None)
@given(st.integers(0, 3) | ANYTHING, st.lists(NUMBER, max_size=6), st.integers(0, 4))
def test_whatever_is_asked_it_is_refused_or_costs_one_fetch(
    honest_states: list[RoundState], about: object, indices: list[int], who: int
) -> None:
    state, ids = honest_states[1], honest_states[1].averaging.peer_ids
    of, auditor = ids[about] if isinstance(about, int) else about, [*ids, "stranger"][who]
    fetched: list[int] = []

    async def fetch(state: RoundState, member: int, claims: Any, through: int | None = None) -> Answer:
        fetched.append(member)
        return Answer([Frame(FrameKind.DATA, part=claim.part.index) for claim in claims], b"")

    async def test() -> list[Frame]:
        sent: list[Frame] = []

        async def send(frame: Frame) -> None:
            sent.append(frame)

        run_of: Any = SimpleNamespace(run=SimpleNamespace(round=SimpleNamespace(stall_timeout_s=60.0)))
        silence = Silence(run_of, fetch)
        channel: Any = SimpleNamespace(peer_id=auditor, send=send)
        try:
            await silence.help(state, channel, of, indices)
        finally:
            silence.end(keep=False)
        return sent

    is_asked = isinstance(about, int) and about not in (1, who) and who < 4 and len(indices) <= MAX_FOR_ONE
    if not is_asked:
        with pytest.raises(ProtocolError, match=r"^(sender|malformed|busy): "):
            asyncio.run(test())
        assert not fetched
        return
    sent = asyncio.run(test())
    useful = {i for i in indices if i < len(state.plan.parts) and state.plan.parts[i].reducer != 1}
    assert {frame.part for frame in sent} == useful
    assert fetched == ([about] if useful else [])
