"""Bounds on what one member can move: derived here from the rules as they are stated, on random groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.averaging.agreement import MAX_DEVIATION, Agreement
from spes_swarm.protocol.averaging.clipping import (
    FREE_DEVIATION,
    MAX_PART_RATIO,
    MAX_SHARE_RATIO,
    MAX_WEIGHT_RATIO,
    TOLERANCE,
    EnergyBudget,
    Stated,
    believed_tokens,
    limits,
    median_rms,
    scale,
)

CLIP = 1.5


def lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def shared(*rms: float, tokens: float = 100.0) -> list[Stated]:
    return [Stated(tokens, value, {}) for value in rms]


def shared_limits(stated: list[Stated]) -> dict[int, float]:
    return limits(stated, range(len(stated)), None, CLIP)


# Tokens.


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=9))
def test_tokens_are_believed_up_to_twice_the_lower_median(claimed: list[int]) -> None:
    believed = believed_tokens(claimed, [MAX_WEIGHT_RATIO] * len(claimed))
    positive = [float(count) for count in claimed if count > 0]
    most = 2 * lower_median(positive) if positive else 0
    assert believed == [min(count, most) for count in claimed]


def test_of_two_members_the_larger_claim_is_not_its_own_measure() -> None:
    assert believed_tokens([100, 2**47], [2.0, 2.0]) == [100.0, 200.0]


def test_an_earned_ratio_counts() -> None:
    assert believed_tokens([100, 100, 1000], [2.0, 2.0, 8.0]) == [100.0, 100.0, 800.0]


# Lengths.


@given(
    st.lists(st.floats(0.008, 0.011), min_size=2, max_size=8),
    st.floats(0.0, 1e30),
    st.integers(0, 2**47),
)
def test_no_claim_gets_further_than_the_honest_spread_allows(honest: list[float], loud: float, tokens: int) -> None:
    """One liar among honest members: nobody honest is scaled, and what counts of the liar is bounded by theirs."""
    believed = believed_tokens([100] * len(honest) + [tokens], [2.0] * (len(honest) + 1))
    stated = [Stated(t, rms, {}) for t, rms in zip(believed, [*honest, loud], strict=True)]
    limit_of = shared_limits(stated)
    for i, rms in enumerate(honest):
        # With one other honest member or more, the lower median lies among the honest or just below them.
        if len(honest) > 2 or loud >= rms or loud == 0 or tokens == 0:
            assert scale(rms, limit_of[i]) == 1.0
    liar = limit_of[len(honest)]
    assert min(loud, liar) <= 2 * max(honest) * (1 + 1e-9)  # with twice the tokens


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=7), st.randoms())
def test_limits_do_not_depend_on_the_order_of_the_members(rms: list[float], random: object) -> None:
    order = list(range(len(rms)))
    random.shuffle(order)  # type: ignore[attr-defined]
    plain, shuffled = shared_limits(shared(*rms)), shared_limits(shared(*(rms[i] for i in order)))
    assert [plain[i] for i in order] == [shuffled[position] for position in range(len(order))]


@given(st.integers(1, 6), st.floats(0.5, 1.0))
def test_a_fast_member_may_have_gone_further_and_a_slow_one_less_far(num_others: int, exponent: float) -> None:
    """The length grows with steps^0.5 (a random walk) to steps^1 (always the same way)."""
    tokens = [100.0] * num_others + [200.0, 20.0]
    stated = [Stated(t, 0.01 * (t / 100) ** exponent, {}) for t in tokens]
    limit_of = shared_limits(stated)
    assert all(scale(s.shared_rms, limit_of[i]) == pytest.approx(1.0) for i, s in enumerate(stated))


@pytest.mark.parametrize("zeros", [1, 2, 3])
def test_members_that_have_not_moved_are_no_measure(zeros: int) -> None:
    limit_of = shared_limits(shared(*[0.0] * zeros, 0.01, 0.011))
    assert limit_of[zeros + 1] == pytest.approx(CLIP * 0.01)
    assert shared_limits(shared(0.0, 0.0)) == {0: math.inf, 1: math.inf}


def test_a_sole_holder_is_measured_by_the_others_experts() -> None:
    stated = [
        Stated(100, 0.01, {0: 0.010, 1: 0.0}),  # no token was routed to expert 1
        Stated(100, 0.01, {2: 0.011, 3: 0.009}),
        Stated(100, 0.01, {4: 0.9}),
        Stated(100, 0.01, {}),
    ]
    assert limits(stated, [2], 4, CLIP) == {2: pytest.approx(CLIP * 0.011)}  # of 0.010, 0.011 and 0.9


def test_three_holders_of_an_expert_are_their_own_measure() -> None:
    """An expert to which little was routed moves less than the others do, for all of its holders."""
    stated = [Stated(100, 0.01, {0: 0.001, 1: 0.01})] * 3 + [Stated(100, 0.01, {0: 0.009})]
    assert limits(stated, range(4), 0, CLIP)[3] == pytest.approx(CLIP * 0.001)
    assert limits(stated, [0, 3], 0, CLIP)[3] == pytest.approx(CLIP * 0.01)


@pytest.mark.parametrize("liars_usual", [0.0, 1e-9, 1e9])
def test_what_rounds_usually_come_to_is_never_too_long(liars_usual: float) -> None:
    """A round that was called early: three members have just begun, one has a round's work, one says what it likes."""
    stated = [Stated(100, 0.001, {}, (0.01, 0.0)) for _ in range(3)]
    stated += [Stated(200, 0.01, {}, (0.01, 0.0)), Stated(200, 0.9, {}, (liars_usual, liars_usual))]
    limit_of = shared_limits(stated)
    assert scale(0.01, limit_of[3]) == 1.0
    assert limit_of[4] == pytest.approx(CLIP * 0.01)


