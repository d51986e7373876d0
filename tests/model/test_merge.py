"""The expert merge against a direct float64 transcription of SPES, Eqs. 5-6 (arXiv 2602.11543)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.model.merge import (
    merge_alpha,
    merge_due,
    merged_slots,
    nearest_experts,
    similarity,
)
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.merge_oracle import equations_5_and_6
from tests.helpers.model_state import merge_flat

Array32 = npt.NDArray[np.float32]


def random_layer(num_experts: int, ffn: int, dim: int, seed: int) -> tuple[Array32, Array32]:
    rng = np.random.default_rng(seed)
    gate_up = rng.standard_normal((num_experts, 2 * ffn, dim), dtype=np.float32)
    return gate_up, rng.standard_normal((num_experts, dim, ffn), dtype=np.float32)


def merge_layer(gate_up: Array32, down: Array32, alpha: float, k: int) -> tuple[Array32, Array32]:
    """Merges a model of one layer; the reference is read-only."""
    layout = Layout.build({"norm": (1,)}, {"x.gate_up_proj": gate_up.shape, "x.down_proj": down.shape})
    reference = np.zeros(layout.num_elements, np.float32)
    for slot in (slot for block in layout.blocks for slot in block.slots if slot.expert is not None):
        tensor = gate_up if slot.name == "x.gate_up_proj" else down
        reference[slot.start : slot.start + slot.size] = tensor[slot.expert].ravel()
    reference.flags.writeable = False
    merged = merge_flat(reference, layout, alpha, k)
    return stacked(layout, merged, "x.gate_up_proj"), stacked(layout, merged, "x.down_proj")


@settings(max_examples=60)
@given(
    num_experts=st.integers(1, 6),
    ffn=st.integers(1, 5),
    dim=st.integers(2, 5),
    alpha=st.floats(0.0, 1.0),
    k=st.integers(0, 7),
    seed=st.integers(0, 2**31),
)
def test_a_layer_merges_as_in_equations_5_and_6(
    num_experts: int, ffn: int, dim: int, alpha: float, k: int, seed: int
) -> None:
    gate_up, down = random_layer(num_experts, ffn, dim, seed)
    merged = merge_layer(gate_up, down, alpha, k)
    expected = equations_5_and_6(gate_up, down, alpha, k)
    for ours, theirs, original in zip(merged, expected, (gate_up, down), strict=True):
        assert ours.dtype == np.float32
        # At most a dozen fp32 operations on values below about 5.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=12 * 5 * 1.2e-7)
        assert ours.shape == original.shape


def test_only_the_gate_half_decides_who_is_similar() -> None:
    # Expert 0 and 1 share their gate, 0 and 2 share all the rest.
    gate_up, down = random_layer(3, 4, 4, seed=1)
    gate_up[1, :4] = gate_up[0, :4]
    gate_up[2, 4:] = gate_up[0, 4:] * 100
    gate_up[2, :4] = -gate_up[0, :4]
    merged, _ = merge_layer(gate_up, down, 1.0, 1)
    np.testing.assert_allclose(merged[0], gate_up[1], atol=1e-5)


def test_donors_are_the_copies_from_before_the_merge() -> None:
    # With alpha 1 and two experts a simultaneous update swaps them; a sequential one would make them equal.
    gate_up, down = random_layer(2, 3, 4, seed=2)
    merged_gate_up, merged_down = merge_layer(gate_up, down, 1.0, 4)
    np.testing.assert_allclose(merged_gate_up, gate_up[::-1], atol=1e-6)
    np.testing.assert_allclose(merged_down, down[::-1], atol=1e-6)


def test_ties_go_to_the_lowest_index() -> None:
    gate_up, _ = random_layer(1, 2, 3, seed=3)
    same = np.repeat(gate_up, 5, axis=0).reshape(5, -1)
    assert nearest_experts(similarity(same), 2).tolist() == [[1, 2], [0, 2], [0, 1], [0, 1], [0, 1]]


def test_similarities_that_differ_by_rounding_are_ties() -> None:
    # As on another machine, whose sums end in other bits: 1 and 2 are equally similar to 0.
    noisy = np.array([[1, 0.5, 0.5 + 1e-15], [0.5, 1, 0.1], [0.5 + 1e-15, 0.1, 1]])
    assert nearest_experts(noisy, 1)[0].tolist() == [1]
    # What agrees to 12 decimals does; what does not is a difference.
    for more, nearest in ((4e-13, 1), (6e-12, 2)):
        noisy = np.array([[1, 0.5, 0.5 + more], [0.5, 1, 0.1], [0.5 + more, 0.1, 1]])
        assert nearest_experts(noisy, 1)[0].tolist() == [nearest]


def test_a_dead_expert_is_similar_to_nobody() -> None:
    gate = np.array([[1, 0], [0, 0], [1, 1]], dtype=np.float32)
    root_half = math.sqrt(0.5)
    expected = np.array([[1.0, 0.0, root_half], [0.0, 0.0, 0.0], [root_half, 0.0, 1.0]])
    np.testing.assert_allclose(similarity(gate), expected, atol=1e-15)


def test_negative_neighbours_are_refused() -> None:
    with pytest.raises(ValueError, match="num_neighbours"):
        nearest_experts(np.eye(3), -1)


# Layers 2 and 10 sort as 10 < 2: names must decide, not order.
STACKED = {
    f"m.{layer}.experts.{tensor}": shape
    for layer in (2, 10)
    for tensor, shape in (("gate_up_proj", (5, 6, 4)), ("down_proj", (5, 4, 3)))
}


def random_reference(seed: int) -> tuple[Layout, Array32]:
    layout = Layout.build({"embed": (7, 4), "norm": (4,)}, STACKED)
    return layout, np.random.default_rng(seed).standard_normal(layout.num_elements, dtype=np.float32)


def stacked(layout: Layout, flat: Array32, name: str) -> Array32:
    slots = [slot for block in layout.blocks for slot in block.slots if slot.name == name]
    return np.stack([flat[slot.start : slot.start + slot.size].reshape(slot.shape) for slot in slots])


@st.composite
def flat_models(draw: st.DrawFn) -> tuple[Layout, Array32]:
    """A model of one to three layers, whose numbers do not sort like their names, and whose sizes may differ."""
    num_experts = draw(st.integers(1, 7))
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in draw(st.lists(st.integers(0, 20), min_size=1, max_size=3, unique=True)):
        ffn, dim = draw(st.integers(1, 4)), draw(st.integers(2, 5))
        shapes[f"m.{layer}.experts.gate_up_proj"] = (num_experts, 2 * ffn, dim)
        shapes[f"m.{layer}.experts.down_proj"] = (num_experts, dim, ffn)
    layout = Layout.build({"embed": (7, 4), "norm": (4,)}, shapes)
    seed = draw(st.integers(0, 2**31))
    return layout, np.random.default_rng(seed).standard_normal(layout.num_elements, dtype=np.float32)


@settings(max_examples=60)
@given(flat_models(), st.floats(0.0, 1.0), st.integers(0, 8))
def test_a_whole_model_merges_layer_by_layer_as_in_equations_5_and_6(
    model: tuple[Layout, Array32], alpha: float, k: int
) -> None:
    layout, reference = model
    before = reference.copy()
    merged = merge_flat(reference, layout, alpha, k)
    names = {slot.name for slot in layout.expert_block(0).slots}
    for layer in {name.rpartition(".")[0] for name in names}:
        pair = [f"{layer}.{tensor}" for tensor in ("gate_up_proj", "down_proj")]
        gate_up, down = (stacked(layout, reference, name) for name in pair)
        for name, expected in zip(pair, equations_5_and_6(gate_up, down, alpha, k), strict=True):
            np.testing.assert_allclose(stacked(layout, merged, name), expected, rtol=0, atol=12 * 5 * 1.2e-7)
    np.testing.assert_array_equal(merged[: 7 * 4 + 4], reference[: 7 * 4 + 4])
    np.testing.assert_array_equal(reference, before)


@pytest.mark.parametrize("num_experts", [2, 3, 6])
def test_with_as_many_neighbours_as_there_are_others_every_expert_moves_towards_the_mean(num_experts: int) -> None:
    gate_up, down = random_layer(num_experts, 3, 4, seed=num_experts)
    for k in (num_experts - 1, num_experts, num_experts + 5):
        for ours, original in zip(merge_layer(gate_up, down, 1.0, k), (gate_up, down), strict=True):
            mean_of_others = (original.sum(axis=0) - original) / (num_experts - 1)
            np.testing.assert_allclose(ours, mean_of_others, atol=1e-5)


def test_alpha_zero_returns_the_same_bits() -> None:
    layout, reference = random_reference(1)
    reference[-1], reference[-2] = -0.0, np.inf
    assert merge_flat(reference, layout, 0.0, 2).tobytes() == reference.tobytes()


def test_one_expert_has_nobody_to_merge_with() -> None:
    layout = Layout.build({"norm": (2,)}, {"x.gate_up_proj": (1, 4, 3), "x.down_proj": (1, 3, 2)})
    reference = np.random.default_rng(0).standard_normal(layout.num_elements, dtype=np.float32)
    assert merge_flat(reference, layout, 0.5, 4).tobytes() == reference.tobytes()


def test_the_slots_are_those_of_the_layout() -> None:
    layout, reference = random_reference(2)
    slots = list(merged_slots(reference, layout, 0.4, 3))
    assert len({(slot.name, slot.expert) for slot, _ in slots}) == len(slots) == 5 * 4
    assert all(values.shape == slot.shape for slot, values in slots)


def test_the_merge_never_writes_to_the_reference() -> None:
    layout, reference = random_reference(3)
    reference.flags.writeable = False
    merge_flat(reference, layout, 0.4, 3)
    with pytest.raises(ValueError, match="layout"):
        merge_flat(reference[:-1], layout, 0.4, 3)


def test_a_layer_without_gates_is_refused_by_name() -> None:
    layout = Layout.build({"norm": (2,)}, {"x.up_proj": (2, 4, 3), "x.down_proj": (2, 3, 2)})
    with pytest.raises(ValueError, match=r"no gate_up_proj, only \['down_proj', 'up_proj'\]"):
        merge_flat(np.zeros(layout.num_elements, np.float32), layout, 0.5, 1)


def test_alpha_decays_linearly_to_zero() -> None:
    assert merge_alpha(0, 0.1, 12_500) == 0.1
    assert merge_alpha(6_250, 0.1, 12_500) == pytest.approx(0.05)
    assert merge_alpha(12_500, 0.1, 12_500) == 0.0
    assert merge_alpha(99_999, 0.1, 12_500) == 0.0
    assert merge_alpha(0, 0.1, 0) == 0.0
    assert merge_alpha(0, 0.1, 1) == 0.1
    assert merge_alpha(1, 0.1, 1) == 0.0


@given(interval=st.integers(1, 20), steps=st.lists(st.integers(1, 30), max_size=20))
def test_a_merge_is_due_whenever_a_multiple_of_the_interval_was_passed(interval: int, steps: list[int]) -> None:
    now = 0
    for step in steps:
        passed = any(s % interval == 0 for s in range(now + 1, now + step + 1))
        assert merge_due(now, now + step, interval) == passed
        now += step


def test_interval_zero_means_no_merge_and_one_means_always() -> None:
    assert not merge_due(0, 100, 0)
    assert merge_due(3, 4, 1)
    assert not merge_due(4, 4, 1)
