"""What a peer remembers of the others when it is started again."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from spes_swarm.protocol.rounds.conduct import Delivery
from spes_swarm.protocol.rounds.track_record import RECENT_ROUNDS, TrackRecords
from spes_swarm.protocol.rounds.vouchers import may_reduce, newcomers, vouchers, without_duty

HONEST, HOSTILE = [f"honest{i}" for i in range(5)], ["hostile0", "hostile1"]
IDS = [*HONEST, *HOSTILE]
ROUNDS = 20


def restarted(tracks: TrackRecords, round_number: int) -> TrackRecords:
    again = TrackRecords()
    again.recall(copy.deepcopy(tracks.memory))
    again.resume_at(round_number)
    return again


def commit(
    tracks: TrackRecords, own: str, number: int, delivered: Sequence[str] = IDS, members: Sequence[str] = IDS
) -> None:
    """A commit with the work of some of its members."""
    others = [(peer, 1.0) for peer in members if peer != own]
    tracks.committed(number, others, (), delivered=[peer for peer in delivered if peer != own])


def history(rounds: int = ROUNDS) -> dict[str, TrackRecords]:
    """What honest peers know of each other and of the hostile ones after some rounds with everybody's work."""
    records = {peer: TrackRecords() for peer in HONEST}
    for number in range(1, rounds + 1):
        for peer, tracks in records.items():
            commit(tracks, peer, number)
    return records


def statements(records: dict[str, TrackRecords], number: int) -> list[bytes]:
    """The vouchers of all; hostile members vouch for each other alone."""
    return [
        records[peer].to_vouchers(number) if peer in records else vouchers({}, {*HOSTILE} - {peer}, number)
        for peer in IDS
    ]


@pytest.mark.parametrize("others_held", [0, 100, 300])
@pytest.mark.parametrize("remember", [True, False])
def test_after_all_have_restarted_those_that_vouch_for_each_other_do_not_reduce_alone(
    remember: bool, others_held: int
) -> None:
    """Reducers that leave out all others' work would stay the only ones; they may have held rounds meanwhile."""
    first = ROUNDS + 1 + others_held
    records = {peer: restarted(tracks, first) if remember else TrackRecords() for peer, tracks in history().items()}
    for number in range(first, first + ROUNDS):
        may = may_reduce(IDS, statements(records, number))
        trusted = {peer for peer, allowed in zip(IDS, may, strict=True) if allowed}
        assert trusted == {*(IDS if remember else HOSTILE)}
        for peer, tracks in records.items():
            commit(tracks, peer, number, IDS if trusted & {*HONEST} else HOSTILE)


@pytest.mark.parametrize("others_held", [0, 300])
def test_those_that_come_back_one_after_the_other_are_trusted_as_before(others_held: int) -> None:
    first = ROUNDS + 1 + others_held
    records = {peer: restarted(tracks, first) for peer, tracks in history().items()}
    early = [*HONEST[:2], *HOSTILE]
    for peer in HONEST[:2]:
        commit(records[peer], peer, first, early, early)
    for peer in HONEST[2:]:
        records[peer].resume_at(first + 1)
    assert all(may_reduce(IDS, statements(records, first + 1)))


def test_new_identities_are_known_as_new_after_all_have_restarted() -> None:
    ids = [*IDS, "sybil0", "sybil1"]
    records = {peer: restarted(tracks, 10 * ROUNDS) for peer, tracks in history().items()}
    assert newcomers(ids, [*statements(records, 10 * ROUNDS), b"", b""]) == {"sybil0", "sybil1"}


def test_until_the_first_commit_a_session_may_turn_out_to_be_in_another_round() -> None:
    """The first attempt of a round may fail, and another one begin elsewhere."""
    tracks = history()["honest0"]
    wandering = restarted(tracks, ROUNDS + 1)
    for number in (10 * ROUNDS, 5):
        wandering.resume_at(number)
        assert wandering.memory == restarted(tracks, number).memory
    commit(wandering, "honest0", 5)
    before = copy.deepcopy(wandering.memory)
    wandering.resume_at(10 * ROUNDS)
    assert wandering.memory == before


def test_an_exchange_in_which_all_were_cut_off_before_they_stopped_costs_nobody_its_trust() -> None:
    records = history()
    for own, tracks in records.items():
        tracks.reducers_failed(ROUNDS + 1, {*IDS} - {own})
        for number in (ROUNDS + 1, ROUNDS + 2):
            tracks.conduct.note_stall("honest1", number)
    records = {peer: restarted(tracks, ROUNDS + 1) for peer, tracks in records.items()}
    said = statements(records, ROUNDS + 1)
    assert all(may_reduce(IDS, said))
    assert not without_duty(IDS, said)


@pytest.mark.parametrize("others_held", [0, 300])
def test_whom_most_doubted_has_no_duty_after_all_have_restarted(others_held: int) -> None:
    first = ROUNDS + 1 + others_held
    records = history()
    for tracks in records.values():
        for number in range(ROUNDS - 2, ROUNDS + 1):
            tracks.conduct.begin(IDS)
            tracks.conduct.note_fault("hostile0", "missing")
            tracks.conduct.exchanged(number, {}, {}, trusted=(), usual_s=0.0, slack_s=0.0, passed_s=1.0)
            tracks.conduct.note_silence("hostile1", number, b"key", {"honest1"})
    records = {peer: restarted(tracks, first) for peer, tracks in records.items()}
    assert without_duty(IDS, statements(records, first)) == {*HOSTILE}
    assert all(tracks.conduct.ignored(first) == {"hostile1"} for tracks in records.values())


