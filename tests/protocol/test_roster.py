"""Who is there, as one peer sees it; the clock is the test's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.protocol.members import roster as roster_module
from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.members.reputation import GRACE_SHARE, Reputation
from spes_swarm.protocol.members.roster import Roster
from spes_swarm.protocol.members.routing_report import dead_by_majority
from tests.helpers.records import progress


class Clock:
    """Local monotonic time, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(roster_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def acquainted() -> Roster:
    """A roster whose peer has committed a round with everybody that these tests name."""
    reputation = Reputation()
    reputation.committed(900.0, ["a", "b", "c", "late", *(f"p{i}" for i in range(6))], [])
    return Roster("me", reputation=reputation, committed_at=1000.0)


def names(views: list[roster_module.PeerView]) -> set[str]:
    return {view.peer_id for view in views}


def test_new_peers_are_named_once() -> None:
    roster = acquainted()
    assert sorted(roster.update({"a": progress(), "b": progress()})) == ["a", "b"]
    assert roster.update({"a": progress(2.0), "c": progress()}) == ["c"]
    assert names(roster.present()) == {"a", "c"}
    assert roster.update({"a": progress(3.0), "b": progress()}) == ["b"]  # it had been gone


def test_this_peer_is_not_among_the_others() -> None:
    roster = acquainted()
    assert roster.update({"me": progress(), "a": progress()}) == ["a"]
    assert names(roster.present()) == {"a"}


@pytest.mark.parametrize("state", ["joining", "waiting", "syncing", "leaving"])
def test_only_who_trains_takes_part_in_rounds(state: str) -> None:
    roster = acquainted()
    roster.update({"a": progress(), "b": progress(state=state)})
    assert names(roster.present()) == {"a", "b"}
    assert names(roster.training()) == {"a"}
    assert roster.tokens_per_step(100) == 128


def test_a_peer_that_did_not_answer_is_back_with_its_next_record() -> None:
    roster = acquainted()
    roster.update({"a": progress(1.0), "b": progress(1.0)})
    roster.lose("a")
    assert names(roster.present()) == names(roster.training()) == {"b"}
    roster.update({"a": progress(1.0), "b": progress(2.0)})  # the DHT still has the old record
    assert names(roster.present()) == {"b"}
    roster.update({"a": progress(1.5), "b": progress(2.0)})
    assert names(roster.present()) == {"a", "b"}


def test_who_has_just_committed_is_live_without_a_record_for_a_while(clock: Clock) -> None:
    roster = acquainted()
    roster.update({"a": progress(), "b": progress()})
    roster.vouch(["me", "a"], for_s=10.0)
    clock.now += 9.0
    assert roster.update({}) == []
    assert names(roster.training()) == {"a"}
    clock.now += 2.0
    roster.update({})
    assert names(roster.present()) == set()


def test_who_has_just_committed_is_live_although_its_record_ended_meanwhile(clock: Clock) -> None:
    """A cut delays the record that would replace the one that ends during the round."""
    roster = acquainted()
    roster.update({"a": progress(), "b": progress(), "c": progress(state="leaving")})
    roster.update({})
    roster.vouch(["a", "c"], for_s=10.0)
    assert names(roster.present()) == {"a"}  # not who has said goodbye
    clock.now += 9.0
    assert roster.update({}) == []
    assert names(roster.training()) == {"a"}
    clock.now += 2.0
    roster.update({})
    assert names(roster.present()) == set()
    assert roster.update({"a": progress()}) == ["a"]


def test_who_was_lost_and_then_commits_is_live_again() -> None:
    roster = acquainted()
    roster.update({"a": progress()})
    roster.lose("a")
    roster.vouch(["a"], for_s=10.0)
    assert names(roster.training()) == {"a"}


def test_vouching_ends_when_the_peer_does_not_come_or_says_that_it_leaves() -> None:
    roster = acquainted()
    roster.update({"a": progress(), "b": progress()})
    roster.vouch(["a", "b"], for_s=10.0)
    roster.lose("a")
    roster.update({"b": progress(2.0, state="leaving")})
    roster.update({})
    assert names(roster.present()) == set()


def test_losing_a_stranger_changes_nothing() -> None:
    roster = acquainted()
    roster.lose("a")
    roster.update({"a": progress()})
    assert names(roster.present()) == {"a"}


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        (4, [], 4),
        (4, [7], 7),  # of two, the larger: who is behind must follow
        (7, [4], 7),
        (4, [4, 900], 4),  # one claim does not move the swarm
        (3, [5, 5], 5),
        (3, [4, 5, 900], 5),
        (9, [3, 3, 3, 3], 9),  # one's own commits are facts
    ],
)
def test_the_swarms_round_is_the_upper_median(own: int, others: list[int], expected: int) -> None:
    roster = acquainted()
    roster.update({f"p{i}": progress(round=r) for i, r in enumerate(others)})
    assert roster.swarm_round(own) == expected


