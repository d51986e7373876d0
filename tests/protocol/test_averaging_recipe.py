"""How a result follows from its contributions, and which results do not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import permutations
from random import Random
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.decoding import unpack
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.recipe import Recipe, Share, fault_of, mean
from spes_swarm.protocol.consensus.codec import CODECS, get_codec
from tests.helpers.mutation import mutated
from tests.helpers.signed_exchange import differences, hold_exchange

CODEC_NAMES = sorted(CODECS)
FREE_RMS = {"clipped": 1e-4, "plain": math.inf}


def recipe_of(
    num_members: int, num_elements: int, codec: str = "fp32", result_codec: str = "fp32", **fields: Any
) -> Recipe:
    shares = tuple(Share(f"peer {i}", bytes([i]) * 32, 1.0 + i, 1.0, math.inf, full=False) for i in range(num_members))
    made = Recipe(4, num_elements, codec, result_codec, 1e-4, 1.0, shares)
    return dataclasses.replace(made, **fields)


def fp32(values_N: NDArray[Any]) -> bytes:
    return values_N.astype("<f4").tobytes()


# The recipe.


def test_a_recipe_is_read_back_from_its_encoding() -> None:
    recipe = recipe_of(3, 100, "int4", "int8", free_rms=math.inf)
    assert Recipe.from_content(unpack(recipe.wire)) == recipe
    assert unpack(recipe.wire)[-1][1] == ["peer 1", b"\1" * 32, 2.0, 1.0, math.inf, False]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("part", [-1, 2**32, True, 1.0, "1"]),
        ("num_elements", [0, -1, 2**20 + 1, True, 1.0]),
        ("codec", ["", "int3", b"fp32", 1]),
        ("result_codec", ["", "int3", None]),
        ("free_rms", [-1.0, math.nan, 1, None]),
        ("stretch", [0.5, math.inf, math.nan, 1]),
        ("shares", [[], {}, None, [[]], [1]]),
    ],
)
def test_a_recipe_with_an_impossible_field_is_refused(field: str, values: list[Any]) -> None:
    fields = [each.name for each in dataclasses.fields(Recipe)]
    for value in values:
        content = recipe_of(2, 10).content
        content[fields.index(field)] = value
        with pytest.raises(ProtocolError, match="malformed: not a "):
            Recipe.from_content(content)


@pytest.mark.parametrize(
    ("position", "values"),
    [
        (0, [b"peer", None, 3, "peer 1"]),  # a peer contributes once
        (1, [b"", bytes(31), "k" * 32]),
        (2, [0.0, -1.0, math.inf, math.nan, 1]),
        (3, [0.0, -0.5, 1.1, math.nan, 1]),
        (4, [-1.0, math.nan, 1]),
        (5, [0, 1, None]),
    ],
)
def test_a_share_with_an_impossible_field_is_refused(position: int, values: list[Any]) -> None:
    for value in values:
        content = recipe_of(2, 10).content
        content[-1][0][position] = value
        with pytest.raises(ProtocolError, match="malformed: not a "):
            Recipe.from_content(content)


def test_no_mutation_of_a_recipe_raises_another_error_or_has_its_digest() -> None:
    random = Random(4)
    wires = [recipe_of(3, 100, "int4", "int8").wire, recipe_of(2, 50).wire]
    for _ in range(3000):
        data = mutated(random, *random.sample(wires, 2))
        try:
            read = Recipe.from_content(unpack(data))
        except ProtocolError:
            continue
        if msgpack.packb(read.content) == data:  # the only encoding
            assert read.digest not in {Recipe.from_content(unpack(wire)).digest for wire in wires}


# The mean.


@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_without_clipping_it_is_the_weighted_mean(num_members: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values_MN, weights_M = rng.standard_normal((num_members, 33)), rng.uniform(0.1, 3, num_members)
    mean_N, agreement = mean(list(values_MN.astype(np.float32)), weights_M.tolist(), math.inf, 1.0)
    np.testing.assert_allclose(mean_N, np.average(values_MN, axis=0, weights=weights_M), rtol=1e-5, atol=1e-6)
    assert agreement.factors_M.tolist() == [1.0] * num_members
    assert agreement.opposition(0) is None  # nothing is compared


@pytest.mark.parametrize(
    "values",
    [
        # Contributions whose median is zero, or nearly, so that there is no common direction.
        [[1, 0], [-1, 0], [0, 1], [0, -1]],
        [[1, 0], [-1, 1e-9], [0, 1], [0, -1]],
        [[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]],
        # Equal ones, and one that is longer: they deviate from each other by rounding only.
        [[0.1, 0.2], [0.1, 0.2], [1e6, 2e6]],
        [[0.1, 0.2], [0.3, 0.6], [0.7, 1.4]],
        [[1e-40, 3e-42], [1e-42, 1e-45], [3e-45, 1e-45]],
        [[1e37, 3e36], [-1e37, 1e36], [2e37, 1e36]],
        [[0, 0], [0, 0], [1, 1]],
    ],
)
@pytest.mark.parametrize("free_rms", [0.0, 1e-4])
def test_the_last_bits_never_decide(values: list[list[float]], free_rms: float) -> None:
    """In another order, and with noise in the last bits, sums differ as they do on another machine."""
    rng = np.random.default_rng(1)
    base_MN = np.tile(np.array(values, dtype=np.float32), (1, 50))
    weights = [1.0 + 0.1 * i for i in range(len(values))]
    recipe = recipe_of(len(values), base_MN.shape[1], free_rms=free_rms)
    shares = tuple(dataclasses.replace(s, weight=w) for s, w in zip(recipe.shares, weights, strict=True))
    recipe = dataclasses.replace(recipe, shares=shares)
    contributions = [fp32(base_N) for base_N in base_MN]
    for order in permutations(range(len(values))):
        noise_MN = 1 + 1e-9 * rng.standard_normal(base_MN.shape)
        shuffled_MN = (base_MN * noise_MN).astype(np.float32)[list(order)]
        columns_N = rng.permutation(base_MN.shape[1])
        result_N = np.empty_like(base_MN[0])
        with np.errstate(all="ignore"):
            result_N[columns_N] = mean(list(shuffled_MN[:, columns_N]), [weights[i] for i in order], free_rms, 1.0)[0]
        assert fault_of(recipe, fp32(result_N), contributions) is None


# Results.


@pytest.mark.parametrize("free_rms", FREE_RMS)
@pytest.mark.parametrize("result_codec", CODEC_NAMES)
@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_an_honest_result_is_never_faulty(codec: str, result_codec: str, free_rms: str) -> None:
    rng = np.random.default_rng(7)
    for num_elements in (1, 2, 63, 64, 65, 1000):
        for num_members in (1, 2, 3, 5):
            values = differences(rng, num_members, num_elements)
            recipe = recipe_of(num_members, num_elements, codec, result_codec, free_rms=FREE_RMS[free_rms])
            contributions = [get_codec(codec).encode(each) for each in values]
            decoded = [get_codec(codec).decode(each, num_elements) for each in contributions]
            order = rng.permutation(num_members).tolist()  # of the sum, on this machine
            weights = [recipe.shares[i].weight for i in order]
            mean_N, _ = mean([decoded[i] for i in order], weights, recipe.free_rms, 1.0)
            for noise in (0.0, 1e-7):
                near_N = (mean_N * (1 + noise * rng.standard_normal(num_elements))).astype(np.float32)
                assert fault_of(recipe, get_codec(result_codec).encode(near_N), contributions) is None


@settings(max_examples=200)
@given(
    st.sampled_from(["int4", "int8"]),
    st.integers(1, 200),
    st.sampled_from([1.0, 1e-3 / 7, 3.3]),
    st.integers(0, 2**32 - 1),
)
def test_values_halfway_between_two_codes_may_be_rounded_either_way(
    codec: str, num_elements: int, step: float, seed: int
) -> None:
    """Of a block, one flip moves the scale, and with it all values."""
    rng, lowest = np.random.default_rng(seed), {"int4": -8, "int8": -128}[codec]
    codes_N = rng.integers(lowest, -lowest - 1, num_elements) + 0.5
    codes_N[rng.integers(num_elements)] = lowest
    codes_N[rng.integers(num_elements)] *= rng.choice([-1, 1])  # both ends of the range are as long
    mean_N = (step * codes_N).astype(np.float32)
    elsewhere_N = (mean_N * (1 + 3e-7 * rng.standard_normal(num_elements))).astype(np.float32)
    recipe = recipe_of(1, num_elements, result_codec=codec, free_rms=math.inf)
    assert fault_of(recipe, get_codec(codec).encode(elsewhere_N), [fp32(mean_N)]) is None


def _moved_block(mean_N: FloatArray) -> FloatArray:
    moved_N = mean_N.copy()
    moved_N[64:128] = mean_N[:64]
    return moved_N


LIES: dict[str, Callable[[FloatArray, np.random.Generator], FloatArray]] = {
    "flipped": lambda mean_N, rng: -mean_N,
    "1 % longer": lambda mean_N, rng: mean_N * np.float32(1.01),
    "1 % shorter": lambda mean_N, rng: mean_N * np.float32(0.99),
    "10 % of noise": lambda mean_N, rng: (
        mean_N + 0.1 * np.sqrt(np.mean(mean_N**2)) * rng.standard_normal(len(mean_N)).astype(np.float32)
    ),
    "noise": lambda mean_N, rng: 1e-3 * rng.standard_normal(len(mean_N)).astype(np.float32),
    "zeros": lambda mean_N, rng: np.zeros_like(mean_N),
    "a moved block": lambda mean_N, rng: _moved_block(mean_N),
    "huge": lambda mean_N, rng: np.full_like(mean_N, 3e38),
}


@pytest.mark.parametrize("free_rms", FREE_RMS)
@pytest.mark.parametrize("codec", CODEC_NAMES)
@pytest.mark.parametrize("lie", LIES)
def test_another_result_is_faulty(lie: str, codec: str, free_rms: str) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        for num_members in (1, 2, 3, 16):
            reduced = hold_exchange(
                rng,
                num_members=num_members,
                num_elements=1000,
                num_parts=1,
                codec=codec,
                result_codec=codec,
                free_rms=FREE_RMS[free_rms],
                lie=lambda mean_N, rng=rng: LIES[lie](mean_N, rng),  # type: ignore[misc]
            )[0]
            payloads = [each.payload for each in reduced.contributions]
            fault = fault_of(reduced.recipe, reduced.result, payloads)
            assert fault is not None
            assert fault.startswith("the result differs from the mean of its contributions by ")


def test_what_cannot_be_decoded_is_faulty() -> None:
    values = [np.ones(4, dtype=np.float32)]
    recipe = recipe_of(1, 4)
    for result in (b"", bytes(15), fp32(np.array([1, 1, 1, np.nan])), fp32(np.array([1, 1, 1, np.inf]))):
        fault = fault_of(recipe, result, [fp32(values[0])])
        assert fault is not None
        assert fault.startswith("the result cannot be decoded: ")


def test_the_mean_may_be_zero() -> None:
    one_N = np.ones(70, dtype=np.float32)
    recipe = recipe_of(2, 70, free_rms=math.inf)
    recipe = dataclasses.replace(recipe, shares=tuple(dataclasses.replace(s, weight=1.0) for s in recipe.shares))
    assert fault_of(recipe, fp32(0 * one_N), [fp32(one_N), fp32(-one_N)]) is None
    fault = fault_of(recipe, fp32(0.01 * one_N), [fp32(one_N), fp32(-one_N)])
    assert fault == "the result differs from the mean of its contributions although that is zero"


def test_a_contribution_that_is_longer_than_its_limit_must_not_be_included() -> None:
    one_N = np.ones(4, dtype=np.float32)
    recipe = recipe_of(1, 4)

    def judged(most_energy: float) -> str | None:
        share = dataclasses.replace(recipe.shares[0], most_energy=most_energy)
        return fault_of(dataclasses.replace(recipe, shares=(share,)), fp32(one_N), [fp32(one_N)])

    assert judged(math.inf) is None
    assert judged(4.0) is None
    assert judged(4.0 * (1 - 1e-9)) is None  # another machine may add up a little less
    assert judged(3.9) == "the contribution of peer 0 is longer than stated"


@pytest.mark.parametrize("payload", [fp32(np.array([1, np.nan, 1])), fp32(np.array([1, np.inf, 1])), b"123"], ids=repr)
def test_an_honest_reducer_includes_nothing_that_it_cannot_decode(payload: bytes) -> None:
    fault = fault_of(recipe_of(1, 3), fp32(np.zeros(3)), [payload])
    assert fault is not None
    assert fault.startswith("it includes a contribution of peer 0 that cannot be decoded")


def test_from_contributions_that_overflow_nothing_follows() -> None:
    values_N = np.array([1, 3e38, 1], dtype=np.float32)
    for claimed_N in (values_N, np.zeros(3)):
        with pytest.raises(ProtocolError, match="nonfinite: "):
            fault_of(recipe_of(1, 3), fp32(claimed_N), [fp32(values_N)])


def test_from_full_values_nothing_follows() -> None:
    """They may be as long as a difference in the codec of the run, and are no lie of the reducer."""
    values_N = np.arange(1, 5, dtype=np.float32)
    recipe = recipe_of(2, 4)
    shares = (recipe.shares[0], dataclasses.replace(recipe.shares[1], full=True))
    with pytest.raises(ProtocolError, match="form: a contribution is not a difference"):
        fault_of(dataclasses.replace(recipe, shares=shares), fp32(0 * values_N), [fp32(values_N)] * 2)


def test_scales_are_applied() -> None:
    values_N = np.arange(1, 5, dtype=np.float32)
    recipe = recipe_of(1, 4)
    recipe = dataclasses.replace(recipe, shares=(dataclasses.replace(recipe.shares[0], scale=0.5),))
    assert fault_of(recipe, fp32(values_N / 2), [fp32(values_N)]) is None
    assert fault_of(recipe, fp32(values_N), [fp32(values_N)]) is not None
