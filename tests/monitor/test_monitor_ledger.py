"""From records to what is shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.monitor import ledger as ledger_module
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.ledger import Ledger
from spes_swarm.monitor.state import SwarmState, to_text
from spes_swarm.protocol.members.records import FaultNote, Progress
from tests.helpers.monitoring import DIGEST, RUN, START, TTL_S, Watched, figures, lease, peer_id, progress, report

A, B, C, D = (peer_id(n) for n in range(4))
OTHER = b"\x02" * 32


def states(state: SwarmState) -> dict[str, str]:
    return {peer.peer_id: peer.state for peer in state.peers}


# Who is there.


def test_nobody_yet_is_said_honestly() -> None:
    state = Watched().look()
    assert (state.status, state.peers, state.silent_s, state.next_round_s) == ("no_peers", (), None, None)
    assert state.consensus.digest is None


def test_a_peer_appears_and_what_it_tells_is_shown() -> None:
    state = Watched().look({A: progress(START - 2)})
    (peer,) = state.peers
    assert (peer.peer_id, peer.name, peer.state, peer.experts) == (A, "laptop", "training", (0, 3))
    assert (peer.bytes_sent, peer.bytes_received, peer.age_s) == (1000, 2000, 2.0)
    assert (state.status, state.round, state.tokens_total) == ("live", 3, 5120)
    assert (state.train_loss, state.eval_loss) == (5.5, 5.75)


def test_a_peer_that_does_not_renew_its_record_is_late_and_then_gone() -> None:
    watched = Watched()
    watched.look({A: progress(), B: progress()})
    watched.wait(10)
    watched.look({A: progress(), B: progress(START + 10)})
    watched.wait(6)
    assert states(watched.look({A: progress(), B: progress(START + 16)})) == {A: "late", B: "training"}
    watched.wait(15)
    assert states(watched.look({A: progress(), B: progress(START + 30)})) == {B: "training"}


def test_a_record_that_is_missing_once_is_not_gone() -> None:
    watched = Watched()
    watched.look({A: progress()})
    watched.wait(4)
    assert states(watched.look()) == {A: "training"}


def test_all_leave_and_the_monitor_says_since_when_and_sees_them_come_back() -> None:
    watched = Watched()
    before = watched.look({A: progress(), B: progress()})
    watched.wait(45)
    alone = watched.look()
    assert (alone.status, alone.peers, alone.silent_s) == ("no_peers", (), 45.0)
    assert (alone.round, alone.tokens_total, alone.train_loss) == (before.round, before.tokens_total, 5.5)
    watched.wait(5)
    assert states(watched.look({A: progress(watched.now, round=4)})) == {A: "training"}


def test_a_goodbye_is_shown_until_the_record_runs_out_but_not_counted() -> None:
    watched = Watched()
    watched.look({A: progress(), B: progress()})
    watched.wait(1)
    leaving = watched.look({A: progress(watched.now, state="leaving"), B: progress(watched.now)})
    assert (states(leaving), leaving.num_peers) == ({A: "leaving", B: "training"}, 2)
    left = watched.look({A: progress(watched.now + 1, state="leaving", experts=[]), B: progress(watched.now + 1)})
    assert (states(left), left.num_peers, left.status) == ({A: "left", B: "training"}, 1, "live")
    assert watched.ledger.live_peers() == {B: True}
    watched.wait(25)
    left = watched.look({B: progress(watched.now)})
    assert (states(left), left.num_peers) == ({A: "left", B: "training"}, 1)
    watched.wait(6)
    assert states(watched.look()) == {B: "training"}


def test_when_all_have_left_nobody_is_present() -> None:
    watched = Watched()
    watched.look({A: progress()})
    watched.wait(1)
    state = watched.look({A: progress(watched.now, state="leaving", experts=[])})
    assert (state.status, states(state), state.num_peers) == ("no_peers", {A: "left"}, 0)
    watched.wait(20)
    assert watched.look().silent_s == 20.0


def test_a_peer_that_said_that_it_leaves_and_falls_silent_has_left() -> None:
    """Its last record of all may have reached no node that is still there."""
    watched = Watched()
    watched.look({A: progress(state="leaving"), B: progress()})
    watched.wait(16)
    assert states(watched.look({B: progress(watched.now)}))[A] == "left"


def test_an_old_record_that_is_repeated_brings_nobody_back() -> None:
    watched = Watched()
    old = progress(expires=START + 23 * 3600)  # its writer gave it a long life
    watched.look({A: old})
    watched.wait(TTL_S + 1)
    assert watched.look({A: old}).status == "no_peers"
    watched.wait(100)
    assert watched.look({A: old}).status == "no_peers"
    assert watched.look({A: progress()}).status == "no_peers"


def test_a_newer_record_is_not_replaced_by_an_older_one() -> None:
    watched = Watched()
    watched.look({A: progress(START, round=4)})
    assert watched.look({A: progress(START - 1, round=3)}).peers[0].round == 4


def test_the_age_of_a_record_does_not_depend_on_its_writers_clock() -> None:
    watched = Watched()
    watched.look({A: progress(START + 600), B: progress(START - 20)})
    watched.wait(3)
    ages = {peer.peer_id: peer.age_s for peer in watched.state().peers}
    assert ages == {A: 3.0, B: 23.0}
    # A version that was not there at the last look cannot be older than that look.
    watched.look({A: progress(START + 603), B: progress(START - 19)})
    ages = {peer.peer_id: peer.age_s for peer in watched.state().peers}
    assert ages == {A: 0.0, B: 3.0}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"state": "joining"}, "joining"),
        ({"state": "waiting"}, "waiting"),
        ({"state": "syncing"}, "syncing"),
        ({"in_round": True}, "syncing"),
        ({"round": 2}, "training"),
        ({"round": 1}, "late"),
    ],
)
def test_what_a_peer_is_doing(changes: dict[str, Any], shown: str) -> None:
    state = Watched().look({A: progress(), B: progress(), C: progress(**changes)})
    assert states(state)[C] == shown


# The round.


@pytest.mark.parametrize(
    ("rounds", "shown"), [([3], 3), ([3, 4], 4), ([4, 4], 4), ([3, 3, 4], 3), ([3, 3, 4, 4], 4), ([4, 4, 4, 9**9], 4)]
)
def test_the_round_is_the_one_that_half_have_committed(rounds: list[int], shown: int) -> None:
    state = Watched().look({peer_id(n): progress(round=number) for n, number in enumerate(rounds)})
    assert state.round == shown


def test_steps_and_the_next_round_follow_the_schedule_of_inner_steps() -> None:
    """Two rounds of 10 steps, then rounds of 40: round 3 ends with step 60."""
    watched = Watched(Ledger(replace(RUN, inner_steps_later=((20, 40),)), TTL_S))
    state = watched.look({A: progress(tokens=1280), B: progress(tokens=1280)})
    assert (state.round, state.steps, state.inner_steps) == (3, 60, 40)
    assert state.round_progress == 0.25  # 20 of 80 steps


def test_the_next_round_is_reckoned_from_tokens_and_speed() -> None:
    watched = Watched()
    # 2 peers of 128 tokens a step: a round is 10 * 256 tokens.
    records = {A: progress(tokens=640), B: progress(tokens=640, tokens_per_second=156.0)}
    state = watched.look(records)
    assert state.round_progress == 0.5
    assert state.next_round_s == pytest.approx(1280 / 256)
    watched.wait(2)
    assert watched.state().next_round_s == pytest.approx(1280 / 256 - 2)
    watched.wait(10)
    assert (watched.state().next_round_s, watched.state().round_progress) == (0.0, 1.0)


def test_during_a_round_there_is_nothing_left_to_do() -> None:
    state = Watched().look({A: progress(in_round=True), B: progress(in_round=True), C: progress()})
    assert (state.next_round_s, state.round_progress) == (0.0, 1.0)


def test_a_peer_without_speed_gives_no_time() -> None:
    assert Watched().look({A: progress(tokens_per_second=0.0, tokens=0)}).next_round_s is None


def test_a_speed_of_next_to_nothing_gives_a_time_that_json_can_hold() -> None:
    state = Watched().look({A: progress(tokens_per_second=5e-324, tokens=0)})
    assert state.next_round_s is not None
    assert math.isfinite(state.next_round_s)


# Who agrees.


def test_the_digest_of_most_is_the_consensus_and_the_others_are_named() -> None:
    state = Watched().look({A: progress(), B: progress(), C: progress(digest=OTHER)})
    assert state.consensus.digest == DIGEST.hex()
    assert (state.consensus.agree, state.consensus.differ) == (2, (C,))
    assert {peer.peer_id: peer.agrees for peer in state.peers} == {A: True, B: True, C: False}


def test_peers_are_compared_with_those_of_their_own_round() -> None:
    """While a round is being committed, some are already in the next."""
    state = Watched().look({A: progress(round=4, digest=OTHER), B: progress(), C: progress()})
    assert state.consensus.differ == ()
    assert (state.round, state.consensus.agree) == (3, 2)


def test_who_is_joining_has_nothing_to_agree_with() -> None:
    joining = progress(state="joining", round=0, digest=OTHER)
    fetching = progress(state="syncing", round=3, digest=OTHER)
    state = Watched().look({A: progress(), B: progress(), C: joining, D: fetching})
    assert (state.consensus.agree, state.consensus.differ) == (2, ())


def test_lies_about_a_far_round_do_not_move_the_consensus() -> None:
    liars = {peer_id(10 + n): progress(round=10**9 + n, digest=OTHER) for n in range(2)}
    watched = Watched()
    state = watched.look({A: progress(), B: progress(), C: progress(), **liars})
    assert (state.round, state.consensus.digest, state.consensus.agree) == (3, DIGEST.hex(), 3)
    assert [point.round for point in watched.ledger.points()] == [3]


# Experts.


def test_coverage_counts_those_who_are_there() -> None:
    watched = Watched()
    leases = {A: lease(START + 120, [0, 3]), B: lease(START + 120, [3, 4])}
    state = watched.look({A: progress(), B: progress(experts=[3, 4])}, leases)
    assert [len(expert.holders) for expert in state.experts] == [1, 0, 0, 2, 1, 0, 0, 0]
    assert state.experts_covered == 3
    assert [expert.age_rounds for expert in state.experts] == [0, None, None, 0, 0, None, None, None]
    for step in range(1, 6):
        watched.wait(6)
        state = watched.look({A: progress(watched.now, round=3 + step)})
    assert states(state) == {A: "training"}
    assert [len(expert.holders) for expert in state.experts] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert state.experts[4].reserved == (B,)  # its lease has not run out: nobody takes the expert over yet
    assert (state.experts[4].age_rounds, state.experts[3].age_rounds) == (5, 0)
    watched.wait(95)
    assert watched.look().experts[4].reserved == ()


def test_experts_that_the_model_does_not_have_are_left_out() -> None:
    state = Watched().look({A: progress(experts=[0, 8, 4095])})
    assert state.peers[0].experts == (0,)
    assert len(state.experts) == RUN.num_experts


# History.


def test_a_round_is_a_point_once_the_peers_that_are_there_have_reported_it() -> None:
    watched = Watched()
    assert watched.look({A: progress(train_loss=None, eval_loss=None, bytes_sent=0), B: progress(round=2)}).round == 3
    assert watched.ledger.points() == []
    watched.wait(1)
    watched.look({B: progress(watched.now, train_loss=5.0, eval_loss=None, bytes_sent=500)})
    assert watched.ledger.points() == []
    watched.wait(1)
    watched.look({A: progress(watched.now, train_loss=6.0, eval_loss=7.0, bytes_sent=700, round_seconds=2.5)})
    (point,) = watched.ledger.points()
    assert (point.round, point.peers, point.train_loss, point.eval_loss) == (3, 2, 5.5, 7.0)
    assert (point.bytes, point.round_seconds, point.tokens, point.tokens_per_second) == (1200, 2.0, 10240, 200.0)
    assert (point.experts_covered, point.time) == (2, START)


def test_who_leaves_has_trained_its_experts_all_the_same() -> None:
    watched = Watched()
    watched.look({A: progress()})
    watched.wait(1)
    state = watched.look({A: progress(watched.now, state="leaving", experts=[])})
    assert (state.experts_covered, watched.ledger.points()[-1].experts_covered) == (0, 2)


def test_a_poorer_report_does_not_replace_a_round_seen_in_full() -> None:
    before = Watched()
    before.look({A: progress(), B: progress(), C: progress()})
    after = Watched(Ledger(RUN, TTL_S, Known(points=tuple(before.ledger.points()))))
    after.look({A: progress(START + 1)})
    assert after.ledger.points()[0].peers == 3


def test_losses_are_medians_so_one_peer_cannot_move_them() -> None:
    liar = progress(train_loss=1e300, eval_loss=0.0, tokens_per_second=1e308, total_tokens=(1 << 62) - 1)
    state = Watched().look({A: progress(), B: progress(), C: liar})
    assert (state.train_loss, state.eval_loss) == (5.5, 5.75)
    assert math.isfinite(state.tokens_per_second)
    json.loads(to_text(state))


def test_rounds_too_large_for_json_are_clamped() -> None:
    large = 1 << 53
    own = {"peers": 1, "swarm_tokens": 0}
    records = {A: progress(round=large + 90, train_loss=None, eval_loss=None)}
    rounds = {A: report(START, figures(large, eval_loss=4.0, **own), figures(large + 90, **own))}
    state = Watched().look(records, rounds=rounds)
    assert (state.round, state.loss_round, state.eval_round) == (large - 1, large - 1, large - 1)
    assert SwarmState.from_json(json.loads(to_text(state))) == state


def test_a_long_history_is_thinned_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_POINTS", 100)
    watched = Watched()
    removed: set[int] = set()
    written: set[int] = set()
    for number in range(1, 301):
        watched.wait(1)
        watched.look({A: progress(watched.now, round=number)})
        changed, gone = watched.ledger.take_changes()
        written |= {point.round for point in changed}
        removed |= set(gone)
    kept = [point.round for point in watched.ledger.points()]
    assert len(kept) <= 100
    assert kept[-40:] == list(range(261, 301))
    assert written - removed == set(kept)


def test_tokens_of_those_who_are_gone_still_count() -> None:
    watched = Watched()
    watched.look({A: progress(total_tokens=1000), B: progress(total_tokens=500)})
    watched.wait(40)
    assert watched.look({B: progress(watched.now, total_tokens=400)}).tokens_total == 1500


def test_the_next_monitor_goes_on_where_this_one_ended() -> None:
    first = Watched()
    note = FaultNote(at=START - 5, kind="round")
    before = first.look({A: progress(faults=[note]), B: progress(total_tokens=100)})
    known = first.ledger.summary()
    second = Watched(Ledger(RUN, TTL_S, Known(**{**vars(known), "points": tuple(first.ledger.points())})))
    second.wait(100)
    after = second.look()
    assert (after.status, after.round, after.silent_s) == ("no_peers", 3, 100.0)
    for name in ("tokens_total", "train_loss", "eval_loss", "faults"):
        assert getattr(after, name) == getattr(before, name)
    assert [expert.age_rounds for expert in after.experts] == [expert.age_rounds for expert in before.experts]
    assert second.ledger.points() == first.ledger.points()


# Faults.


def test_faults_are_told_once_in_order_and_never_from_the_future() -> None:
    watched = Watched()
    notes = [FaultNote(at=START - 60, kind="round"), FaultNote(at=START + 999, kind="stall")]
    watched.look({A: progress(faults=notes)})
    watched.wait(1)
    state = watched.look({A: progress(watched.now, faults=notes[:1]), B: progress(faults=[])})
    assert [(fault.time - START, fault.kind, fault.peer_id) for fault in state.faults] == [
        (-60.0, "round", A),
        (0.0, "stall", A),
    ]
    old = FaultNote(at=START - 3 * 24 * 3600, kind="dht")
    watched.wait(1)
    assert len(watched.look({B: progress(watched.now, faults=[old])}).faults) == 2


def test_endless_faults_do_not_fill_the_memory() -> None:
    watched = Watched()
    for number in range(400):
        watched.wait(1)
        state = watched.look({A: progress(watched.now, faults=[FaultNote(at=START + number, kind="round")])})
    assert len(state.faults) == 50
    assert len(watched.ledger._faults) <= 101


# The health of the routers.

FAIR = b"\x20" * 8  # every expert has its fair share
STARVED = b"\x20" * 5 + b"\0" + b"\x20" * 2
ALARM: dict[str, Any] = {"dead": [2 * 8 + 5], "dead_experts": 1, "expert_loads": STARVED}  # expert 5 of layer 2
HEALTHY: dict[str, Any] = {"dead_experts": 0, "expert_loads": FAIR}


def routing(*reports: dict[str, Any]) -> SwarmState:
    return Watched().look({peer_id(number): progress(**report) for number, report in enumerate(reports)})


def dead(state: SwarmState) -> dict[int, tuple[int, ...]]:
    return {expert.expert: expert.dead_layers for expert in state.experts if expert.dead_layers}


def test_loads_are_medians_and_dead_experts_those_of_most_peers() -> None:
    state = routing({**HEALTHY, "held_share": 0.25}, {**ALARM, "held_share": 0.5}, {**ALARM, "held_share": 0.5})
    assert [expert.load for expert in state.experts] == [1.0] * 5 + [0.0] + [1.0] * 2
    assert dead(state) == {5: (2,)}
    assert (state.dead_experts, state.held_share) == (1, 0.5)


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_one_liar_can_neither_raise_the_alarm_nor_hide_it(honest: int) -> None:
    lie = {"dead": list(range(32)), "dead_experts": 65_536, "expert_loads": b"\0" * 8}
    state = routing(*[HEALTHY] * honest, lie)
    assert dead(state) == {}
    assert state.dead_experts == 0
    assert honest == 1 or {expert.load for expert in state.experts} == {1.0}
    if honest > 1:
        assert dead(routing(*[ALARM] * honest, HEALTHY)) == {5: (2,)}


def test_what_is_reported_of_another_model_or_not_at_all_does_not_count() -> None:
    silent = {"dead_experts": None}
    state = routing(ALARM, silent, silent, silent)
    assert dead(state) == {5: (2,)}
    assert [expert.load for expert in state.experts][5] == 0.0
    assert {expert.load for expert in routing(silent, {"expert_loads": b"\x20" * 9}).experts} == {None}
    assert dead(routing({**ALARM, "state": "joining"}, silent)) == {}


def test_the_routers_health_stays_while_the_next_round_has_no_figures_yet() -> None:
    watched = Watched()
    watched.look({A: progress(load_entropy=0.75, **ALARM)})
    watched.wait(1.0)
    state = watched.look({A: progress(watched.now, round=4, train_loss=None, **ALARM)})
    assert (state.load_entropy, state.dead_experts) == (0.75, 1)
    assert dead(state) == {5: (2,)}


# Whatever is signed.


@st.composite
def any_progress(draw: st.DrawFn) -> Progress:
    amount = st.one_of(st.integers(0, 20), st.integers(0, (1 << 62) - 1))
    figure = st.one_of(st.floats(0, 1e6), st.floats(0, allow_infinity=False, allow_nan=False))
    return progress(
        START + draw(st.floats(-40, 4000)),
        name=draw(st.text(max_size=40)),
        state=draw(st.sampled_from(["joining", "waiting", "syncing", "training", "leaving"])),
        reachable=draw(st.booleans()),
        round=draw(amount),
        digest=draw(st.sampled_from([DIGEST, OTHER])),
        step=draw(amount),
        tokens=draw(amount),
        tokens_per_step=draw(amount),
        tokens_per_second=draw(figure),
        loss=draw(st.none() | figure),
        train_loss=draw(st.none() | figure),
        eval_loss=draw(st.none() | figure),
        experts=sorted(draw(st.sets(st.integers(0, 4095), max_size=9))),
        round_seconds=draw(figure),
        bytes_sent=draw(amount),
        bytes_received=draw(amount),
        total_tokens=draw(amount),
        in_round=draw(st.booleans()),
        faults=[FaultNote(at=draw(st.floats(1, 1e300)), kind="round")],
        load_entropy=draw(st.none() | st.floats(0, 1)),
        least_load=draw(st.none() | figure),
        dead_experts=draw(st.none() | st.integers(0, 65_536)),
        expert_loads=draw(st.sampled_from([b"", b"\x20" * 8, b"\xff" * 256])),
        dead=sorted(draw(st.sets(st.sampled_from([0, 8, 65_535])))),
    )


@pytest.mark.slow
@given(st.lists(st.dictionaries(st.sampled_from([A, B, C, D]), any_progress()), max_size=4), st.floats(0, 40))
def test_whatever_is_signed_gives_a_state_that_json_can_hold(looks: list[dict[str, Progress]], pause_s: float) -> None:
    watched = Watched()
    for records in looks:
        state = watched.look(records)
        assert SwarmState.from_json(json.loads(to_text(state))) == state
        assert 0 <= state.round_progress <= 1
        for point in watched.ledger.points():
            json.dumps(point.to_json(), allow_nan=False)
            assert point.tokens < 1 << 53
            assert point.bytes < 1 << 53
        watched.wait(pause_s)


def test_a_loss_keeps_its_own_error_over_rounds_that_are_not_evaluated() -> None:
    """An evaluation every few rounds: what is shown is the last one, never one loss with another's error."""
    watched = Watched()
    evaluated = {A: figures(3, eval_loss=4.0, eval_loss_stderr=0.5), B: figures(3, eval_loss=4.2, eval_loss_stderr=0.7)}
    watched.look({A: progress(), B: progress()}, rounds={peer: report(START, own) for peer, own in evaluated.items()})
    watched.wait(1.0)
    later = progress(watched.now, round=4)
    rounds = {peer: report(watched.now, own, figures(4)) for peer, own in evaluated.items()}
    state = watched.look({A: later, B: later}, rounds=rounds)
    assert state.eval_loss == pytest.approx(4.1)
    assert state.eval_loss_stderr == pytest.approx(0.6)
    assert {(peer.eval_loss, peer.eval_loss_stderr) for peer in state.peers} == {(4.0, 0.5), (4.2, 0.7)}
    third, fourth = watched.ledger.points()
    assert third.eval_loss_stderr == pytest.approx(0.6)
    assert (fourth.eval_loss, fourth.eval_loss_stderr) == (None, None)
    watched.wait(1.0)
    state = watched.look({A: progress(watched.now, round=5, eval_loss=3.0, eval_loss_stderr=None)})
    assert next(peer for peer in state.peers if peer.peer_id == A).eval_loss_stderr is None