def test_the_round_of_a_peer_that_only_watches_does_not_count() -> None:
    roster = acquainted()
    roster.update({"a": progress(round=50, state="joining")})
    assert roster.swarm_round(3) == 3


# The estimate of the others' tokens. Rate 10 tokens a second, horizon 30 s.


@pytest.fixture
def estimate() -> Callable[[Roster], float]:
    return lambda roster: roster.tokens_since_commit(own_round=3, horizon_s=30.0)


def test_a_count_is_carried_forward_at_its_own_rate(clock: Clock, estimate: Callable[[Roster], float]) -> None:
    roster = acquainted()
    clock.now += 5
    roster.update({"a": progress(tokens=400), "b": progress(tokens=100, tokens_per_second=1.0)})
    assert estimate(roster) == 500
    clock.now += 2
    assert estimate(roster) == 500 + 2 * 10 + 2 * 1


def test_reading_the_same_record_again_does_not_make_it_younger(
    clock: Clock, estimate: Callable[[Roster], float]
) -> None:
    roster = acquainted()
    roster.update({"a": progress(1.0, tokens=400)})
    clock.now += 7
    roster.update({"a": progress(1.0, tokens=400)})
    assert estimate(roster) == 470
    roster.update({"a": progress(2.0, tokens=450)})
    assert estimate(roster) == 450


def test_a_silent_peer_is_not_believed_to_work_for_ever(clock: Clock, estimate: Callable[[Roster], float]) -> None:
    roster = acquainted()
    roster.update({"a": progress(tokens=400)})
    clock.now += 1000
    assert estimate(roster) == 400 + 30 * 10


def test_after_a_commit_everybodys_count_begins_again(clock: Clock, estimate: Callable[[Roster], float]) -> None:
    roster = acquainted()
    roster.update({"a": progress(1.0, tokens=400)})
    clock.now += 3
    roster.committed()
    assert estimate(roster) == 0
    clock.now += 4
    assert estimate(roster) == 40  # what it has probably done since
    roster.update({"a": progress(2.0, tokens=55)})
    assert estimate(roster) == 55


def test_a_count_from_before_the_last_commit_is_not_taken_for_one_after_it(
    clock: Clock, estimate: Callable[[Roster], float]
) -> None:
    roster = acquainted()
    clock.now += 6
    roster.update({"late": progress(1.0, round=2, tokens=10_000)})  # it has not committed our round yet
    assert estimate(roster) == 60


def test_only_tokens_of_peers_in_training_count(estimate: Callable[[Roster], float]) -> None:
    roster = acquainted()
    roster.update({"a": progress(tokens=400), "b": progress(tokens=900, state="leaving")})
    assert estimate(roster) == 400
    roster.lose("a")
    assert estimate(roster) == 0


# Records alone.


def a_crowd_of_ghosts(**claims: Any) -> dict[str, Progress]:
    return {f"ghost{i}": progress(**claims) for i in range(50)}


@pytest.mark.parametrize("answering", [False, True])
@pytest.mark.parametrize(
    "claims",
    [{"round": 2**60}, {"round": 0}, {"tokens_per_step": 2**50}, {"tokens_per_second": 1e300}, {"data": [2**60]}],
)
def test_who_has_never_taken_part_moves_nothing(claims: dict[str, Any], answering: bool) -> None:
    honest = {"a": progress(tokens=640), "b": progress(tokens=640, round=4)}
    undisturbed, roster = acquainted(), acquainted()
    undisturbed.update(honest)
    roster.update({**honest, **a_crowd_of_ghosts(**claims)})
    if answering:
        for i in range(50):
            roster.reputation.note_answer(f"ghost{i}")
    questions: list[Callable[[Roster], Any]] = [
        lambda r: r.swarm_round(3),
        lambda r: r.median_round(3),
        lambda r: r.largest_step(128),
        lambda r: r.tokens_per_step(128),
        lambda r: r.tokens_since_commit(3, 30.0),
        lambda r: r.swarm_tokens(4),
        lambda r: r.data_positions(),
        lambda r: r.dead_votes(),
    ]
    for ask in questions:
        assert ask(roster) == ask(undisturbed)


