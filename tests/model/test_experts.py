"""Sparse experts against transformers' own experts."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, OlmoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.expert_mlp import Routing
from spes_swarm.model.experts import SparseExperts, check_supported
from spes_swarm.model.kernels import load_kernel

torch.set_num_threads(1)

NUM_EXPERTS, DIM, FFN, TOP_K = 5, 8, 12, 2


def assert_near(ours: Tensor, reference: Tensor, atol: float, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), reference.double(), rtol=rtol, atol=atol)


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def original_experts(seed: int = 0) -> OlmoeExperts:
    config = OlmoeConfig(
        num_experts=NUM_EXPERTS, hidden_size=DIM, intermediate_size=FFN, vocab_size=16, eos_token_id=None
    )
    config._experts_implementation = "eager"
    experts = OlmoeExperts(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, generator=generator)
    return experts


def sparse(experts: Any, held: tuple[int, ...], **kwargs: Any) -> SparseExperts:
    return SparseExperts(experts.gate_up_proj, experts.down_proj, experts.act_fn, held, load_kernel("torch"), **kwargs)


def routing_on_a_gpu(slots: Tensor, num_slots: int, num_held: int) -> Routing:
    """Returns the routing as on a GPU, which computes many experts in one pass."""
    return replace(Routing.of(slots, num_slots, num_held), one_by_one=False)


def routed_batch(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, DIM, generator=generator)
    weights, index = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x, index, weights


ALL_SUBSETS = [held for size in range(NUM_EXPERTS + 1) for held in combinations(range(NUM_EXPERTS), size)]


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
@pytest.mark.parametrize("route", [Routing.of, routing_on_a_gpu])
def test_every_held_subset_computes_what_transformers_computes(num_tokens: int, route: Any) -> None:
    original = original_experts()
    x, index, weights = routed_batch(num_tokens)
    x_ref, weights_ref = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y_ref = original(x_ref, index, weights_ref)
    g = torch.randn(y_ref.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(y_ref, g)
    # Same fp32 products, added in another order: sums of 12 to 24 terms, with values up to a few hundred.
    for held in ALL_SUBSETS:
        module = sparse(original, held)
        module.route = route
        x_own, weights_own = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(x_own, index, weights_own)
        assert_near(y, y_ref, atol=1e-4)
        torch.autograd.backward(y, g)
        assert_near(_grad(x_own), _grad(x_ref), atol=1e-4)
        assert_near(_grad(weights_own), _grad(weights_ref), atol=1e-4)
        for name in ("gate_up_proj", "down_proj"):
            expected = _grad(getattr(original, name))[list(held)]
            assert_near(_grad(getattr(module, name)), expected, atol=1e-4)
        assert not any(buffer.requires_grad for buffer in module.foreign.buffers())
        assert {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("held", [(), (0, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("route", [Routing.of, routing_on_a_gpu])
def test_no_tokens_give_no_rows(held: tuple[int, ...], route: Any) -> None:
    module = sparse(original_experts(), held)
    module.route = route
    assert module(*routed_batch(0)).shape == (0, DIM)


def test_float64_agrees_to_twelve_digits() -> None:
    original = original_experts().double()
    x, index, weights = routed_batch(17)
    y = sparse(original, (3, 1))(x.double(), index, weights.double())
    torch.testing.assert_close(y, original(x.double(), index, weights.double()), rtol=1e-12, atol=1e-12)


def test_held_experts_without_tokens_get_a_gradient_of_zeros() -> None:
    module = sparse(original_experts(), (0, 4))
    index = torch.tensor([[1, 2], [2, 3]])
    torch.autograd.backward(module(torch.randn(2, DIM), index, torch.rand(2, TOP_K, requires_grad=True)).sum())
    assert module.gate_up_proj.grad is not None
    assert module.down_proj.grad is not None
    assert not module.gate_up_proj.grad.any()
    assert not module.down_proj.grad.any()


def test_experts_are_read_and_written_one_at_a_time() -> None:
    original = original_experts()
    module = sparse(original, (3, 1))
    for expert in range(NUM_EXPERTS):
        for name in ("gate_up_proj", "down_proj"):
            stacked = getattr(original, name)
            assert torch.equal(module.read(name, expert), stacked[expert])
            module.write(name, expert, torch.full(stacked.shape[1:], float(expert)))
            assert (module.read(name, expert) == expert).all()
    assert module.gate_up_proj[:, 0, 0].tolist() == [1.0, 3.0]
    assert module.fetch().matrices("down_proj", torch.float32, slice(None))[:, 0, 0].tolist() == [0.0, 2.0, 4.0]


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), (2,), (0, 3), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("after", [(), (4, 1), (0, 3), (0, 1, 2, 3, 4)])
def test_holding_others_changes_neither_values_nor_the_function(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    original = original_experts()
    module = sparse(original, before)
    batch = routed_batch(9)
    expected = module(*batch).detach()
    module.set_held(after)
    assert module.held == tuple(sorted(after))
    assert module.gate_up_proj.shape[0] == len(after)
    assert module.fetch().matrices("gate_up_proj", torch.float32, slice(None)).shape[0] == NUM_EXPERTS - len(after)
    for expert in range(NUM_EXPERTS):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(module.read(name, expert), getattr(original, name)[expert])
    torch.testing.assert_close(module(*batch), expected, rtol=1e-5, atol=1e-4)


def test_holding_the_same_keeps_parameters_and_gradients() -> None:
    module = sparse(original_experts(), (3, 1))
    parameter = module.gate_up_proj
    module.set_held([1, 3])
    assert module.gate_up_proj is parameter


@pytest.mark.parametrize("held", [(0, 0), (5,), (-1,)])
def test_impossible_holdings_are_refused_and_change_nothing(held: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="0 to 4"):
        sparse(original_experts(), held)
    module = sparse(original_experts(), (2,))
    with pytest.raises(ConfigError, match="0 to 4"):
        module.set_held(held)
    assert module.held == (2,)


def test_bf16_foreign_experts_take_half_the_memory_and_compute_what_autocast_computes() -> None:
    original = original_experts()
    exact, rounded = sparse(original, (1,)), sparse(original, (1,), foreign_form="bf16")
    sizes = [sum(buffer.nbytes for buffer in module.foreign.buffers()) for module in (exact, rounded)]
    assert sizes[0] == 2 * sizes[1] > 0
    assert rounded.down_proj.dtype == torch.float32
    batch = routed_batch(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact(*batch), rounded(*batch))
    rounded.set_held((1, 2))
    assert rounded.down_proj.dtype == torch.float32
    assert sum(buffer.nbytes for buffer in rounded.foreign.buffers()) == sizes[1] * 3 // 4


def test_routed_tokens_are_counted_in_training_mode_until_popped() -> None:
    module = sparse(original_experts(), (3, 1))
    x, index, weights = routed_batch(17)
    module.eval()
    module(x, index, weights)
    assert module.pop_routed_tokens().tolist() == [0] * NUM_EXPERTS
    module.train()
    module(x, index, weights)
    module(x, index, weights)
    expected = [2 * int((index == expert).sum()) for expert in range(NUM_EXPERTS)]
    assert module.pop_routed_tokens().tolist() == expected
    assert module.pop_routed_tokens().tolist() == [0] * NUM_EXPERTS
    assert "routed_tokens" not in module.state_dict()


def test_recomputation_under_checkpointing_counts_no_token_twice() -> None:
    module = sparse(original_experts(), (3, 1))
    x, index, weights = routed_batch(17)
    y = checkpoint(module, x.requires_grad_(), index, weights, use_reentrant=False)
    torch.autograd.backward(y.sum())
    assert module.pop_routed_tokens().sum() == 17 * TOP_K


def test_other_layouts_are_refused_with_the_reason() -> None:
    config = GptOssConfig(num_local_experts=2, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"layers\.0 \(GptOssExperts\) is not supported: has_bias is True"):
        check_supported("layers.0", GptOssExperts(config))
    undeclared = nn.Module()
    undeclared.down_proj = nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="has_gate is None"):
        check_supported("layers.0", undeclared)
    extra = original_experts()
    extra.scale = nn.Parameter(torch.zeros(5))
    with pytest.raises(ConfigError, match="additional parameters scale"):
        check_supported("layers.0", extra)
    wide = original_experts()
    wide.gate_up_proj = nn.Parameter(torch.zeros(NUM_EXPERTS, 3 * FFN, DIM))
    with pytest.raises(ConfigError, match="gate_up_proj is"):
        check_supported("layers.0", wide)
    own_gate = type("OwnGate", (OlmoeExperts,), {"_apply_gate": lambda _self, gate_up: gate_up})
    with pytest.raises(ConfigError, match="custom gating function"):
        check_supported("layers.0", own_gate(MixtralConfig(hidden_size=8, intermediate_size=8)))


def test_autocast_computes_in_bf16_and_its_gradients_are_near() -> None:
    original = original_experts()
    x, index, weights = routed_batch(17)
    gradients = []
    for enabled in (False, True):
        module = sparse(original, (0, 3))
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = module(leaf, index, weights)
        torch.autograd.backward(y.sum())
        gradients.append((y.detach(), leaf.grad, module.gate_up_proj.grad, module.down_proj.grad))
    for exact, rounded in zip(*gradients, strict=True):
        assert exact is not None
        assert rounded is not None
        assert exact.dtype == rounded.dtype == torch.float32
        assert not torch.equal(exact, rounded)
        # bf16 has 8 bits of mantissa; these are norms of hundreds of rounded values.
        assert float((exact - rounded).norm() / exact.norm()) < 0.02
