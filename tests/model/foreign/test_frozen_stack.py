"""Frozen matrices in each form: how much they take, and how far they are from what was written."""

from __future__ import annotations

import pytest
import torch

from spes_swarm.model.foreign.frozen_stack import FORMS, FrozenStack, bytes_per_weight

torch.set_num_threads(1)

CPU = torch.device("cpu")


def drawn(shape: tuple[int, int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02


def stack_of(matrices: torch.Tensor, form: str) -> FrozenStack:
    stack = FrozenStack((matrices.shape[0], matrices.shape[1], matrices.shape[2]), form, CPU)
    for index, matrix in enumerate(matrices):
        stack.write(index, matrix)
    return stack


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [1, 31, 32, 64, 100])
def test_every_weight_is_within_half_a_step_of_what_was_written(form: str, columns: int) -> None:
    matrices = drawn((3, 5, columns))
    stack = stack_of(matrices, form)
    expanded = stack.expand(torch.float32)
    assert expanded.shape == matrices.shape
    assert expanded.is_contiguous()
    for index, matrix in enumerate(matrices):
        assert torch.equal(stack.read(index), expanded[index])
        for start in range(0, columns, 32):
            group, stored = matrix[:, start : start + 32], expanded[index][:, start : start + 32]
            largest = group.abs().amax(dim=1, keepdim=True)
            # Half a step, and the rounding of the scale to bf16 (8 bits) times the number of steps.
            bound = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.5 / 127 + 2**-8, "int4": 0.5 / 7 + 2**-8}[form]
            assert ((group - stored).abs() <= 1.0001 * bound * largest).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_bytes_are_those_that_are_announced(form: str) -> None:
    matrices = drawn((2, 16, 64))
    stack = stack_of(matrices, form)
    assert sum(buffer.nbytes for buffer in stack.buffers()) == matrices.numel() * bytes_per_weight(form)
    assert len(stack) == 2


@pytest.mark.parametrize("form", FORMS)
def test_writing_again_what_was_read_changes_nothing(form: str) -> None:
    stack = stack_of(drawn((2, 16, 100)), form)
    before = stack.expand(torch.float32)
    for index in range(2):
        stack.write(index, stack.read(index).clone())
    assert torch.equal(stack.expand(torch.float32), before)


@pytest.mark.parametrize("form", FORMS)
def test_zeros_stay_zeros_beside_the_largest_weights(form: str) -> None:
    matrices = torch.zeros(1, 2, 64)
    matrices[0, 0, 5] = -3.0
    assert torch.equal(stack_of(matrices, form).expand(torch.float32) != 0, matrices != 0)


@pytest.mark.parametrize("form", FORMS)
def test_bf16_is_the_rounded_fp32(form: str) -> None:
    stack = stack_of(drawn((2, 4, 64)), form)
    exact, rounded = stack.expand(torch.float32), stack.expand(torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(exact.bfloat16(), rounded)