def test_rounds_meet_ghosts_only_when_these_answer() -> None:
    roster = acquainted()
    roster.update({"a": progress(), **a_crowd_of_ghosts()})
    assert [n.peer_id for n in roster.neighbours(10.0)] == ["a"]
    roster.reputation.note_answer("ghost7")
    by_id = {n.peer_id: n for n in roster.neighbours(10.0)}
    assert by_id.keys() == {"a", "ghost7"}
    assert by_id["a"].in_electorate
    assert not by_id["ghost7"].in_electorate


def test_a_newcomer_goes_by_the_peers_that_it_was_told_to_join() -> None:
    roster = Roster("me", reputation=Reputation(["told"]), committed_at=1000.0)
    roster.reputation.follow()
    roster.update({"told": progress(round=7), **a_crowd_of_ghosts(round=900)})
    for i in range(50):
        roster.reputation.note_answer(f"ghost{i}")
    assert roster.swarm_round(0) == 7
    assert roster.defers
    assert [n.peer_id for n in roster.neighbours(10.0) if n.in_electorate] == ["told"]


def test_a_record_that_is_not_renewed_is_stale_however_long_it_claims_to_live(clock: Clock) -> None:
    roster = Roster("me", progress_ttl_s=10.0, committed_at=1000.0)
    for _ in range(4):
        roster.update({"a": progress(1e6), "b": progress(clock.now)})
        clock.now += 6.0
    assert names(roster.present()) == {"b"}


def test_a_round_that_was_answered_counts_until_the_records_say_it_too(clock: Clock) -> None:
    roster = acquainted()
    roster.update({"a": progress(round=5), "b": progress(round=5), "c": progress(round=5)})
    for peer_id in ("a", "b"):
        roster.hear_round(peer_id, 7)
    assert roster.swarm_round(5) == 7
    roster.update({"a": progress(2.0, round=5), "b": progress(2.0, round=6), "c": progress(2.0, round=5)})
    assert roster.swarm_round(5) == 7  # these were written before the answers
    clock.now += 60.0
    roster.update({"a": progress(3.0, round=5), "b": progress(3.0, round=5), "c": progress(3.0, round=5)})
    assert roster.swarm_round(5) == 5  # whatever it was, the records are newer now


def test_the_answer_of_one_peer_does_not_move_the_swarm() -> None:
    roster = acquainted()
    roster.update({"a": progress(round=5), "b": progress(round=5), "c": progress(round=5)})
    roster.hear_round("a", 1 << 40)
    assert roster.swarm_round(5) == 5


def test_before_the_first_commit_of_all_the_swarm_is_at_round_zero() -> None:
    roster = acquainted()
    roster.update({"a": progress(round=0), "b": progress(round=0)})
    assert roster.swarm_round(0) == 0


def test_who_was_in_a_round_is_a_member_and_this_peer_is_not(clock: Clock) -> None:
    roster = Roster("me")
    roster.update({"a": progress(), "b": progress()})
    clock.now = 2000.0
    roster.committed(["me", "a"])  # all others were there
    assert [roster.reputation.is_member(peer) for peer in ("a", "b", "me")] == [True, False, False]
    assert roster.reputation.clock_electorate(["a"], 2000.0) == {"a"}
    roster.committed()  # a reference was fetched: no round was held
    assert roster.reputation.wait_times(["a"], 10.0) == {"a": 10.0}
    for _ in range(2):
        roster.committed(["me"], ["a", "me"])  # nobody came
    assert roster.reputation.wait_times(["a"], 10.0)["a"] < 10.0


