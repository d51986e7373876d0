"""RMS norms against transformers' own and against autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from spes_swarm.model.norm import RmsNorm, replace_norms

torch.set_num_threads(1)
FEATURES = 48


def seeded(norm: Any) -> Any:
    """Returns the norm with random weights."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        norm.weight.uniform_(0.5, 1.5)
    return norm


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns an input (2, 5, D) and a gradient of the output."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn((2, 5, FEATURES), generator=generator).to(dtype).requires_grad_()
    return x, torch.randn((2, 5, FEATURES), generator=generator)


def gradients_of(norm: Any, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Returns the output and the gradients of the input and the weight."""
    output = norm(x)
    return (output.detach(), *torch.autograd.grad(output, (x, norm.weight), grad.to(output.dtype)))


@pytest.mark.parametrize("kind", [OlmoeRMSNorm, Qwen3MoeRMSNorm])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_a_replaced_norm_computes_the_same(kind: type[nn.Module], dtype: torch.dtype, tolerance: float) -> None:
    untouched = seeded(kind(FEATURES, eps=1e-5))
    model = nn.ModuleDict({"norm": seeded(kind(FEATURES, eps=1e-5))})
    weight = model["norm"].weight
    replace_norms(model)
    replaced = model["norm"]
    assert isinstance(replaced, RmsNorm)
    assert replaced.weight is weight
    x, grad = inputs(dtype)
    wanted, found = gradients_of(untouched, x, grad), gradients_of(replaced, x, grad)
    assert torch.equal(found[0], wanted[0])
    for a, b in zip(found[1:], wanted[1:], strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_only_the_input_is_kept() -> None:
    norm = RmsNorm(nn.Parameter(torch.ones(FEATURES)), 1e-5)
    x, _ = inputs(torch.float32)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        norm(x)
    assert [tensor.data_ptr() for tensor in kept if tensor.numel() == x.numel()] == [x.data_ptr()]


def test_norms_that_compute_something_else_stay() -> None:
    """Gemma's adds one to the weight; a LayerNorm subtracts the mean."""
    model = nn.ModuleDict({"gemma": GemmaRMSNorm(FEATURES), "layer": nn.LayerNorm(FEATURES)})
    replace_norms(model)
    assert isinstance(model["gemma"], GemmaRMSNorm)
    assert isinstance(model["layer"], nn.LayerNorm)
