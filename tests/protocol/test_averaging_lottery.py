"""How many parts members audit: enough to prove lies in time, by exact probabilities and by trial."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.averaging.lottery import draw, num_audits, shared_out
from spes_swarm.protocol.rounds.plan import PARTS_PER_MEMBER

# (share of its parts in which a reducer lies, rounds within which this must be proven)
GOALS = [(0.5, 4), (0.1, 20)]


def probability_of_missing(num_members: int, lies: int, audits: int, rounds: int) -> float:
    """That no auditor ever draws a lie, with whole numbers of parts and draws without replacement."""
    others = PARTS_PER_MEMBER * (num_members - 1)
    one = math.comb(others - lies, audits) / math.comb(others, audits)
    auditors = num_members - max(1, num_members // 4)
    return one ** (auditors * rounds)


@pytest.mark.parametrize(("share", "rounds"), GOALS)
@pytest.mark.parametrize("num_members", [2, 3, 4, *range(5, 65)])
def test_a_lie_is_proven_in_time(num_members: int, share: float, rounds: int) -> None:
    lies = math.ceil(share * PARTS_PER_MEMBER)
    assert probability_of_missing(num_members, lies, num_audits(num_members), rounds) <= 0.01


@pytest.mark.parametrize("num_members", [2, *range(5, 65), 1000])
def test_with_one_audit_less_it_would_not_be(num_members: int) -> None:
    """With as many parts per member as it takes for draws to be independent."""
    fewer = num_audits(num_members) - 1
    auditors = num_members - max(1, num_members // 4)
    missed = [(1 - share / (num_members - 1)) ** (auditors * fewer * rounds) for share, rounds in GOALS]
    assert max(missed) > 0.01


def test_the_number_does_not_grow_with_the_swarm() -> None:
    assert num_audits(0) == num_audits(1) == 0  # there is nobody to audit
    assert {num_audits(n) for n in range(2, 2000)} <= {3, 4}
    assert num_audits(10_000) == 4


@pytest.mark.parametrize(("share", "rounds"), GOALS)
@pytest.mark.parametrize("num_members", [5, 8, 16])
def test_in_trials(num_members: int, share: float, rounds: int) -> None:
    """Member 0 lies; the last members do not audit, and all others draw from the parts that others reduce."""
    random, trials, missed = Random(1), 3000, 0
    idle = max(1, num_members // 4) - 1  # besides the liar
    lies = set(range(math.ceil(share * PARTS_PER_MEMBER)))
    parts = range(num_members * PARTS_PER_MEMBER)
    candidates = [[p for p in parts if p // PARTS_PER_MEMBER != me] for me in range(num_members)]
    count = num_audits(num_members)
    for _ in range(trials):
        missed += not any(
            lies.intersection(draw(candidates[me], count, random))
            for _ in range(rounds)
            for me in range(1, num_members - idle)
        )
    assert missed / trials <= 0.01 + 4 * math.sqrt(0.01 / trials)


@given(st.lists(st.integers(0, 10**6), max_size=50, unique=True), st.integers(0, 60), st.integers())
def test_draws_are_different_candidates(candidates: list[int], count: int, seed: int) -> None:
    drawn = draw(candidates, count, Random(seed))
    assert len(drawn) == len(set(drawn)) == min(count, len(candidates))
    assert set(drawn) <= set(candidates)


def test_draws_are_uniform() -> None:
    random, hits = Random(2), [0] * 10
    for _ in range(10_000):
        for part in draw(range(10), 3, random):
            hits[part] += 1
    assert all(abs(hit - 3000) < 5 * math.sqrt(3000 * 0.7) for hit in hits)


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=100, unique=True),
    st.integers(1, 20),
    st.binary(min_size=32, max_size=32),
    st.randoms(),
)
def test_each_part_has_one_auditor_whatever_the_order(
    parts: list[int], num_members: int, group_id: bytes, random: Random
) -> None:
    shares = [shared_out(parts, num_members, me, group_id) for me in range(num_members)]
    assert sorted(part for share in shares for part in share) == sorted(parts)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    shuffled = random.sample(parts, len(parts))
    assert [shared_out(shuffled, num_members, me, group_id) for me in range(num_members)] == shares


def test_each_exchange_has_its_own_auditors() -> None:
    by_group = {tuple(shared_out(range(64), 4, 0, bytes([number]) * 32)) for number in range(20)}
    assert len(by_group) == 20
