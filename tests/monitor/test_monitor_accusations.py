"""Who is shown as excluded or without duty: what present peers say, and what the monitor has verified."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from spes_swarm.base.errors import ProtocolError
from spes_swarm.monitor import evidence as evidence_module
from spes_swarm.monitor.accusations import Evidence
from spes_swarm.monitor.evidence import EvidenceSeeker
from spes_swarm.monitor.history import History
from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.state import Excluded, SwarmState, WithoutDuty
from spes_swarm.monitor.views.faults import faults_text, print_faults
from spes_swarm.monitor.views.terminal import changes, print_once
from spes_swarm.protocol.averaging.proof import open_proof
from spes_swarm.protocol.members.records import DutyNote, Progress
from tests.helpers.histories import manifest
from tests.helpers.monitoring import START, TTL_S, Watched, peer_id, peer_state, progress, swarm_state
from tests.helpers.signed_exchange import RUN_ID, hold_exchange

CULPRIT, OTHER = peer_id(100), peer_id(101)
SHOWN = Evidence(7, 2, "the result differs", "proofs/a.proof")


def crowd(number: int, written: float = START, **changes: Any) -> dict[str, Progress]:
    return {peer_id(n): progress(written, name=f"peer {n}", **changes) for n in range(number)}


def idle(peer: str, since: int, *kinds: str) -> list[DutyNote]:
    return [DutyNote(peer=peer, since=since, kinds=list(kinds))]


# What peers say.


def test_a_claim_of_one_peer_is_shown_as_that() -> None:
    records = crowd(4) | {peer_id(0): progress(proven=[CULPRIT, peer_id(1)])}
    first, second = Watched().look(records).excluded
    assert (first.peer_id, first.by, first.of, first.verified, first.since) == (peer_id(1), 1, 3, False, START)
    assert (second.peer_id, second.by, second.of, second.name, second.round) == (CULPRIT, 1, 4, "", None)
    assert first.name == "peer 1"


def test_it_is_proven_only_by_what_the_monitor_has_verified() -> None:
    watched = Watched()
    watched.look(crowd(3, proven=[CULPRIT]))
    watched.ledger.proven = {CULPRIT: SHOWN, OTHER: SHOWN}
    (one,) = watched.state().excluded
    assert (one.by, one.of, one.verified, one.round, one.part, one.why, one.proof) == (
        *(3, 3, True, 7, 2, "the result differs"),
        "proofs/a.proof",
    )


def test_whoever_is_named_by_nobody_any_more_is_not_shown_unless_nobody_is_there() -> None:
    watched = Watched()
    watched.look(crowd(2, proven=[CULPRIT]))
    watched.wait(2 * TTL_S)
    assert [one.peer_id for one in watched.look().excluded] == [CULPRIT]  # all have left, and none has changed its mind
    assert not watched.look(crowd(2, watched.now)).excluded


def test_it_is_known_since_when_also_after_a_restart(tmp_path: Path) -> None:
    watched = Watched()
    state = watched.look(crowd(3, proven=[CULPRIT], without_duty=idle(OTHER, 5, "late")))
    assert state.without_duty
    history = History(tmp_path / "run.sqlite")
    history.begin(manifest())
    history.write(state, watched.ledger.summary(), [], [], [])
    known = history.known()
    history.close()
    assert known.without_duty == state.without_duty
    again = Watched(Ledger(watched.ledger.run, TTL_S, known))
    again.wait(60.0)
    assert [one.since for one in again.look(crowd(3, again.now, proven=[CULPRIT])).excluded] == [START]


@pytest.mark.parametrize(("number", "shown"), [(2, False), (3, True)])
def test_a_peer_is_without_duty_if_more_than_half_of_the_others_say_so(number: int, shown: bool) -> None:
    records = crowd(5)
    for n in range(number):
        records[peer_id(n)] = progress(without_duty=idle(peer_id(4), 10 + n, "missing", f"kind-{n}"))
    found = Watched().look(records).without_duty
    assert [(one.peer_id, one.by, one.of) for one in found] == ([(peer_id(4), 3, 4)] if shown else [])
    if shown:
        assert found[0].since == 11
        assert found[0].kinds == ("kind-0", "kind-1", "kind-2", "missing")


def test_of_an_even_number_of_rounds_the_lower_median_is_shown() -> None:
    records = {peer_id(n): progress(without_duty=idle(CULPRIT, since)) for n, since in enumerate((1 << 61, 9, 3, 4))}
    (one,) = Watched().look(records).without_duty
    assert one.since == 4


def test_who_has_no_say() -> None:
    """A peer about itself, peers that are not in training or are proven liars, and nobody twice."""
    said: dict[str, Any] = {"proven": [CULPRIT, CULPRIT], "without_duty": [*idle(CULPRIT, 1), *idle(CULPRIT, 2)]}
    records = {
        peer_id(0): progress(**said),
        peer_id(1): progress(),
        peer_id(2): progress(state="joining", **said),
        peer_id(3): progress(state="leaving", experts=[], **said),
        CULPRIT: progress(**said),
        OTHER: progress(**said),
    }
    watched = Watched()
    watched.ledger.proven = {OTHER: SHOWN}
    state = watched.look(records)
    assert [(one.peer_id, one.by, one.of) for one in state.excluded] == [(CULPRIT, 1, 2)]
    assert not state.without_duty


def test_hostile_claims_are_harmless_and_few() -> None:
    hostile = ["<b>", "", "x\n", "I" * 8, "\x1b[2J"]
    records = {peer_id(0): progress(proven=hostile, without_duty=[*idle("<b>", 1), *idle("0", (1 << 62) - 1)])}
    state = Watched().look(records)
    assert (state.excluded, state.without_duty) == ((), ())
    many = {peer_id(n): progress(proven=[peer_id(1000 + 8 * n + i) for i in range(8)]) for n in range(30)}
    honest = {peer_id(n): progress(proven=[CULPRIT]) for n in range(30, 32)}
    shown = Watched().look(many | honest).excluded
    assert len(shown) == 64
    assert CULPRIT in [one.peer_id for one in shown]  # more name it
    kinds = {peer_id(n): progress(without_duty=idle(CULPRIT, 1, *(f"k{n}-{i}" for i in range(2)))) for n in range(9)}
    (one,) = Watched().look(kinds).without_duty
    assert len(one.kinds) == 8
    assert SwarmState.from_json(Watched().look(kinds).to_json()).without_duty == (one,)


# Proofs.


@pytest.fixture(scope="module")
def proof() -> bytes:
    data: bytes = hold_exchange(np.random.default_rng(0), lie=lambda mean_N: -mean_N)[1].wrong_result()
    return data


def seeker(fetch: Callable[[str, str], Awaitable[bytes]], folder: Path | None = None, **changes: Any) -> EvidenceSeeker:
    given: dict[str, Any] = {"run_id": RUN_ID, "excludes": lambda peer, number: True, **changes}
    return EvidenceSeeker(fetch=fetch, folder=folder, **given)


def asked(seeking: EvidenceSeeker, *rounds: dict[str, list[str]]) -> None:
    async def seek() -> None:
        for accusers in rounds:
            seeking.seek(accusers)
            await seeking.settled(60.0)

    asyncio.run(seek())


def test_a_proof_is_fetched_once_verified_and_saved(proof: bytes, tmp_path: Path) -> None:
    culprit, calls = open_proof(proof).culprit, list[tuple[str, str]]()

    async def fetch(peer: str, about: str) -> bytes:
        calls.append((peer, about))
        if peer == "silent":
            raise ConnectionError
        return b"nothing" if peer == "liar" else proof

    seeking = seeker(fetch, tmp_path)
    accusers = {culprit: ["silent", "liar", "honest", "honest too"], OTHER: ["silent"]}
    asked(seeking, accusers, accusers)
    assert calls == [("silent", culprit), ("liar", culprit), ("honest", culprit)]
    found = seeking.proven[culprit]
    assert list(seeking.proven) == [culprit]
    assert found.file is not None
    assert Path(found.file).read_bytes() == proof
    assert (found.round, found.part, found.why) == (7, 8, open_proof(proof).what)


def test_a_peer_that_had_no_proof_is_asked_again_after_ten_minutes(proof: bytes) -> None:
    culprit, calls, now = open_proof(proof).culprit, list[str](), 1000.0

    async def fetch(peer: str, culprit: str) -> bytes:
        calls.append(peer)
        raise ProtocolError("refused", "no")

    seeking = seeker(fetch, now=lambda: now)
    asked(seeking, {culprit: ["a"]}, {culprit: ["a"]})
    now += 599.0
    asked(seeking, {culprit: ["a"]})
    assert calls == ["a"]
    now += 2.0
    asked(seeking, {culprit: ["a"]})
    assert calls == ["a", "a"]


@pytest.mark.parametrize(
    ("culprit", "changes"),
    [(OTHER, {}), (None, {"run_id": "another"}), (None, {"excludes": lambda peer, number: number > 7})],
    ids=["about another peer", "about another run", "pardoned"],
)
def test_what_does_not_prove_it_is_not_taken(proof: bytes, culprit: str | None, changes: dict[str, Any]) -> None:
    async def fetch(peer: str, culprit: str) -> bytes:
        return proof

    seeking = seeker(fetch, **changes)
    asked(seeking, {culprit or open_proof(proof).culprit: ["a", "b"]})
    assert not seeking.proven


def test_a_pardon_and_the_end_of_a_claim_end_it_here(proof: bytes) -> None:
    culprit, pardoned = open_proof(proof).culprit, [0]

    async def fetch(peer: str, culprit: str) -> bytes:
        return proof

    seeking = seeker(fetch, excludes=lambda peer, number: number > pardoned[0])
    asked(seeking, {culprit: ["a"]})
    assert seeking.proven
    asked(seeking, {})
    assert not seeking.proven
    asked(seeking, {culprit: ["a"]})
    assert seeking.proven
    pardoned[0] = 7
    asked(seeking, {culprit: ["a"]})
    assert not seeking.proven


def test_one_is_fetched_at_a_time_and_sixteen_are_looked_for() -> None:
    under_way, most, culprits = 0, 0, list[str]()

    async def fetch(peer: str, culprit: str) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        culprits.append(culprit)
        return b""

    accusers = {peer_id(n): [f"accuser {n}"] for n in range(20)}
    asked(seeker(fetch), accusers, accusers)
    assert most == 1
    assert culprits == [peer_id(n) for n in range(16)]


def test_a_peer_that_sends_for_ever_is_given_up(proof: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence_module, "_FETCH_S", 0.0)

    async def fetch(peer: str, culprit: str) -> bytes:
        await asyncio.Event().wait()
        return proof

    seeking = seeker(fetch)
    asked(seeking, {open_proof(proof).culprit: ["a"]})
    assert not seeking.proven


def test_a_folder_that_cannot_be_written_loses_the_file_alone(proof: bytes, tmp_path: Path) -> None:
    async def fetch(peer: str, culprit: str) -> bytes:
        return proof

    (tmp_path / "file").touch()
    seeking = seeker(fetch, tmp_path / "file")
    asked(seeking, {open_proof(proof).culprit: ["a"]})
    assert [one.file for one in seeking.proven.values()] == [None]


# What people see.

EXCLUDED = Excluded(peer_id=CULPRIT, name="eve", by=5, of=7, since=START, verified=False)
PROVEN = replace(EXCLUDED, verified=True, round=7, part=2, why="the result differs", proof="dir/a.proof")
CLAIMED = replace(EXCLUDED, peer_id=OTHER, name="", by=1)
IDLE = WithoutDuty(peer_id=peer_id(0), name="[red]zoë", by=4, of=6, since=9, kinds=("late", "missing"))


def report(state: SwarmState) -> str:
    output = io.StringIO()
    print_faults(Console(file=output, width=120), state)
    return output.getvalue()


def test_nothing_to_report_is_one_line() -> None:
    assert report(swarm_state([peer_state(0)])) == (
        "test-0123456789abcdef01234567, round 12, 1 peer: nobody is excluded or without duty\n"
    )


def test_the_report_is_a_table_with_the_file_of_each_proof() -> None:
    lines = report(swarm_state([peer_state(0)], excluded=(PROVEN, CLAIMED), without_duty=(IDLE,))).splitlines()
    assert lines[1].split() == ["peer", "is", "since", "named", "by", "why"]
    rows = [" ".join(line.split()) for line in lines[2:]]
    assert rows[0].startswith(f"eve ({CULPRIT[-8:]}) excluded 20")
    assert rows[0].endswith("5 of 7 lied in round 7, part 2: the result differs")
    assert rows[1].startswith(f"- ({OTHER[-8:]}) claimed 20")
    assert rows[1].endswith("1 of 7 no proof verified")
    assert rows[2] == f"[red]zoë ({peer_id(0)[-8:]}) without duty round 9 4 of 6 late, missing"
    assert rows[3:] == [f"{CULPRIT}: dir/a.proof", f"{OTHER}: not verified: this monitor has got no proof"]


def test_the_report_says_how_to_get_the_proofs() -> None:
    unsaved = swarm_state([peer_state(0)], excluded=(replace(PROVEN, proof=None),))
    assert report(unsaved).splitlines()[-1] == (
        "to get the proofs, give --proofs DIR, or look into OUTPUT_DIR/proofs of a member"
    )
    private = replace(unsaved, excluded=(EXCLUDED,), run=replace(unsaved.run, admission="invite"))
    assert f"eve ({CULPRIT[-8:]}) unproven 20" in " ".join(report(private).split())
    assert "give --invitation" in report(private).splitlines()[-1]
    assert "give --invitation" not in report(replace(private, excluded=(PROVEN,)))


def test_the_report_as_json_has_the_fields_of_the_state() -> None:
    state = swarm_state([peer_state(0)], excluded=(PROVEN,), without_duty=(IDLE,))
    shown, whole = json.loads(faults_text(state)), state.to_json()
    assert shown["run_id"] == whole["run"]["run_id"]
    for name in ("excluded", "without_duty", "round", "time", "schema"):
        assert shown[name] == whole[name]


def test_a_state_of_an_older_version_has_nothing_to_say() -> None:
    stored = swarm_state([peer_state(0)], excluded=(PROVEN,)).to_json()
    del stored["excluded"], stored["without_duty"]
    assert SwarmState.from_json(stored).excluded == ()


def test_the_screen_has_a_line_for_each_of_the_first_five_and_none_without_any() -> None:
    def printed(state: SwarmState) -> str:
        output = io.StringIO()
        print_once(Console(file=output, width=160), state, [])
        return output.getvalue()

    assert "xcluded" not in printed(swarm_state([peer_state(0)]))
    many = tuple(replace(CLAIMED, peer_id=peer_id(200 + n)) for n in range(6))
    shown = printed(swarm_state([peer_state(0)], excluded=(PROVEN, *many), without_duty=(IDLE,)))
    assert "excluded: eve, named by 5 of 7, lied in round 7, part 2: the result differs" in shown
    assert shown.count("claimed by 1 of 7: ") == 4
    assert "and 3 more: --faults lists all" in shown


def test_each_is_told_once_without_a_terminal() -> None:
    before = swarm_state([peer_state(0)])
    state = replace(before, excluded=(PROVEN, CLAIMED), without_duty=(IDLE,))
    assert changes(before, state, [], 0) == [
        "excluded: eve, named by 5 of 7, lied in round 7, part 2: the result differs",
        f"claimed by 1 of 7: {OTHER[-8:]} is excluded",
        "without duty: [red]zoë since round 9, say 4 of 6 (late, missing)",
    ]
    assert changes(state, replace(state, excluded=(replace(PROVEN, by=6), CLAIMED)), [], 0) == []
