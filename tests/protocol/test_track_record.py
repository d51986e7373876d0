"""What a peer remembers of the others when it is started again."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest

from spes_swarm.protocol.rounds.conduct import Delivery
from spes_swarm.protocol.rounds.track_record import RECENT_ROUNDS, TrackRecords
from spes_swarm.protocol.rounds.vouchers import may_reduce, vouchers, without_duty

HONEST, HOSTILE = [f"honest{i}" for i in range(5)], ["hostile0", "hostile1"]
IDS = [*HONEST, *HOSTILE]
ROUNDS = 20


def restarted(tracks: TrackRecords, round_number: int) -> TrackRecords:
    again = TrackRecords()
    again.recall(copy.deepcopy(tracks.memory), round_number)
    return again


def commit(tracks: TrackRecords, own: str, number: int, delivered: Sequence[str] = IDS) -> None:
    """A commit of all peers with the work of some."""
    others = [(peer, 1.0) for peer in IDS if peer != own]
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


@pytest.mark.parametrize("remember", [True, False])
def test_after_all_have_restarted_those_that_vouch_for_each_other_do_not_reduce_alone(remember: bool) -> None:
    """Reducers that leave out all others' work would stay the only ones."""
    records = {
        peer: restarted(tracks, ROUNDS + 1) if remember else TrackRecords() for peer, tracks in history().items()
    }
    for number in range(ROUNDS + 1, 2 * ROUNDS):
        may = may_reduce(IDS, statements(records, number))
        trusted = {peer for peer, allowed in zip(IDS, may, strict=True) if allowed}
        assert trusted == {*(IDS if remember else HOSTILE)}
        for peer, tracks in records.items():
            commit(tracks, peer, number, IDS if trusted & {*HONEST} else HOSTILE)


def test_whom_most_doubted_has_no_duty_after_all_have_restarted() -> None:
    records = history()
    for tracks in records.values():
        for number in range(ROUNDS - 2, ROUNDS + 1):
            tracks.conduct.begin(IDS)
            tracks.conduct.note_fault("hostile0", "missing")
            tracks.conduct.exchanged(number, {}, {}, trusted=(), usual_s=0.0, slack_s=0.0, passed_s=1.0)
    records = {peer: restarted(tracks, ROUNDS + 1) for peer, tracks in records.items()}
    assert without_duty(IDS, statements(records, ROUNDS + 1)) == {"hostile0"}


def test_a_peer_that_goes_on_from_an_older_checkpoint_remembers_for_as_long_as_otherwise() -> None:
    resumed = 5
    tracks = history()["honest0"]
    tracks.reducers_failed(ROUNDS, {"honest1"})
    tracks.conduct.note_stall("honest2", ROUNDS - 1)
    tracks.conduct.note_stall("honest2", ROUNDS)
    tracks = restarted(tracks, resumed)
    assert [tracks.may_reduce(peer, resumed) for peer in IDS] == [False, False, *[True] * (len(IDS) - 2)]
    assert tracks.rounds_since("honest1", resumed) == 1
    assert tracks.conduct.doubts("honest2", resumed) == ("leader",)
    for number in range(resumed, resumed + RECENT_ROUNDS):
        assert not tracks.may_reduce("honest1", number)
        commit(tracks, "honest0", number)
    assert tracks.may_reduce("honest1", resumed + RECENT_ROUNDS)


def test_what_is_long_past_counts_no_more() -> None:
    tracks = restarted(history()["honest0"], 10 * ROUNDS)
    assert not any(tracks.may_reduce(peer, 10 * ROUNDS) for peer in IDS)
    assert not tracks.to_vouchers(10 * ROUNDS)


def test_what_happened_before_the_first_round_of_a_session_is_not_forgotten_for_the_past() -> None:
    again = TrackRecords()
    again.conduct.note_stall("honest1", ROUNDS)
    again.conduct.note_stall("honest1", ROUNDS + 1)
    again.recall(history()["honest0"].memory, ROUNDS + 1)
    assert again.conduct.doubts("honest1", ROUNDS + 1) == ("leader",)
    assert again.may_reduce("honest1", ROUNDS + 1)


def test_earlier_conduct_keeps_its_limits() -> None:
    tracks = TrackRecords()
    delivery = Delivery(1000, 1.0, 1000.0, 1.0)
    for number in range(100):
        tracks.conduct.begin(IDS)
        tracks.conduct.exchanged(
            number,
            dict.fromkeys(IDS, delivery),
            {},
            trusted=IDS,
            usual_s=0.0,
            slack_s=0.0,
            passed_s=1.0,
        )
    lengths = {peer: len(record.rates) for peer, record in restarted(tracks, 50).memory.conduct.items()}
    assert lengths == dict.fromkeys(IDS, 8)