def test_without_a_clip_there_are_no_limits() -> None:
    assert limits(shared(1.0, 1e9), [0, 1], None, 0.0) == {0: math.inf, 1: math.inf}


def test_every_member_is_one_voice_in_what_a_round_has_come_to() -> None:
    hoarder = Stated(100, 0.9, dict.fromkeys(range(6), 0.9))
    stated = [Stated(100, 0.01, {6: 0.02, 7: 0.0}), Stated(100, 0.011, {6: 0.021}), Stated(0, 9.0, {7: 9.0}), hoarder]
    assert median_rms(stated) == (0.011, 0.021)
    assert median_rms([Stated(0, 1.0, {})]) == (0.0, 0.0)


# What arrives.


@given(st.lists(st.floats(0, 5), min_size=1, max_size=20), st.floats(1e-3, 10), st.integers(0, 200))
def test_a_budget_is_never_exceeded_whatever_the_order(energies: list[float], rms: float, elsewhere: int) -> None:
    elements = 10 * len(energies)
    budget = EnergyBudget(rms, elements + elsewhere, elements)
    accepted = [energy for energy in energies if budget.spend(energy, 10)]
    most = (TOLERANCE * rms) ** 2 * min(elements + elsewhere, MAX_SHARE_RATIO * (elements + 10))
    assert sum(accepted) <= most * (1 + 1e-12)
    if sum(energies) <= most:
        assert accepted == energies


def test_one_part_cannot_have_all_of_a_large_blocks_energy() -> None:
    budget = EnergyBudget(1.0, 100_000, 100_000)
    assert budget.allows_part(MAX_PART_RATIO**2 * 100, 100)
    assert not budget.allows_part(1.1 * MAX_PART_RATIO**2 * 100, 100)
    assert not EnergyBudget(1.0, 100_000, 100_000).spend(math.nan, 100)


def test_a_reducer_of_one_part_sees_a_ratio_that_scatters_more() -> None:
    """At most 2.1 times the RMS of the block was measured in one part."""
    assert EnergyBudget(1.0, 100_000, 1_100).spend(2.1**2 * 1_100, 1_100)
    assert not EnergyBudget(1.0, 100_000, 1_100).spend(3.0**2 * 1_100, 1_100)


# Agreement.


def contributions(seed: int, num_honest: int, *, common: float, own: float, size: int = 4096) -> np.ndarray:
    """Honest differences: a direction that all share, and something of each one's own."""
    rng = np.random.default_rng(seed)
    return (common * rng.normal(size=size) + own * rng.normal(size=(num_honest, size))).astype(np.float32)


