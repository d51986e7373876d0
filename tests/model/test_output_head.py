"""The last layer and its losses against autograd in float64 on whole logits, and which models have such a layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.model import output_head
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.kernels import LoopKernel
from spes_swarm.model.output_head import IGNORED_TARGET, linear_loss, linear_nats
from spes_swarm.model.sparse_model import SparseModel, build_model

torch.set_num_threads(1)

N, D, V = 15, 6, 20
Z_WEIGHT = 0.3


def drawn(with_weight: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(N, D if with_weight else V, generator=generator) * 2
    weight = torch.randn(V, D, generator=generator).requires_grad_() if with_weight else None
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::4] = IGNORED_TARGET
    return rows.requires_grad_(), weight, targets


def wide(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def whole(rows: Tensor, weight: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the cross-entropy and the logit z-loss, from library functions on all logits."""
    logits = rows if weight is None else rows @ weight.T
    cross_entropy = torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED_TARGET)
    return cross_entropy, logits[targets != IGNORED_TARGET].logsumexp(-1).square().mean()


@pytest.mark.parametrize("with_weight", [True, False])
@pytest.mark.parametrize("chunk_elements", [1, 60, 2**24])
def test_losses_and_gradients_match_autograd_in_float64(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int, with_weight: bool
) -> None:
    monkeypatch.setitem(output_head._CHUNK_ELEMENTS, "cpu", chunk_elements)
    rows, weight, targets = drawn(with_weight)
    total, cross_entropy, logit_z = linear_loss(rows, weight, targets, Z_WEIGHT)
    torch.autograd.backward(2.0 * total)
    rows64, weight64 = wide(rows), None if weight is None else wide(weight)
    expected, expected_z = whole(rows64, weight64, targets)
    torch.autograd.backward(2.0 * (expected + Z_WEIGHT * expected_z))
    assert cross_entropy.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logit_z.item() == pytest.approx(expected_z.item(), rel=1e-6)
    assert total.item() == pytest.approx((expected + Z_WEIGHT * expected_z).item(), rel=1e-6)
    assert not cross_entropy.requires_grad
    assert not logit_z.requires_grad
    for ours, reference in ((rows, rows64), *([] if weight is None or weight64 is None else [(weight, weight64)])):
        assert ours.grad is not None
        assert reference.grad is not None
        torch.testing.assert_close(ours.grad.double(), reference.grad, rtol=1e-5, atol=1e-6)
    assert rows.grad is not None
    assert not rows.grad[targets == IGNORED_TARGET].any(), "a row without a target has no gradient"


def test_no_gradient_is_computed_that_nobody_wants() -> None:
    rows, weight, targets = drawn(with_weight=True)
    assert weight is not None
    torch.autograd.backward(linear_loss(rows.detach(), weight, targets, 0.0)[0])
    assert weight.grad is not None
    with torch.no_grad():
        assert not linear_loss(rows, weight, targets, 0.0)[0].requires_grad


def test_autocast_computes_in_bf16_with_gradients_in_fp32() -> None:
    rows, weight, targets = drawn(with_weight=True)
    assert weight is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, cross_entropy, _ = linear_loss(rows, weight, targets, 0.0)
    torch.autograd.backward(total)
    rows64, weight64 = wide(rows), wide(weight)
    expected, _ = whole(rows64, weight64, targets)
    torch.autograd.backward(expected)
    assert cross_entropy.item() == pytest.approx(expected.item(), rel=1e-2)
    assert cross_entropy.item() != expected.item()
    assert rows.grad is not None
    assert weight.grad is not None
    assert rows.grad.dtype == weight.grad.dtype == torch.float32
    for ours, reference in ((rows.grad, rows64.grad), (weight.grad, weight64.grad)):
        assert reference is not None
        assert (ours - reference).norm() < 1e-2 * reference.norm()


@pytest.mark.parametrize("chunk_elements", [60, 2**24])
def test_the_loss_of_each_row(monkeypatch: pytest.MonkeyPatch, chunk_elements: int) -> None:
    monkeypatch.setitem(output_head._CHUNK_ELEMENTS, "cpu", chunk_elements)
    rows, weight, targets = drawn(with_weight=True)
    assert weight is not None
    nats = linear_nats(rows, weight, targets)
    valid = targets != IGNORED_TARGET
    expected = torch.nn.functional.cross_entropy((rows @ weight.T)[valid], targets[valid], reduction="none")
    torch.testing.assert_close(nats[valid], expected.detach(), rtol=1e-5, atol=1e-6)
    assert not nats[~valid].any()


COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_found_where_the_logits_are_its_product(tied: bool) -> None:
    model = build_model("olmoe", COMMON | {"num_experts": 4, "tie_word_embeddings": tied}, seed=0, device="cpu")
    model.train()
    head = output_head.output_head(model)
    assert head is model.get_output_embeddings()
    assert model.training


class Bf16Only(LoopKernel):
    """Multiplies in bf16 only, as megablocks does."""

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Any) -> Tensor:
        if x_TD.dtype != torch.bfloat16:
            raise ConfigError(f"no products of {x_TD.dtype}")
        return super().product(x_TD, w_GFD, groups)


def test_the_head_is_found_with_a_kernel_for_bf16_only() -> None:
    sparse = SparseModel(build_model("olmoe", COMMON | {"num_experts": 4}, seed=0, device="cpu"), (0, 2))
    experts = [module for module in sparse.module.modules() if isinstance(module, SparseExperts)]
    kernel = Bf16Only()
    for module in experts:
        module.kernel = kernel
    assert output_head.output_head(sparse.module) is getattr(sparse.module, "lm_head")  # noqa: B009
    assert all(module.kernel is kernel for module in experts)


def test_scaled_logits_have_no_such_head() -> None:
    settings = COMMON | {"num_local_experts": 4, "logits_scaling": 4.0}
    model = build_model("granitemoe", settings, seed=0, device="cpu")
    assert output_head.output_head(model) is None
