"""The losses of SPES against naive loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spes_swarm.model.losses import (
    LossWeights,
    balance_factor,
    cross_entropy_of_sequences,
    language_model_loss,
    load_balance_loss,
    next_tokens,
    router_z_loss,
)
from spes_swarm.model.output_head import IGNORED_TARGET
from spes_swarm.model.sparse_model import SparseModel, build_model
from tests.helpers.loss_oracle import naive_balance, naive_cross_entropy_and_z, naive_router_z

torch.set_num_threads(1)

SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 6, "intermediate_size": 12, "pad_token_id": None},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20, "head_dim": 8},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 12},
}
COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny(model_type: str) -> Any:
    return build_model(model_type, COMMON | SETTINGS[model_type], seed=0, device="cpu")


@pytest.mark.parametrize("shape", [(1, 2), (3, 5)])
def test_a_batch_without_targets_at_its_ends(shape: tuple[int, int]) -> None:
    ids = torch.randint(0, 20, shape)
    targets = next_tokens(ids)
    assert torch.equal(targets[:, :-1], ids[:, 1:])
    assert (targets[:, -1] == IGNORED_TARGET).all()


def test_a_sequence_of_one_token_is_refused() -> None:
    with pytest.raises(ValueError, match="two tokens"):
        next_tokens(torch.zeros(1, 1, dtype=torch.int64))


@pytest.mark.parametrize(("held", "factor"), [((), 1.0), ((1, 4), 0.7), ((0, 1, 2, 3, 4, 5), 0.85)])
def test_load_balance_matches_a_naive_loop(held: tuple[int, ...], factor: float) -> None:
    torch.manual_seed(0)
    router_logits = [torch.randn(11, 6, dtype=torch.float64) for _ in range(3)]
    ours = load_balance_loss(router_logits, 2, held, factor).item()
    assert ours == pytest.approx(naive_balance(router_logits, 2, held, factor), rel=1e-6)


def test_load_balance_is_one_when_even_and_num_experts_when_collapsed() -> None:
    even = torch.eye(6).repeat(4, 1) * 1e-4
    assert load_balance_loss([even], 1).item() == pytest.approx(1.0, rel=1e-6)
    collapsed = torch.zeros(7, 6)
    collapsed[:, 2] = 100.0
    assert load_balance_loss([collapsed], 1).item() == pytest.approx(6.0)


def test_load_balance_pushes_probability_away_from_loaded_experts() -> None:
    logits = torch.zeros(8, 4)
    logits[:, 3] = 1.0
    logits.requires_grad_()
    torch.autograd.backward(load_balance_loss([logits], 1))
    assert logits.grad is not None
    assert (logits.grad[:, 3] > 0).all()
    assert (logits.grad[:, :3] < 0).all()


def test_router_z_sums_over_layers() -> None:
    torch.manual_seed(0)
    router_logits = [torch.randn(11, 6, dtype=torch.float64) for _ in range(3)]
    assert router_z_loss(router_logits).item() == pytest.approx(naive_router_z(router_logits), rel=1e-6)


def test_the_decayed_factor_rises_from_start_to_one_over_the_first_fifth() -> None:
    decayed = LossWeights(decayed_balance=True)
    factors = [balance_factor(decayed, progress) for progress in (0.0, 0.05, 0.1, 0.2, 0.7)]
    assert factors == pytest.approx([0.7, 0.775, 0.85, 1.0, 1.0])
    assert balance_factor(LossWeights(), 0.0) == 1.0


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_the_whole_loss_is_the_weighted_sum_of_naive_parts(model_type: str, sparse: bool) -> None:
    model = tiny(model_type)
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    router_logits: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: router_logits.append(out[0].detach()))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    held = (1, 4)
    module = SparseModel(model, held).module if sparse else model
    weights = LossWeights(
        load_balance=0.5, router_z=0.25, logit_z=0.125, decayed_balance=True, decayed_balance_fraction=0.4
    )
    parts = language_model_loss(module, ids, weights, held, progress=0.2)
    cross_entropy, logit_z = naive_cross_entropy_and_z(logits, ids)
    balance = naive_balance(router_logits, 2, held, 0.85)
    router_z = naive_router_z(router_logits)
    # fp32 through two layers: relative errors of about 1e-6 are expected.
    assert parts.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-5)
    assert parts.logit_z.item() == pytest.approx(logit_z, rel=1e-5)
    assert parts.load_balance.item() == pytest.approx(balance, rel=1e-5)
    assert parts.router_z.item() == pytest.approx(router_z, rel=1e-5)
    total = cross_entropy + 0.5 * balance + 0.25 * router_z + 0.125 * logit_z
    assert parts.total.item() == pytest.approx(total, rel=1e-5)
    assert parts.total.requires_grad
    assert not parts.cross_entropy.requires_grad


def test_router_losses_reach_the_router() -> None:
    model = tiny("olmoe")
    ids = torch.randint(0, 50, (2, 7))
    gradients = []
    for weights in (LossWeights(load_balance=0.0, router_z=0.0), LossWeights(load_balance=1.0, router_z=1.0)):
        model.zero_grad()
        torch.autograd.backward(language_model_loss(model, ids, weights, (), 0.0).total)
        gradients.append(model.model.layers[0].mlp.gate.weight.grad.clone())
    assert not torch.allclose(gradients[0], gradients[1], atol=1e-3)


def test_evaluation_has_no_gradient_counts_no_tokens_and_restores_the_mode() -> None:
    model = tiny("mixtral")
    ids = torch.randint(0, 50, (2, 7))
    with torch.no_grad():
        expected = [model(row, labels=row).loss.item() for row in ids[:, None]]
    sparse = SparseModel(model, (0,))
    sparse.module.train()
    losses_B = cross_entropy_of_sequences(sparse.module, ids)
    assert losses_B.tolist() == pytest.approx(expected, rel=1e-5)
    assert not losses_B.requires_grad
    assert sparse.module.training
    assert sparse.pop_routed_tokens().sum() == 0
