"""Kernels and sparse experts against loops in float64 and against transformers' own experts."""

from __future__ import annotations

import importlib
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig, OlmoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.experts import SparseExperts, check_supported
from spes_swarm.model.kernels import KERNELS, grouped_mm_applies, load_kernel, torch_kernel

torch.set_num_threads(1)

NUM_EXPERTS, DIM, FFN, TOP_K = 5, 8, 12, 2


def naive_grouped(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    rows, start = [x.new_zeros((0, w.shape[1]))], 0
    for group, count in enumerate(counts):
        rows += [torch.stack([w[group] @ row for row in x[start : start + count]])] if count else []
        start += count
    return torch.cat(rows)


def ends_of(counts: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@pytest.mark.slow
@settings(max_examples=80)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    dim=st.sampled_from([1, 3, 4, 7, 8, 16]),
    ffn=st.sampled_from([1, 4, 5, 12]),
    trained=st.booleans(),
    expanded=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_torch_kernel_matches_a_loop_forward_and_backward(
    counts: list[int], dim: int, ffn: int, trained: bool, expanded: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(counts), dim, generator=generator).requires_grad_()
    w = torch.randn(len(counts), ffn, dim, generator=generator).requires_grad_(trained)
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    y, y64 = torch_kernel(x, w, ends_of(counts)), naive_grouped(x64, w64, counts)
    g = torch.ones(1, 1).expand(y.shape) if expanded else torch.randn(y.shape, generator=generator)
    y.backward(g)  # type: ignore[no-untyped-call]
    if y64.requires_grad:
        y64.backward(g.double())  # type: ignore[no-untyped-call]
    # Sums of at most 25 products of values below about 4, in fp32.
    assert_near(y, y64, atol=1e-5)
    assert x.grad is not None
    assert_near(x.grad, _grad(x64), atol=1e-5)
    if trained:
        assert w.grad is not None, "also without rows: a gradient of zeros"
        assert_near(w.grad, _grad(w64), atol=1e-5)
    else:
        assert w.grad is None


def assert_near(ours: Tensor, reference: Tensor, atol: float, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), reference.double(), rtol=rtol, atol=atol)


def _grad(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


@pytest.mark.parametrize(
    ("dtype", "dim", "ffn", "applies"),
    [
        (torch.float32, 8, 12, True),
        (torch.float32, 7, 12, False),
        (torch.float32, 8, 5, False),
        (torch.bfloat16, 8, 16, True),
        (torch.bfloat16, 8, 12, False),
        (torch.float64, 8, 12, False),
    ],
)
def test_grouped_mm_is_used_exactly_where_it_applies(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dim: int, ffn: int, applies: bool
) -> None:
    calls = []
    original = torch.nn.functional.grouped_mm

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", spy)
    x = torch.randn(6, dim, dtype=dtype, requires_grad=True)
    w = torch.randn(3, ffn, dim, dtype=dtype, requires_grad=True)
    torch.autograd.backward(torch_kernel(x, w, ends_of([1, 0, 5])).sum())
    assert len(calls) == (3 if applies else 0)
    assert grouped_mm_applies(x, w) == applies


def test_the_loop_and_grouped_mm_agree_on_a_misaligned_start() -> None:
    storage = torch.randn(1 + 6 * 8)
    x = storage[1:].view(6, 8)
    w = torch.randn(3, 4, 8)
    assert not grouped_mm_applies(x, w)
    assert grouped_mm_applies(x.clone(), w)
    ends = ends_of([2, 1, 3])
    torch.testing.assert_close(torch_kernel(x, w, ends), torch_kernel(x.clone(), w, ends), rtol=1e-5, atol=1e-6)


def test_autocast_casts_both_operands() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    w = torch.randn(3, 16, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch_kernel(x, w, ends_of([2, 1, 3]))
    torch.autograd.backward(y.float().sum())
    assert y.dtype == torch.bfloat16
    reference = naive_grouped(x.detach().bfloat16().double(), w.detach().bfloat16().double(), [2, 1, 3])
    torch.testing.assert_close(y.double(), reference, rtol=1e-2, atol=1e-2)  # bf16 has 8 bits of mantissa
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 9], [0, 0, 0, 4], [0, 0, 0, 0], [7, 1, 1, 0]])
def test_the_torch_kernel_on_cuda(dtype: torch.dtype, counts: list[int]) -> None:
    x = torch.randn(sum(counts), 64, device="cuda", requires_grad=True)
    w = torch.randn(4, 32, 64, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = torch_kernel(x, w, ends_of(counts, "cuda"))
    g = torch.randn_like(y)
    y.backward(g)  # type: ignore[no-untyped-call]
    x64, w64 = (t.detach().to(dtype).double().requires_grad_() for t in (x, w))
    y64 = naive_grouped(x64, w64, counts)
    if y64.requires_grad:
        y64.backward(g.double())  # type: ignore[no-untyped-call]
    atol = 1e-4 if dtype == torch.float32 else 0.2
    assert_near(y, y64, atol, rtol=1e-2)
    assert_near(_grad(x), _grad(x64), atol, rtol=1e-2)
    assert_near(_grad(w), _grad(w64), atol, rtol=1e-2)


def test_unknown_and_uninstalled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="known: megablocks, torch"):
        load_kernel("tensor")
    assert set(KERNELS) == {"torch", "megablocks"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install"):
        load_kernel("megablocks")


def install(root: Path, monkeypatch: pytest.MonkeyPatch, modules: dict[str, str]) -> None:
    """Makes modules that can be imported in this test, from their files' names and sources."""
    for name, source in modules.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(root)
    for name in ("megablocks", "megablocks.grouped_gemm_util", "grouped_gemm", "stk"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()


@pytest.mark.parametrize(
    ("modules", "why"),
    [
        ({"megablocks/__init__.py": ""}, r"needs the package grouped_gemm, which is not installed: pip install"),
        ({"grouped_gemm/__init__.py": ""}, r"needs the package megablocks, which is not installed: pip install"),
        (
            {"megablocks/__init__.py": "import stk", "grouped_gemm/__init__.py": ""},
            r"needs the module stk, which is not installed: pip install",
        ),
        (
            {
                "megablocks/__init__.py": "",
                "megablocks/grouped_gemm_util.py": "ops = None",
                "grouped_gemm/__init__.py": "raise OSError('libcudart.so.12: cannot open shared object file')",
            },
            r"does not load: libcudart\.so\.12: cannot open shared object file; it must be built for this torch",
        ),
        (
            {
                "megablocks/__init__.py": "raise RuntimeError('no kernel image\\nfor this device')",
                "grouped_gemm/__init__.py": "",
            },
            r"does not load: no kernel image for this device; it must be built for this torch",
        ),
    ],
)
def test_what_the_megablocks_kernel_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: dict[str, str], why: str
) -> None:
    install(tmp_path, monkeypatch, modules)
    with pytest.raises(ConfigError, match=why) as raised:
        load_kernel("megablocks")
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_the_megablocks_kernel_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {"megablocks/__init__.py": "", "megablocks/grouped_gemm_util.py": "ops = object()"}
    install(tmp_path, monkeypatch, {**modules, "grouped_gemm/__init__.py": ""})
    with pytest.raises(ConfigError, match="kernel 'megablocks' needs a CUDA device"):
        load_kernel("megablocks")


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


def routed_batch(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, DIM, generator=generator)
    weights, index = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOP_K)
    return x, index, weights


