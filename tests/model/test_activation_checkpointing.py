"""Gradients with activations computed again in backward against those of the plain step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model

torch.set_num_threads(1)

# torch 2.15: what `selective` keeps does not pass the hooks that count bytes below, which later versions will change.
pytestmark = pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context:FutureWarning")

SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 6, "intermediate_size": 16},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 16, "intermediate_size": 20, "head_dim": 8},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 16},
}
COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WEIGHTS = LossWeights(load_balance=0.5, router_z=0.25, logit_z=0.125)


def step(model_type: str, kind: str, kernel: str = "torch") -> tuple[dict[str, Tensor], int, list[int]]:
    """Returns the gradients of a step, the bytes that autograd keeps for it, and the tokens that each expert got."""
    model = build_model(model_type, COMMON | SETTINGS[model_type], seed=0, device="cpu")
    sparse = SparseModel(model, (1, 4), kernel)
    checkpoint_activations(sparse.module, kind)
    sparse.module.train()
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = language_model_loss(sparse.module, ids, WEIGHTS, sparse.held, progress=0.5).total
    size = sum(kept.values())
    torch.autograd.backward(total)
    gradients = {name: p.grad for name, p in sparse.trainable_parameters() if p.grad is not None}
    return gradients, size, sparse.pop_routed_tokens().tolist()


@pytest.mark.parametrize("kind", ["layers", "selective"])
@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_gradients_are_those_of_the_plain_step(model_type: str, kind: str) -> None:
    plain, plain_size, plain_tokens = step(model_type, "none")
    ours, size, tokens = step(model_type, kind)
    assert ours.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)
    assert tokens == plain_tokens
    assert size < plain_size


def test_selective_takes_products_that_are_written_group_by_group() -> None:
    plain, _, _ = step("olmoe", "none", "loop")
    ours, _, _ = step("olmoe", "selective", "loop")
    for name, gradient in plain.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


def test_an_architecture_without_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not support it for Linear; use none"):
        checkpoint_activations(torch.nn.Linear(1, 1), "layers")
    checkpoint_activations(torch.nn.Linear(1, 1), "none")
