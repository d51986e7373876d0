"""Which peers may reduce or weigh more than twice the median: what commits show, and what members confirm."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.rounds.track_record import NUM_FIRST_COMMITS, RECENT_ROUNDS, SPAN, TrackRecords
from spes_swarm.protocol.rounds.vouchers import (
    ESTABLISHED_COMMITS,
    MAX_VOUCHED,
    VOUCHER_BYTES,
    granted_ratios,
    ignored,
    may_reduce,
    measured_rates,
    newcomers,
    resting,
    vouchers,
    without_duty,
)

IDS = [f"peer{i}" for i in range(6)]


def after(*ratios: float, in_order: bool = True) -> TrackRecords:
    tracks = TrackRecords()
    for number, ratio in enumerate(ratios):
        tracks.committed(number, [("fast", ratio)], {"fast"} if in_order else set())
    return tracks


def test_a_ratio_is_earned_slowly_and_never_beyond_what_was_claimed() -> None:
    assert after(*[10.0] * (SPAN - 1)).earned("fast") == 2
    assert after(*[10.0] * SPAN).earned("fast") == 4
    assert after(*[10.0] * (2 * SPAN)).earned("fast") == 8
    assert after(*[10.0] * (9 * SPAN)).earned("fast") == 10
    assert after(*[1e9] * (9 * SPAN)).earned("fast") == 16
    assert after(*[3.0] * (9 * SPAN)).earned("fast") == 3


def test_one_commit_out_of_order_or_without_need_resets_the_count() -> None:
    earned = after(*[10.0] * SPAN)
    earned.committed(SPAN, [("fast", 10.0)], set())
    assert earned.earned("fast") == 2
    assert after(*[10.0] * (SPAN - 1), 1.0, 10.0).earned("fast") == 2
    assert after(*[10.0] * (4 * SPAN), in_order=False).earned("fast") == 2


def test_one_round_of_disagreement_says_little_and_several_in_a_row_say_it_all() -> None:
    tracks = TrackRecords()
    seen = []
    for left in (0.6, 0.6, 0.6, 1.0, 1.0):
        seen.append(tracks.agreement("a", left))
        tracks.note_agreement("a", left)
    assert seen == pytest.approx([0.8, 0.7, 0.65, 0.825, 0.9125])
    assert tracks.agreement("b", 0.3) == 0.65
    assert tracks.agreement("b", 0.3) == 0.65  # asked, not noted


def test_months_of_commits_are_no_number_that_overflows() -> None:
    months = after(*[10.0] * (1100 * SPAN))
    assert months.earned("fast") == 10
    assert months.to_vouchers(1100 * SPAN)


def test_who_has_been_away_for_hundreds_of_rounds_is_unknown() -> None:
    tracks = after(*[10.0] * SPAN)
    for number in range(SPAN, SPAN + 300):
        tracks.committed(number, [("other", 1.0)], {"other"})
    assert tracks.is_new("fast")
    assert tracks.rounds_since("fast", SPAN + 300) is None
    assert tracks.to_vouchers(SPAN + 300) == TrackRecords().to_vouchers(SPAN + 300)


def test_a_peer_that_leaves_out_rounds_keeps_what_it_has_earned() -> None:
    tracks = after(*[10.0] * SPAN)
    tracks.committed(SPAN, [("other", 1.0)], {"other"})
    assert tracks.earned("fast") == 4


def test_who_is_new_and_when_a_peer_was_last_met() -> None:
    tracks = TrackRecords()
    for number in range(NUM_FIRST_COMMITS):
        assert tracks.is_new("fast")
        tracks.committed(number + 3, [("fast", 1.0)], {"fast"})
    assert not tracks.is_new("fast")
    assert tracks.is_new("other")
    assert tracks.rounds_since("fast", 10) == 10 - (NUM_FIRST_COMMITS + 2)
    assert tracks.rounds_since("other", 10) is None


@given(st.dictionaries(st.text(min_size=1), st.floats(2.0, 16.0), max_size=50))
def test_vouchers_are_bounded_and_name_those_above_the_cap(earned: dict[str, float]) -> None:
    data = vouchers(earned)
    named = list(data[9::VOUCHER_BYTES])
    expected = sorted((int(ratio) for ratio in earned.values() if int(ratio) > 2), reverse=True)
    assert named == expected[:MAX_VOUCHED]


@given(st.integers(2, 6), st.integers(0, 5))
def test_more_than_half_of_the_other_members_decide(num_members: int, num_vouching: int) -> None:
    num_vouching = min(num_vouching, num_members - 1)
    said = [b""] + [vouchers({IDS[0]: 8.0}) if i <= num_vouching else b"" for i in range(1, num_members)]
    granted = granted_ratios(IDS[:num_members], said)
    assert granted == [8.0 if num_vouching > (num_members - 1) / 2 else 2.0] + [2.0] * (num_members - 1)


def test_nobody_vouches_for_itself_and_nobody_votes_twice() -> None:
    own = vouchers({IDS[0]: 16.0})
    assert granted_ratios(IDS[:2], [own, b""]) == [2.0, 2.0]
    assert granted_ratios(IDS[:4], [own, own * 3, b"", b""]) == [2.0] * 4


def test_what_is_granted_is_what_a_majority_grants() -> None:
    said = [b"", vouchers({IDS[0]: 16.0}), vouchers({IDS[0]: 4.0}), vouchers({IDS[0]: 8.0})]
    assert granted_ratios(IDS[:4], said)[0] == 8.0  # two of three say at least that
    assert granted_ratios(IDS[:3], [b"", b"x" * VOUCHER_BYTES * MAX_VOUCHED, b""]) == [2.0] * 3


@pytest.mark.slow
def test_what_rounds_usually_come_to_fades() -> None:
    tracks = TrackRecords()
    assert tracks.usual_rms == (0.0, 0.0)
    tracks.committed(1, [], set(), (0.01, 0.02))
    tracks.committed(2, [], set(), (0.001, 0.03))
    assert tracks.usual_rms == pytest.approx((0.008, 0.03))


# Who may reduce.


def test_a_peer_reduces_while_its_work_is_in_recent_rounds() -> None:
    tracks = TrackRecords()
    assert not tracks.may_reduce("a", 5)
    tracks.committed(5, [("a", 1.0)], [], delivered={"a"})
    assert tracks.may_reduce("a", 6)
    assert tracks.may_reduce("a", 5 + RECENT_ROUNDS)
    assert not tracks.may_reduce("a", 6 + RECENT_ROUNDS)


def test_a_reducer_whose_parts_were_missing_reduces_nothing_in_the_next_rounds() -> None:
    tracks = TrackRecords()
    for number in range(1, 2 * RECENT_ROUNDS):
        tracks.committed(number, [("a", 1.0)], [], delivered={"a"}, failed={"a"} if number == 3 else ())
        assert tracks.may_reduce("a", number + 1) == (number < 3 or number >= 3 + RECENT_ROUNDS)
    tracks.reducers_failed(2 * RECENT_ROUNDS, {"a"})
    assert not tracks.may_reduce("a", 2 * RECENT_ROUNDS)


def test_peers_that_only_ever_failed_are_not_remembered_for_long() -> None:
    tracks = TrackRecords()
    for number in range(3 * RECENT_ROUNDS):
        tracks.reducers_failed(number, {f"stranger{number}"})
    assert len(tracks.memory.tracks) <= RECENT_ROUNDS + 1


def test_shared_layers_that_stand_still_raise_an_alarm_every_three_rounds() -> None:
    tracks = TrackRecords()
    alarms = []
    for number, stalled in enumerate([True] * 6 + [False] + [True] * 3):
        tracks.committed(number, [], [], stalled=stalled)
        if (alarm := tracks.standstill()) is not None:
            alarms.append((number, alarm.kind, "3 rounds in a row" in alarm.detail))
    assert alarms == [(2, "standstill", True), (5, "standstill", False), (9, "standstill", True)]


def honest(num_honest: int) -> list[bytes]:
    """What honest peers say that have all delivered to each other."""
    ids = [f"honest{i}" for i in range(num_honest)]
    return [vouchers({}, set(ids) - {own}) for own in ids]


@given(st.integers(2, 12), st.integers(0, 12))
def test_strangers_never_reduce_among_peers_that_have_delivered(num_honest: int, num_strangers: int) -> None:
    ids = [f"honest{i}" for i in range(num_honest)] + [f"stranger{i}" for i in range(num_strangers)]
    expected = [True] * num_honest + [False] * num_strangers
    assert may_reduce(ids, honest(num_honest) + [b""] * num_strangers) == expected


@given(st.integers(3, 16), st.data())
def test_a_third_of_liars_that_vouch_for_each_other_changes_nothing(num_honest: int, data: st.DataObject) -> None:
    num_liars = data.draw(st.integers(0, num_honest // 2))
    ids = [f"honest{i}" for i in range(num_honest)] + [f"liar{i}" for i in range(num_liars)]
    said = honest(num_honest)
    for i in range(num_liars):  # each vouches for all other liars, and for one honest peer alone
        said.append(vouchers({}, {*ids[num_honest:], ids[0]} - {f"liar{i}"}))
    assert may_reduce(ids, said)[1:] == [True] * (num_honest - 1) + [False] * num_liars


@given(st.integers(3, 12), st.data())
def test_a_minority_takes_nobody_s_trust_by_vouching_for_itself(num_honest: int, data: st.DataObject) -> None:
    num_liars = data.draw(st.integers(0, num_honest - 1))  # who have delivered, so that the honest peers vouch for them
    num_strangers = data.draw(st.integers(0, num_honest - 1 - num_liars))
    honest_ids, liars = [f"honest{i}" for i in range(num_honest)], [f"liar{i}" for i in range(num_liars)]
    ids = [*honest_ids, *liars, *(f"stranger{i}" for i in range(num_strangers))]
    said = [vouchers({}, {*honest_ids, *liars} - {own}) for own in honest_ids]
    said += [vouchers({}, {*liars} - {own}) for own in ids[num_honest:]]
    assert may_reduce(ids, said) == [True] * (num_honest + num_liars) + [False] * num_strangers


def test_while_nobody_has_delivered_all_may_reduce() -> None:
    assert may_reduce(IDS, [b""] * len(IDS)) == [True] * len(IDS)
    assert may_reduce(["a"], [b""]) == [True]
    assert may_reduce(["a", "b"], [vouchers({}, {"a"}), b""]) == [True, True]  # nobody vouches for itself


def test_a_ratio_and_the_right_to_reduce_are_independent() -> None:
    said = [b"", vouchers({IDS[0]: 8.0}), vouchers({IDS[0]: 8.0}, {IDS[1]})]
    assert granted_ratios(IDS[:3], said) == [8.0, 2.0, 2.0]
    assert may_reduce(IDS[:3], said) == [False, True, False]


def test_of_too_many_peers_all_select_the_same_and_others_in_each_round() -> None:
    peers = {f"peer{i}" for i in range(3 * MAX_VOUCHED)}
    first = vouchers({}, peers, 1)
    assert len(first) == MAX_VOUCHED * VOUCHER_BYTES
    assert vouchers({}, sorted(peers), 1) == first
    assert vouchers({"peer7": 4.0}, peers, 1) != first
    assert vouchers({}, peers, 2) != first


# Who has no duty, and how fast the others are.


def says(
    own: str, ids: Sequence[str], doubted: Collection[str] = (), rates: Mapping[str, float] | None = None
) -> bytes:
    return vouchers({}, set(ids) - {own}, doubted=doubted, rates=rates)


@given(st.integers(2, 9), st.data())
def test_more_than_half_of_the_others_and_at_least_two_take_a_member_s_duties(count: int, data: st.DataObject) -> None:
    ids = [f"peer{i}" for i in range(count)]
    doubting = data.draw(st.sets(st.integers(1, count - 1)))
    said = [says(own, ids, {ids[0]} if i in doubting else ()) for i, own in enumerate(ids)]
    expected = len(doubting) >= 2 and len(doubting) > (count - 1) / 2
    assert without_duty(ids, said) == ({ids[0]} if expected else set())


@given(st.integers(3, 16), st.data())
def test_a_quarter_of_liars_and_any_number_of_strangers_take_nobody_s_duties(
    num_honest: int, data: st.DataObject
) -> None:
    num_liars = data.draw(st.integers(0, num_honest // 3))
    num_strangers = data.draw(st.integers(0, 20))
    honest_ids = [f"honest{i}" for i in range(num_honest)]
    ids = [*honest_ids, *(f"liar{i}" for i in range(num_liars)), *(f"stranger{i}" for i in range(num_strangers))]
    members = ids[: num_honest + num_liars]
    said = [says(own, members, () if own in honest_ids else set(honest_ids)) for own in ids]
    assert not without_duty(ids, said).intersection(honest_ids)


def test_strangers_do_not_outvote_those_who_doubt() -> None:
    ids = ["a", "b", "c", "liar", *(f"stranger{i}" for i in range(20))]
    said = [says(own, ids[:4], {"liar"} if own in "abc" else ()) for own in ids[:4]] + [b""] * 20
    assert without_duty(ids, said) == {"liar"}


def test_nobody_doubts_itself_and_nobody_doubts_twice() -> None:
    ids = ["a", "b", "c"]
    assert without_duty(ids, [says("a", ids, {"a"}), says("b", ids, {"a"}) * 2, says("c", ids)]) == set()


@given(st.floats(1e-3, 1e6))
def test_a_rate_is_stated_within_a_tenth(rate: float) -> None:
    (found,) = measured_rates(["a", "b"], [b"", vouchers({}, rates={"a": rate})])[:1]
    assert found == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("rate", [0.0, 1e-300, 1e300])
def test_no_rate_is_too_small_or_too_large_to_be_stated(rate: float) -> None:
    (found,) = measured_rates(["a", "b"], [b"", vouchers({}, rates={"a": rate})])[:1]
    assert found is not None
    assert 0 < found < math.inf


def test_a_rate_is_what_the_lower_median_of_the_others_has_measured() -> None:
    ids = ["a", "b", "c", "d"]
    said = [b"", *(vouchers({}, rates={"a": rate}) for rate in (4.0, 64.0, 1024.0))]
    assert measured_rates(ids, said) == [64.0, None, None, None]
    assert measured_rates(ids, [vouchers({}, rates={"a": 1e6}), *said[1:3], b""])[0] == 4.0
    assert measured_rates(ids, [*said[:2], b"", b""])[0] is None  # one of three


def test_rates_count_as_stated_by_trusted_members_only() -> None:
    ids = ["a", "b", "c", *(f"stranger{i}" for i in range(9))]
    said = [says(own, ids[:3], rates=dict.fromkeys({*ids[:3]} - {own}, 16.0)) for own in ids[:3]]
    strangers = [vouchers({}, rates=dict.fromkeys(ids[:3], 1e-3))] * 9
    assert measured_rates(ids, said + strangers)[:3] == [16.0] * 3


def test_doubts_come_before_everything_else() -> None:
    earned = {f"peer{i}": 8.0 for i in range(2 * MAX_VOUCHED)}
    said = vouchers(earned, set(earned), doubted={"bad"})
    assert len(said) == MAX_VOUCHED * VOUCHER_BYTES
    assert without_duty(["bad", "a", "b"], [b"", said, said]) == {"bad"}


def test_a_peer_that_stays_away_from_the_groups_loses_its_duties_too() -> None:
    ids = ["a", "b", "c"]
    said = [says(own, ids, {"away"}) for own in ids]
    assert without_duty(ids, said) == set()
    assert without_duty(ids, said, ["away", "d"]) == {"away"}


def test_who_rests_keeps_its_vote() -> None:
    """Slow lines must not leave the decisions to a few."""
    ids = [f"peer{i}" for i in range(8)]
    slow = set(ids[:4])
    said = [vouchers({}, set(ids) - {own}, resting=slow - {own}) for own in ids]
    assert resting(ids, said) == slow
    assert may_reduce(ids, said) == [True] * 8
    liars = [vouchers({}, set(ids) - {own}, doubted=set(ids) - {own}) for own in ids[6:]]
    assert without_duty(ids, [*said[:6], *liars]) == set()


# Whose work does not count, and who is new.


@given(st.integers(2, 9), st.data())
def test_more_than_half_of_the_others_and_at_least_two_say_whose_work_does_not_count(
    count: int, data: st.DataObject
) -> None:
    ids = [f"peer{i}" for i in range(count)]
    noticed = data.draw(st.sets(st.integers(1, count - 1)))
    said = [
        vouchers({}, set(ids) - {own}, doubted=set(ids) - {own}, ignored={ids[0]} if i in noticed else ())
        for i, own in enumerate(ids)
    ]
    assert ignored(ids, said) == ({ids[0]} if len(noticed) >= 2 and len(noticed) > (count - 1) / 2 else set())


def is_established(tracks: TrackRecords, round_number: int) -> bool:
    """What the only voucher in a statement says."""
    said = tracks.to_vouchers(round_number)
    assert len(said) == VOUCHER_BYTES
    return bool(said[8] & 0x08)


def test_a_peer_is_established_after_sixteen_commits_with_its_work() -> None:
    tracks = TrackRecords()
    for number in range(1, 19):
        tracks.committed(number, [("a", 1.0)], [], delivered=() if number == 2 else {"a"})
        assert is_established(tracks, number + 1) == (number > ESTABLISHED_COMMITS)
    for number in range(19, 19 + 300):
        tracks.committed(number, [("b", 1.0)], [], delivered={"b"})
    tracks.committed(400, [("a", 1.0)], [], delivered={"a"})
    assert tracks.memory.tracks["a"].worked == 1  # the earlier ones are forgotten


def known_to_each_other(known: Sequence[str], ids: Sequence[str]) -> list[bytes]:
    """What peers say that have all delivered, of which the `known` ones have done so for long."""
    return [vouchers({}, set(ids) - {own}, established={*known} - {own} if own in known else ()) for own in ids]


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9))
def test_who_is_new_is_what_most_of_all_others_say(num_known: int, num_new: int, num_strangers: int) -> None:
    known, new = [f"known{i}" for i in range(num_known)], [f"new{i}" for i in range(num_new)]
    strangers = [f"stranger{i}" for i in range(num_strangers)]
    said = known_to_each_other(known, known + new) + [b""] * num_strangers
    # One that knows no other established peer says nothing.
    decided = num_known >= 2 and num_known > (num_known + num_new + num_strangers - 1) / 2
    assert newcomers([*known, *new, *strangers], said) == ({*new, *strangers} if decided else set())


@given(st.data())
def test_a_minority_makes_nobody_new_and_no_work_ignored(data: st.DataObject) -> None:
    """Whomever they vouch for, and whoever of the others has restarted and so vouches for nobody."""
    num_honest = data.draw(st.integers(3, 10))
    hostile = [f"hostile{i}" for i in range(data.draw(st.integers(0, num_honest - 1)))]
    honest_ids = [f"honest{i}" for i in range(num_honest)]
    restarted = data.draw(st.sets(st.sampled_from(honest_ids)))
    working = data.draw(st.sets(st.sampled_from(hostile))) if hostile else set()  # the rest are strangers
    delivered = {*honest_ids, *working}
    said = []
    for own in honest_ids:
        known = set() if own in restarted else delivered - {own}
        said.append(vouchers({}, known, established=known))
    friends = {*hostile, *data.draw(st.sets(st.sampled_from(honest_ids)))}
    for own in hostile:
        victims = {*honest_ids} - friends
        trusted = friends - {own}
        said.append(vouchers({}, trusted, doubted=victims, ignored=victims, established=trusted))
    ids = honest_ids + hostile
    assert not newcomers(ids, said).intersection(honest_ids)
    assert not ignored(ids, said).intersection(honest_ids)


@given(st.integers(3, 12), st.data())
def test_fewer_identities_than_established_peers_stay_new(num_honest: int, data: st.DataObject) -> None:
    num_new = data.draw(st.integers(0, num_honest - 1))
    honest_ids, new = [f"honest{i}" for i in range(num_honest)], [f"new{i}" for i in range(num_new)]
    ids = honest_ids + new
    said = known_to_each_other(honest_ids, ids)
    for i, own in enumerate(new, num_honest):
        said[i] = vouchers({}, set(ids) - {own}, established=set(new) - {own})
    assert newcomers(ids, said) == set(new)


def test_a_full_list_says_nothing_about_those_that_it_does_not_name() -> None:
    ids = [f"peer{i}" for i in range(2 * MAX_VOUCHED)]
    assert newcomers(ids, [vouchers({}, set(ids) - {own}, 7, established=set(ids) - {own}) for own in ids]) == set()


def test_silent_strangers_can_only_keep_such_work_in() -> None:
    ids = ["hiding", "a", "b", "c"]
    said = [b"", *(vouchers({}, set(ids) - {own}, doubted={"hiding"}, ignored={"hiding"}) for own in "abc")]
    assert ignored(ids, said) == {"hiding"}
    assert ignored([*ids, "s1", "s2"], [*said, b"", b""]) == {"hiding"}
    assert ignored([*ids, "s1", "s2", "s3"], [*said, b"", b"", b""]) == set()


def test_what_is_ignored_is_what_the_conduct_of_a_peer_says() -> None:
    tracks = TrackRecords()
    tracks.committed(1, [("a", 1.0)], [], delivered={"a"})
    for number in (2, 3, 4):
        assert not tracks.to_vouchers(number)[8] & 0x10
        tracks.conduct.note_silence("a", number, b"key")
    assert tracks.to_vouchers(5)[8] & 0x50 == 0x50  # doubted as well