ALL_SUBSETS = [held for size in range(NUM_EXPERTS + 1) for held in combinations(range(NUM_EXPERTS), size)]


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_every_held_subset_computes_what_transformers_computes(num_tokens: int) -> None:
    original = original_experts()
    x, index, weights = routed_batch(num_tokens)
    x_ref, weights_ref = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y_ref = original(x_ref, index, weights_ref)
    g = torch.randn(y_ref.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(y_ref, g)
    # Same fp32 products, added in another order: sums of 12 to 24 terms, with values up to a few hundred.
    for held in ALL_SUBSETS:
        module = sparse(original, held)
        x_own, weights_own = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(x_own, index, weights_own)
        assert_near(y, y_ref, atol=1e-4)
        torch.autograd.backward(y, g)
        assert_near(_grad(x_own), _grad(x_ref), atol=1e-4)
        assert_near(_grad(weights_own), _grad(weights_ref), atol=1e-4)
        for name in ("gate_up_proj", "down_proj"):
            expected = _grad(getattr(original, name))[list(held)]
            assert_near(_grad(getattr(module, name)), expected, atol=1e-4)
            assert not getattr(module, f"foreign_{name}").requires_grad
        assert {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize("held", [(), (0, 4), (0, 1, 2, 3, 4)])
def test_no_tokens_give_no_rows(held: tuple[int, ...]) -> None:
    assert sparse(original_experts(), held)(*routed_batch(0)).shape == (0, DIM)


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


def test_experts_are_views_into_live_storage() -> None:
    original = original_experts()
    module = sparse(original, (3, 1))
    for expert in range(NUM_EXPERTS):
        for name in ("gate_up_proj", "down_proj"):
            view = module.expert_tensor(name, expert)
            torch.testing.assert_close(view, getattr(original, name)[expert].detach(), rtol=0, atol=0)
            view.fill_(float(expert))
            assert (module.expert_tensor(name, expert) == expert).all()
    assert module.gate_up_proj[:, 0, 0].tolist() == [1.0, 3.0]
    assert module.foreign_down_proj[:, 0, 0].tolist() == [0.0, 2.0, 4.0]
    with pytest.raises(ValueError, match="projection"):
        module.expert_tensor("up_proj", 0)


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
    module.hold(after)
    assert module.held == tuple(sorted(after))
    assert module.gate_up_proj.shape[0] == len(after)
    assert module.foreign_gate_up_proj.shape[0] == NUM_EXPERTS - len(after)
    for expert in range(NUM_EXPERTS):
        for name in ("gate_up_proj", "down_proj"):
            assert torch.equal(module.expert_tensor(name, expert), getattr(original, name)[expert])
    torch.testing.assert_close(module(*batch), expected, rtol=1e-5, atol=1e-4)


def test_holding_the_same_keeps_parameters_and_gradients() -> None:
    module = sparse(original_experts(), (3, 1))
    parameter = module.gate_up_proj
    module.hold([1, 3])
    assert module.gate_up_proj is parameter


@pytest.mark.parametrize("held", [(0, 0), (5,), (-1,)])
def test_impossible_holdings_are_refused_and_change_nothing(held: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="0 to 4"):
        sparse(original_experts(), held)
    module = sparse(original_experts(), (2,))
    with pytest.raises(ConfigError, match="0 to 4"):
        module.hold(held)
    assert module.held == (2,)


def test_bf16_foreign_experts_take_half_the_memory_and_compute_what_autocast_computes() -> None:
    original = original_experts()
    exact, rounded = sparse(original, (1,)), sparse(original, (1,), foreign_dtype=torch.bfloat16)
    assert rounded.foreign_down_proj.nbytes * 2 == exact.foreign_down_proj.nbytes
    assert rounded.down_proj.dtype == torch.float32
    batch = routed_batch(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(exact(*batch), rounded(*batch))
    rounded.hold((1, 2))
    assert rounded.down_proj.dtype == torch.float32
    assert rounded.foreign_down_proj.dtype == torch.bfloat16


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
