"""The whole loss of real models of random shapes against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spes_swarm.model.losses import LossWeights, balance_factor, language_model_loss, load_balance_loss, router_z_loss
from spes_swarm.model.sparse_model import SparseModel, build_model
from tests.helpers.loss_oracle import (
    closest_choice,
    naive_balance,
    naive_balance_factor,
    naive_losses,
    naive_router_z,
)

torch.set_num_threads(1)

weight = st.floats(0, 1)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """The settings of a small OLMoE."""
    num_experts = draw(st.integers(1, 7))
    heads = draw(st.integers(1, 3))
    return {
        "vocab_size": draw(st.integers(2, 60)),
        "hidden_size": heads * draw(st.sampled_from([4, 8])),
        "intermediate_size": 4 * draw(st.integers(1, 3)),  # grouped_mm wants rows of 16 bytes
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def logits_and_router_logits(model: Any, ids_BS: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What the loss is a function of, seen from outside: the gates' own outputs."""
    router_logits: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: router_logits.append(out[0].detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits_BSV = model(ids_BS).logits
    for hook in hooks:
        hook.remove()
    return logits_BSV, router_logits


@pytest.mark.slow
@settings(max_examples=40)
@given(
    model=models(),
    batch=st.tuples(st.integers(1, 3), st.integers(2, 9)),
    weights=st.builds(
        LossWeights,
        load_balance=weight,
        router_z=weight,
        logit_z=weight,
        decayed_balance=st.booleans(),
        decayed_balance_start=st.floats(0, 1),
        decayed_balance_fraction=st.floats(0.1, 1),
    ),
    progress=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_the_loss_of_a_sparse_model_of_any_shape_is_the_oracles(
    model: dict[str, Any], batch: tuple[int, int], weights: LossWeights, progress: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    whole = build_model("olmoe", model, seed, "cpu")
    ids_BS = torch.randint(0, model["vocab_size"], batch, generator=generator)
    held = tuple(torch.nonzero(torch.rand(model["num_experts"], generator=generator) < 0.5).flatten().tolist())
    logits_BSV, router_logits = logits_and_router_logits(whole, ids_BS)
    top_k = model["num_experts_per_tok"]
    assume(closest_choice(router_logits, top_k) > 1e-4)
    factor = 1.0
    if weights.decayed_balance:
        factor = naive_balance_factor(progress, weights.decayed_balance_start, weights.decayed_balance_fraction)
    oracle = naive_losses(logits_BSV, ids_BS, router_logits, top_k, held, factor)
    parts = language_model_loss(SparseModel(whole, held).module, ids_BS, weights, held, progress)
    # fp32 through up to three layers.
    assert parts.cross_entropy.item() == pytest.approx(oracle.cross_entropy, rel=2e-5, abs=1e-6)
    assert parts.logit_z.item() == pytest.approx(oracle.logit_z, rel=2e-5, abs=1e-6)
    total = oracle.cross_entropy + weights.logit_z * oracle.logit_z
    if weights.load_balance or weights.router_z:  # otherwise the routers are not asked
        assert parts.load_balance.item() == pytest.approx(oracle.load_balance, rel=2e-5, abs=1e-6)
        assert parts.router_z.item() == pytest.approx(oracle.router_z, rel=2e-5, abs=1e-6)
        total += weights.load_balance * oracle.load_balance + weights.router_z * oracle.router_z
    assert parts.total.item() == pytest.approx(total, rel=2e-5, abs=1e-6)


@settings(max_examples=60)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(1, 9)),
    data=st.data(),
    factor=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_router_losses_of_any_shape_are_the_oracles(
    shape: tuple[int, int, int], data: st.DataObject, factor: float, seed: int
) -> None:
    num_layers, num_tokens, num_experts = shape
    top_k = data.draw(st.integers(1, num_experts))
    held = data.draw(st.lists(st.integers(0, num_experts - 1), unique=True))
    generator = torch.Generator().manual_seed(seed)
    router_logits = [torch.randn(num_tokens, num_experts, generator=generator) * 3 for _ in range(num_layers)]
    assume(closest_choice(router_logits, top_k) > 1e-4)
    ours = load_balance_loss(router_logits, top_k, held, factor).item()
    assert ours == pytest.approx(naive_balance(router_logits, top_k, held, factor), rel=1e-5, abs=1e-6)
    assert router_z_loss(router_logits).item() == pytest.approx(naive_router_z(router_logits), rel=1e-5, abs=1e-6)


@given(progress=st.floats(0, 1), start=st.floats(0, 1), fraction=st.floats(0.01, 1))
def test_the_factor_of_local_experts_is_the_oracles(progress: float, start: float, fraction: float) -> None:
    weights = LossWeights(decayed_balance=True, decayed_balance_start=start, decayed_balance_fraction=fraction)
    assert balance_factor(weights, progress) == pytest.approx(naive_balance_factor(progress, start, fraction), abs=1e-9)