def mean_of(differences_MN: np.ndarray, weights: list[float], free_rms: float = 0.0) -> np.ndarray:
    mean_N: np.ndarray = Agreement.of(differences_MN, weights, free_rms).coefficients_M @ differences_MN
    return mean_N


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(3, 9),
    st.floats(0.0, 1.0),
    st.lists(st.floats(1.0, 2.0), min_size=9, max_size=9),
)
def test_the_mean_of_honest_contributions_is_left_as_it_is(
    seed: int, num_honest: int, common: float, weights: list[float]
) -> None:
    """Alike in how far they go, at whatever cosine to each other (0 to 1)."""
    differences_MN = contributions(seed, num_honest, common=common, own=math.sqrt(1 - common**2) + 0.01)
    agreement = Agreement.of(differences_MN, weights[:num_honest], 0.0)
    assert (agreement.factors_M == 1).all()
    assert max(max(agreement.opposition(own) or [0.0]) for own in range(num_honest)) < 0.1
    expected_N = np.average(differences_MN, axis=0, weights=weights[:num_honest])
    np.testing.assert_allclose(agreement.coefficients_M @ differences_MN, expected_N, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 1.5, 3.0, 100.0])
@pytest.mark.parametrize("num_honest", [3, 4, 9])
def test_noise_pulls_no_further_aside_than_an_honest_contribution(num_honest: int, size: float) -> None:
    honest_MN = contributions(1, num_honest, common=0.9, own=0.4)
    noise_N = size * np.random.default_rng(2).normal(size=honest_MN.shape[1])
    all_MN = np.vstack([honest_MN, noise_N]).astype(np.float32)
    weights = [1.0] * num_honest + [2.0]
    mean_N, honest_mean_N = mean_of(all_MN, weights), mean_of(honest_MN, weights[:-1])
    share = 2 / (num_honest + 2)
    # What is left of the noise: MAX_DEVIATION times the honest deviation, 0.4, and what lies along the median.
    assert rms(mean_N - (1 - share) * honest_mean_N) <= share * MAX_DEVIATION * 0.4 * 2


def test_work_against_the_others_is_bounded_like_noise() -> None:
    honest_MN = contributions(3, 4, common=0.9, own=0.4)
    against_N = -3 * honest_MN.mean(axis=0)
    mean_N = mean_of(np.vstack([honest_MN, against_N]).astype(np.float32), [1.0] * 4 + [2.0])
    honest_N = honest_MN.mean(axis=0)
    along = float(mean_N @ honest_N / (honest_N @ honest_N))
    assert along > 0.4  # without it, (4 - 6) / 6: backwards


def test_a_member_that_has_done_more_of_the_same_counts_whole() -> None:
    differences_MN = contributions(4, 5, common=0.9, own=0.4)
    differences_MN[4] *= 4
    assert (Agreement.of(differences_MN, [1.0] * 5, 0.0).factors_M == 1).all()


def test_where_most_have_only_begun_deviations_are_held_to_what_is_usual() -> None:
    """A long contribution beside short ones that go more in one direction than it does."""
    differences_MN = contributions(6, 4, common=0.7, own=0.7)
    rng = np.random.default_rng(7)
    differences_MN[0] = 8 * (0.2 * differences_MN[1:].mean(axis=0) + 0.98 * rng.normal(size=differences_MN.shape[1]))
    assert Agreement.of(differences_MN, [1.0] * 4, 0.0).factors_M[0] < 0.5
    assert Agreement.of(differences_MN, [1.0] * 4, 0.0, stretch=8.0).factors_M[0] == 1
    differences_MN[0] = 24 * rng.normal(size=differences_MN.shape[1])
    assert Agreement.of(differences_MN, [1.0] * 4, 0.0, stretch=8.0).factors_M[0] < 0.5


def test_rows_that_only_one_member_has_touched_are_learnt() -> None:
    """An embedding's rows of rare tokens: the others have not moved them at all."""
    differences_MN = np.zeros((4, 4096), np.float32)
    differences_MN[0, :1000] = 0.01
    agreement = Agreement.of(differences_MN, [1.0] * 4, FREE_DEVIATION * 0.01)
    assert (agreement.factors_M == 1).all()
    np.testing.assert_allclose(agreement.coefficients_M @ differences_MN, differences_MN.mean(axis=0), rtol=1e-5)


def opposition(differences_MN: np.ndarray) -> list[list[float] | None]:
    """What each member finds."""
    weights = np.random.default_rng(0).uniform(0.5, 2, len(differences_MN)).tolist()
    agreement = Agreement.of(differences_MN.astype(np.float32), weights, 0.0)
    return [agreement.opposition(own) for own in range(len(weights))]


