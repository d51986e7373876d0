"""Late peers and partitioned peers are told apart."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.consensus.lineage import MARK_BYTES, MAX_COMMITS, Lineage

# Rounds may be skipped: a number is not committed again when its exchange failed and the swarm went on.
histories = st.lists(st.integers(1, 3), min_size=0, max_size=60)


def commit(lineage: Lineage, gaps: list[int], side: str = "") -> Lineage:
    """The lineage after more commits, of groups that depend on the `side` of a partition."""
    for gap in gaps:
        number = max(lineage.head[0], 0) + gap
        lineage = lineage.after(number, f"{side}{number:<30}".encode())
    return lineage


@pytest.fixture(scope="module")
def by_round() -> list[Lineage]:
    """The lineages of a swarm that commits 8,000 rounds, by round."""
    return list(accumulate(range(8000), lambda lineage, _: commit(lineage, [1]), initial=Lineage({})))


@given(histories, histories)
def test_who_missed_rounds_is_late(before: list[int], missed: list[int]) -> None:
    late = commit(Lineage({}), before)
    swarm = commit(late, missed)
    assert late.leads_to(swarm)
    assert swarm.leads_to(late) == (not missed)


@given(histories, st.lists(st.integers(1, 3), max_size=20), st.lists(st.integers(1, 3), min_size=1, max_size=20))
def test_what_one_side_loses_begins_after_the_last_common_round(
    before: list[int], ours: list[int], theirs: list[int]
) -> None:
    common = commit(Lineage({}), before)
    mine, swarm = commit(common, ours, "A"), commit(common, theirs, "B")
    lost = mine.lost_in(swarm)
    if not ours or mine.head[0] < min(swarm.marks):  # it may have kept none of that time
        assert lost is None
    elif mine.head[0] < min(swarm.head[0], 32):  # no commit of either is thinned out
        assert lost == (max(common.head[0], 0) + ours[0], mine.head[0])


@given(histories, st.lists(st.integers(1, 3), min_size=1, max_size=20), st.lists(st.integers(1, 3), min_size=1))
def test_two_sides_of_a_partition_are_not_late(before: list[int], ours: list[int], theirs: list[int]) -> None:
    common = commit(Lineage({}), before)
    one, other = commit(common, ours, "one"), commit(common, theirs, "other")
    # Of up to 20 commits since the split none is thinned out, so the shorter side always notices.
    assert not one.leads_to(other) or len(theirs) > 32
    assert not other.leads_to(one)


@pytest.mark.slow
def test_a_long_partition_is_noticed_at_the_kept_rounds(by_round: list[Lineage]) -> None:
    common = by_round[5000]
    one, other = commit(common, [1] * 700, "one"), commit(common, [1] * 3000, "other")
    assert not one.leads_to(other)
    assert not other.leads_to(one)


@pytest.mark.slow
@given(st.integers(0, 4000), st.integers(0, 4000))
def test_any_lateness_is_recognised(by_round: list[Lineage], before: int, missed: int) -> None:
    assert by_round[before].leads_to(by_round[before + missed])


def test_a_commit_that_the_swarm_has_just_thinned_out_is_late_and_not_elsewhere() -> None:
    late = commit(Lineage({}), [1])
    for missed in (30, 31, 32, 33):  # of 32 more, round 1 is the first that the swarm forgets
        swarm = commit(late, [1] * missed)
        assert late.leads_to(swarm)
        other = commit(Lineage({}), [1], "other")
        assert other.leads_to(swarm) == (1 not in swarm.marks)


def test_one_other_commit_is_noticed_however_long_the_history() -> None:
    common = commit(Lineage({}), [1] * 60)
    one, other = commit(common, [1]), commit(common, [2, 1, 1])
    for seen in (other, Lineage.from_lists(*other.to_lists())):
        assert not one.leads_to(seen)


def test_the_initial_weights_come_before_all_commits() -> None:
    assert Lineage({}).head == (-1, b"")


def test_a_first_commit_is_not_the_initial_weights() -> None:
    assert not Lineage({0: b"\1" * 8}).leads_to(Lineage({1: b"\2" * 8}))
    assert Lineage({}).leads_to(Lineage({1: b"\2" * 8}))


def test_whoever_goes_back_to_an_older_reference_forgets_what_came_after_it() -> None:
    ahead = commit(Lineage({}), [1] * 6)
    assert ahead.after(4, b"again" * 8).head == (4, b"againaga")


@pytest.mark.slow
def test_a_lineage_stays_small(by_round: list[Lineage]) -> None:
    commits, marks = by_round[5000].to_lists()
    assert len(commits) <= MAX_COMMITS
    assert len(marks) == MARK_BYTES * len(commits)
    assert commits[-32:] == list(range(4969, 5001))
    assert 4960 in commits
    assert 4096 in commits


def test_its_size_in_a_statement_is_part_of_the_protocol() -> None:
    """32 commits on each of five levels, 8 bytes each: others refuse a statement with more."""
    assert (MAX_COMMITS, MARK_BYTES) == (160, 8)
    # As many as a run could ever have on each level.
    marks = {level * 32**power: b"\1" * 8 for power in range(6) for level in range(1, 80)}
    lineage = Lineage(marks).after(80 * 32**5, b"\2" * 32)
    assert len(lineage.to_lists()[0]) <= 160


@given(histories)
def test_a_statement_carries_it_whole(gaps: list[int]) -> None:
    lineage = commit(Lineage({}), gaps)
    assert Lineage.from_lists(*lineage.to_lists()) == lineage


def test_after_healing_both_sides_have_one_lineage() -> None:
    common = commit(Lineage({}), [1] * 3)
    one, other = commit(common, [1] * 4, "one"), commit(common, [1] * 3, "other")
    healed = one.after(8, b"x" * 32)
    assert one.leads_to(healed)
    assert not other.leads_to(healed)