def test_who_is_established_and_what_is_usual_are_remembered() -> None:
    tracks = history()["honest0"]
    tracks.committed(ROUNDS + 1, [(peer, 1.0) for peer in IDS[1:]], (), (0.5, 0.25), delivered=IDS[1:])
    again = restarted(tracks, ROUNDS + 2)
    assert again.to_vouchers(ROUNDS + 2) == tracks.to_vouchers(ROUNDS + 2)
    assert again.usual_rms == tracks.usual_rms == (0.5, 0.25)
    assert not again.is_new("honest1")


def test_work_of_a_member_that_is_new_or_was_away_may_deviate() -> None:
    tracks = TrackRecords()
    may = []
    for number in (1, 2, 3, 4, 5, 6, 7, 11, 12, 17, 18):
        may.append(tracks.may_deviate("honest1", number))
        commit(tracks, "honest0", number)
    assert may == [*[True] * 5, False, False, False, False, True, False]
    assert tracks.may_deviate("honest2", 19) is False
    assert tracks.may_deviate("somebody", 19)
    assert restarted(tracks, 19).may_deviate("honest1", 19)  # this peer was away itself
    assert tracks.may_deviate("honest1", 18)  # it has gone back to an older round


@pytest.mark.parametrize("resumed", [5, ROUNDS + 1])
def test_a_peer_that_goes_on_from_an_older_checkpoint_remembers_for_as_long_as_otherwise(resumed: int) -> None:
    tracks = history()["honest0"]
    for number in (ROUNDS - 1, ROUNDS):
        tracks.conduct.note_stall("honest2", number)
    tracks = restarted(tracks, resumed)
    for number in range(resumed, resumed + RECENT_ROUNDS):
        assert all(tracks.may_reduce(peer, number) for peer in IDS[1:])
        assert tracks.conduct.doubts("honest2", number) == ("leader",)
    assert not any(tracks.may_reduce(peer, resumed + RECENT_ROUNDS) for peer in IDS[1:])
    assert tracks.conduct.doubts("honest2", resumed + 62) == ("leader",)
    assert tracks.conduct.doubts("honest2", resumed + 63) == ()


def test_two_restarts_without_a_commit_between_them_are_as_one() -> None:
    tracks = history()["honest0"]
    assert restarted(restarted(tracks, 5), 6).memory == restarted(tracks, 6).memory


def test_how_far_apart_peers_are_is_known_only_of_this_session() -> None:
    """Either of them may go on from an older checkpoint."""
    again = restarted(history()["honest0"], ROUNDS + 1)
    assert again.rounds_since("honest1", ROUNDS + 1) is None
    commit(again, "honest0", ROUNDS + 1)
    assert again.rounds_since("honest1", ROUNDS + 3) == 2


def test_what_is_remembered_stays_limited() -> None:
    def fill(tracks: TrackRecords, first: int) -> list[int]:
        for number in range(first, first + 100):
            tracks.conduct.begin(IDS)
            tracks.conduct.note_fault("honest1", "missing")
            tracks.conduct.note_stall("honest1", number)
            tracks.conduct.note_silence("honest1", number, b"key")
            delivery = Delivery(1000, 1.0, 1000.0, 1.0)
            tracks.conduct.exchanged(
                number,
                {"honest1": delivery},
                {"honest1": 9.0, "honest2": 1.0},
                trusted=["honest2"],
                usual_s=0.0,
                slack_s=0.0,
                passed_s=9.0,
            )
            commit(tracks, "honest0", number)
        record = tracks.memory.conduct["honest1"]
        of_rounds = len(record.late_results), len(record.failed), len(record.stalled), len(record.silences)
        return [len(record.late), len(record.rates), *of_rounds]

    tracks = TrackRecords()
    before = fill(tracks, 1)
    assert all(before)
    assert fill(restarted(tracks, 50), 50) == before


@pytest.mark.parametrize("resumed", [5, ROUNDS + 1, 300])
def test_all_that_has_a_round_moves_with_the_session(resumed: int) -> None:
    tracks = history()["honest0"]
    conduct, moved = tracks.conduct, resumed - 1 - ROUNDS
    for number in range(ROUNDS - 2, ROUNDS + 1):
        conduct.begin(["honest1"])
        conduct.note_fault("honest1", "missing")
        conduct.note_stall("honest1", number)
        conduct.note_silence("honest1", number, b"key")
        times_s = {"honest1": 9.0, "honest2": 1.0}
        delivery = {"honest1": Delivery(1000, 1.0, 1000.0, 9.0)}
        conduct.exchanged(number, delivery, times_s, trusted=["honest2"], usual_s=0.0, slack_s=0.0, passed_s=9.0)
    before = copy.deepcopy(tracks.memory)
    after = restarted(tracks, resumed).memory
    old, new = before.conduct["honest1"], after.conduct["honest1"]
    assert list(new.late_results) == [number + moved for number in old.late_results]
    assert list(new.failed) == [(number + moved, kind) for number, kind in old.failed]
    assert list(new.stalled) == [number + moved for number in old.stalled]
    assert [each.round for each in new.silences] == [each.round + moved for each in old.silences]
    assert new.rests_until == old.rests_until + moved > moved
    assert (new.late, new.rates, new.key) == (old.late, old.rates, b"key")
    assert all((old.late_results, old.failed, old.stalled, old.silences, old.late, old.rates))
    track = after.tracks["honest1"]
    assert (track.last_commit, track.delivered, track.worked) == (resumed - 1, resumed - 1, ROUNDS)
