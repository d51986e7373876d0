"""Kernels against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.kernels import KERNELS, Groups, grouped_mm_applies, load_kernel

torch.set_num_threads(1)


def naive(x: Tensor, w: Tensor, g: Tensor, counts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the product of one row at a time, and the gradients of x and w for the output's gradient g."""
    y, grad_x, grad_w = g.new_zeros(g.shape), x.new_zeros(x.shape), w.new_zeros(w.shape)
    row = 0
    for group, count in enumerate(counts):
        for _ in range(count):
            y[row] = w[group] @ x[row]
            grad_x[row] = w[group].T @ g[row]
            grad_w[group] += torch.outer(g[row], x[row])
            row += 1
    return y, grad_x, grad_w


def groups_of(counts: list[int], device: str = "cpu") -> Groups:
    return Groups(torch.tensor(counts, device=device).cumsum(0).to(torch.int32))


def draw(
    counts: list[int], dim: int, ffn: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (sum(counts), dim), (len(counts), ffn, dim), (sum(counts), ffn)
    x, w, g = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return x, w, g


def assert_products(kernel: str, counts: list[int], x: Tensor, w: Tensor, g: Tensor, atol: float, rtol: float) -> None:
    own, groups = load_kernel(kernel), groups_of(counts, x.device.type)
    found = own.product(x, w, groups), own.input_gradient(g, w, groups), own.weight_gradient(g, x, groups)
    for ours, reference in zip(found, naive(x.double(), w.double(), g.double(), counts), strict=True):
        assert ours.dtype == x.dtype
        torch.testing.assert_close(ours.double(), reference, rtol=rtol, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["torch", "loop"])
@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    dim=st.sampled_from([1, 3, 4, 7, 8, 16]),
    ffn=st.sampled_from([1, 4, 5, 12]),
    seed=st.integers(0, 999),
)
def test_kernels_match_a_loop(kernel: str, counts: list[int], dim: int, ffn: int, seed: int) -> None:
    # Sums of at most 25 products of values below about 4, in fp32.
    assert_products(kernel, counts, *draw(counts, dim, ffn, seed), atol=1e-5, rtol=1e-5)


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
    x, w, g = draw([1, 0, 5], dim, ffn, seed=0, dtype=dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]  # bf16 has 8 bits of mantissa
    assert_products("torch", [1, 0, 5], x, w, g, atol=5 * tolerance, rtol=tolerance)
    assert len(calls) == (3 if applies else 0)
    assert grouped_mm_applies(x, w, dim, ffn) == applies


def test_the_loop_and_grouped_mm_agree_on_a_misaligned_start() -> None:
    storage = torch.randn(1 + 6 * 8)
    x = storage[1:].view(6, 8)
    w = torch.randn(3, 4, 8)
    assert not grouped_mm_applies(x, w, 8, 4)
    assert grouped_mm_applies(x.clone(), w, 8, 4)
    kernel, groups = load_kernel("torch"), groups_of([2, 1, 3])
    torch.testing.assert_close(kernel.product(x, w, groups), kernel.product(x.clone(), w, groups), rtol=1e-5, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["torch", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 5, 9], [0, 0, 0, 4], [7, 1, 1, 0]])
def test_kernels_on_cuda(kernel: str, dtype: torch.dtype, counts: list[int]) -> None:
    x, w, g = draw(counts, 64, 32, seed=0, dtype=dtype, device="cuda")
    assert_products(kernel, counts, x, w, g, atol=1e-4 if dtype == torch.float32 else 0.2, rtol=1e-2)


def test_unknown_and_uninstalled_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="known: torch, loop, megablocks"):
        load_kernel("tensor")
    assert set(KERNELS) == {"torch", "loop", "megablocks"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="needs the package megablocks, or kernels for the prebuilt one, and neither"):
        load_kernel("megablocks")


def test_counts_are_read_from_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter([[1, 1, 4]])  # a second one fails
    monkeypatch.setattr(Tensor, "tolist", lambda _: next(reads))
    groups = Groups(torch.tensor([1, 1, 4]))
    assert list(groups.counts) == list(groups.counts) == [1, 0, 3]
    assert Groups(groups.ends_G, [1, 0, 3]).counts == [1, 0, 3]