def test_a_round_knows_of_each_neighbour_how_to_meet_it(clock: Clock) -> None:
    roster = Roster("me")
    roster.update({"open": progress(), "client": progress(reachable=False)})
    for _ in range(3):
        roster.committed(["open", "client"])
        clock.now += 5.0
    for _ in range(2):
        roster.committed(["open"], ["client"])
        clock.now += 5.0
    by_id = {neighbour.peer_id: neighbour for neighbour in roster.neighbours(20.0)}
    assert by_id["open"].reachable
    assert not by_id["client"].reachable
    assert by_id["open"].wait_s == 20.0
    assert by_id["client"].wait_s == pytest.approx(GRACE_SHARE * 5.0)


def test_records_behind_which_nobody_answers_are_not_answering() -> None:
    roster = acquainted()
    roster.update({"a": progress(), "ghost": progress()})
    assert names(roster.answering()) == {"a"}


def test_of_the_many_that_are_gone_the_newest_are_remembered() -> None:
    roster = acquainted()
    crowd = {f"x{i:04}": progress() for i in range(1500)}
    roster.update(crowd)
    roster.update({})
    roster.update({"x1499": progress(2.0)})
    roster.vouch(list(crowd), for_s=10.0)
    back = names(roster.present())
    assert {"x1498", "x1499"} <= back
    assert "x0000" not in back
    assert len(back) <= 1025


def test_the_swarms_tokens_are_what_most_members_at_this_round_say() -> None:
    roster = acquainted()
    said = {"a": (5, 700), "b": (5, 700), "c": (5, 10**15), "late": (4, 600), "ghost": (5, 1)}
    roster.update({peer: progress(round=number, swarm_tokens=tokens) for peer, (number, tokens) in said.items()})
    assert roster.swarm_tokens(5) == 700
    assert roster.swarm_tokens(4) == 600
    assert roster.swarm_tokens(6) == 0
    roster.update({"a": progress(2.0, round=5, swarm_tokens=0), "b": progress(2.0, round=5, swarm_tokens=700)})
    assert roster.swarm_tokens(5) == 700  # who does not know yet does not say


def test_a_step_is_measured_by_those_that_say_how_long_theirs_are() -> None:
    roster = acquainted()
    assert roster.largest_step(0) == 64
    roster.update({"a": progress(tokens_per_step=0), "b": progress(tokens_per_step=0), "c": progress()})
    assert roster.largest_step(0) == 64 * 128
    roster.update({"a": progress(2.0, tokens_per_step=1), "b": progress(2.0)})
    assert roster.largest_step(1) == 64


def test_experts_that_members_call_dead_are_counted_by_member() -> None:
    roster = acquainted()
    silent, fine = progress(), progress(dead_experts=0)
    claims = {"a": progress(dead=[3, 9], dead_experts=2), "b": progress(dead=[9], dead_experts=1), "c": fine}
    roster.update({**claims, "late": silent, "stranger": progress(dead=[1], dead_experts=1)})
    assert roster.dead_votes() == ({3: 1, 9: 2}, 3)
    assert dead_by_majority(*roster.dead_votes()) == (9,)
    assert dead_by_majority({9: 2}, 4) == ()


def test_a_newcomer_begins_where_the_furthest_is_in_each_data_set() -> None:
    roster = acquainted()
    assert roster.data_positions() == ()
    roster.update({"a": progress(data=[7, 1 << 61]), "b": progress(data=[9, 3]), "c": progress()})
    assert roster.data_positions() == (9, 1 << 61)
    roster.update(
        {"a": progress(2.0, data=[7]), "b": progress(2.0, data=[9, 3]), "late": progress(2.0, state="leaving")}
    )
    assert roster.data_positions() == (9, 3)  # of those that divide as many data sets as any


def test_nobody_misses_a_peer_that_has_never_answered() -> None:
    roster = acquainted()
    roster.update({peer: progress() for peer in ("a", "b", "silent")})
    assert roster.absent({"a"}) == {"b"}
    roster.reputation.note_answer("silent")
    assert roster.absent({"a"}) == {"b", "silent"}


def test_who_may_not_take_part_is_not_present_even_if_others_have_just_worked_with_it() -> None:
    roster = Roster("me")
    records = {name: progress(expires=10.0) for name in ("friend", "revoked")}
    roster.update(records)
    roster.vouch(["friend", "revoked"], for_s=1000.0)
    assert [view.peer_id for view in roster.present()] == ["friend", "revoked"]
    roster.admits = lambda peer_id: peer_id != "revoked"
    assert [view.peer_id for view in roster.present()] == ["friend"]
    assert [view.peer_id for view in roster.training()] == ["friend"]