@pytest.mark.parametrize(("num_honest", "num_hostile"), [(2, 1), (3, 1), (3, 2), (4, 1), (6, 2), (5, 4)])
@pytest.mark.parametrize("common", [0.5, 0.9])
def test_the_opposite_of_one_s_work_opposes_the_others(num_honest: int, num_hostile: int, common: float) -> None:
    """Cosines of honest members are 0.25 and 0.81. Lengths and weights make no difference."""
    work_MN = contributions(3, num_honest + num_hostile, common=common, own=math.sqrt(1 - common**2))
    work_MN[num_honest:] *= -3
    work_MN[0] *= 5
    for found in opposition(work_MN)[:num_honest]:
        assert found is not None
        assert found[:num_honest] == [0.0] * num_honest
        assert min(found[num_honest:]) > 0.8
    assert opposition(work_MN)[num_honest:] == [None] * num_hostile


@pytest.mark.parametrize("num_members", [2, 4, 6])
def test_of_two_halves_none_opposes_the_other(num_members: int) -> None:
    work_MN = contributions(3, num_members, common=0.9, own=0.4)
    work_MN[num_members // 2 :] *= -1
    assert all(found is None or max(found) == 0 for found in opposition(work_MN))


def test_where_members_hardly_agree_none_opposes_the_others() -> None:
    """With 4,096 values cosines scatter by 0.016; the usual one is 0.04 and then 0.25."""
    for common, expected in ((0.2, 0.0), (0.5, 1.0)):
        work_MN = contributions(8, 5, common=common, own=math.sqrt(1 - common**2))
        work_MN[4] = -work_MN[:4].sum(axis=0)
        assert opposition(work_MN)[:4] == [[0.0] * 4 + [expected]] * 4


@pytest.mark.parametrize("size", [0.0, 1.0, 30.0])
def test_noise_or_nothing_opposes_nobody(size: float) -> None:
    work_MN = contributions(9, 5, common=0.7, own=0.7)
    work_MN[4] = size * np.random.default_rng(2).normal(size=work_MN.shape[1])
    assert max(max(found) for found in opposition(work_MN)[:4] if found is not None) < 0.1


def test_it_takes_more_than_to_be_against_most_others() -> None:
    """Cosines of a, b and v are 0.5, 0.05 and -0.3; two hostile members side with a and b, against v."""
    cosine_MM = np.array(
        [[1, 0.5, 0.05, 0.6, 0.6], [0.5, 1, -0.3, 0.6, 0.6], [0.05, -0.3, 1, -0.6, -0.6]] + [[0.6, 0.6, -0.6, 1, 1]] * 2
    )
    work_MN = np.linalg.cholesky(cosine_MM + 1e-6 * np.eye(5)) @ np.random.default_rng(3).normal(size=(5, 1 << 16))
    found = opposition(work_MN)
    assert found[0] is not None
    assert found[0][2] == 0  # what points with its own work does not oppose it
    assert found[1] is not None
    assert found[1][2] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("scale_by", [1e-38, 1e-20, 1.0, 1e30])
def test_magnitude_does_not_matter(scale_by: float) -> None:
    differences_MN = contributions(5, 4, common=0.9, own=0.4)
    differences_MN[3] = np.random.default_rng(0).normal(0, 3, 4096)
    plain = Agreement.of(differences_MN, [1.0] * 4, 0.0)
    scaled = Agreement.of((differences_MN * np.float32(scale_by)), [1.0] * 4, 0.0)
    np.testing.assert_allclose(plain.coefficients_M, scaled.coefficients_M, rtol=1e-2)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 40))
def test_a_mean_is_never_longer_than_the_longest_contribution(seed: int, num_members: int, size: int) -> None:
    """What a reducer hands out must pass the receivers' check, whatever has come in."""
    rng = np.random.default_rng(seed)
    differences_MN = (rng.normal(size=(num_members, size)) * 10.0 ** rng.uniform(-3, 3, (num_members, 1))).astype(
        np.float32
    )
    weights = rng.uniform(0.1, 3, num_members)
    lengths = np.sqrt(np.mean(np.square(differences_MN, dtype=np.float64), axis=1))
    bound = float(np.average(lengths, weights=weights))
    assert rms(mean_of(differences_MN, weights.tolist())) <= bound * TOLERANCE


def test_nothing_moved_is_no_division_by_zero() -> None:
    agreement = Agreement.of(np.zeros((5, 10), np.float32), [1.0] * 5, 0.0)
    np.testing.assert_allclose(agreement.coefficients_M, 0.2)


def test_two_contributions_have_no_majority() -> None:
    differences_MN = np.array([[1.0, 0.0], [0.0, 9.0]], np.float32)
    np.testing.assert_allclose(Agreement.of(differences_MN, [1.0, 3.0], 0.0).coefficients_M, [0.25, 0.75])
