"""Initial weights that are cut off, against the truncated normal distribution worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spes_swarm.model import truncation
from spes_swarm.model.sparse_model import build_model, flat_from_model, layout_of
from spes_swarm.model.truncation import redraw_tails

torch.set_num_threads(1)

STD = 0.05
SETTINGS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "initializer_range": STD,
    "eos_token_id": None,
    "pad_token_id": None,
}


def matrices(seed: int, init_cutoff: float | None) -> dict[str, Tensor]:
    model = build_model("olmoe", SETTINGS, seed, "cpu", init_cutoff=init_cutoff)
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.dim() > 1}


@pytest.mark.parametrize("cutoff", [1.0, 2.0, 3.0])
def test_no_matrix_has_an_entry_beyond_and_all_entries_within_stay(cutoff: float) -> None:
    before, after = matrices(0, None), matrices(0, cutoff)
    redrawn = 0
    for name, whole in before.items():
        beyond = whole.abs() > cutoff * STD
        redrawn += int(beyond.sum())
        assert after[name].abs().max() <= cutoff * STD, name
        assert torch.equal(after[name][~beyond], whole[~beyond]), name
        assert not (after[name][beyond] == whole[beyond]).any(), name
    assert redrawn > 0, "the untruncated weights must have tails, or this shows nothing"


@pytest.mark.parametrize("cutoff", [1.0, 3.0])
def test_the_spread_is_that_of_the_truncated_normal_distribution(cutoff: float) -> None:
    weights = torch.cat([matrix.reshape(-1) for matrix in matrices(3, cutoff).values()]).double() / STD
    density = math.exp(-(cutoff**2) / 2) / math.sqrt(2 * math.pi)
    variance = 1 - 2 * cutoff * density / math.erf(cutoff / math.sqrt(2))
    # The mean of n squares is off by less than 4 standard errors; the fourth moment is below 3.
    tolerance = 4 * math.sqrt(3 / len(weights))
    assert weights.square().mean().item() == pytest.approx(variance, abs=tolerance)
    assert weights.mean().item() == pytest.approx(0, abs=4 / math.sqrt(len(weights)))


def test_equal_seeds_give_equal_bits_and_leave_the_global_random_state() -> None:
    def flat(seed: int, init_cutoff: float | None = 2.0) -> bytes:
        model = build_model("olmoe", SETTINGS, seed, "cpu", init_cutoff=init_cutoff)
        return flat_from_model(model, layout_of(model)).tobytes()

    state = torch.get_rng_state()
    first = flat(5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert flat(5) == first
    assert flat(6) != first
    assert flat(5, None) != first


def test_a_cutoff_that_no_weight_reaches_changes_nothing() -> None:
    before, after = matrices(0, None), matrices(0, 100.0)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_tails_are_found_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "_CHUNK_ELEMENTS", 7)
    matrix, vector = torch.full((5, 6), 9.0), torch.full((4,), 9.0)
    redraw_tails([matrix, vector], std=1.0, cutoff=1.5)
    assert matrix.abs().max() <= 1.5
    assert torch.unique(matrix).numel() == matrix.numel()
    assert torch.equal(vector, torch.full((4,), 9.0)), "norms and biases are no draws"
