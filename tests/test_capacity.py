"""How many experts fit, counted in bytes by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.capacity import check_host_memory, experts_that_fit, free_bytes
from spes_swarm.errors import ConfigError
from tests.rounds import small_layout

CPU = torch.device("cpu")


def needed_bytes(num_experts: int, shared: int, expert: int, trained: int) -> float:
    """All weights once, a gradient and two moments (12 bytes) for what is trained; 30 % of the memory stays free."""
    weights = 4 * (shared + num_experts * expert)
    return (weights + 12 * (shared + trained * expert)) / 0.7


@given(st.integers(1, 8), st.integers(2, 10_000), st.integers(3, 10_000), st.integers(1, 10), st.floats(0, 2e6))
def test_as_many_as_the_bytes_allow(num_experts: int, shared: int, expert: int, want: int, free: float) -> None:
    layout = small_layout(num_experts, shared, expert)
    fit = experts_that_fit(layout, want, CPU, int(free))
    assert 1 <= fit <= want
    # A byte of tolerance: the division is done in floating point.
    if fit > 1:
        assert needed_bytes(num_experts, shared, expert, fit) <= free + 1
    if fit < want:
        assert needed_bytes(num_experts, shared, expert, fit + 1) >= int(free) - 1


def test_one_expert_is_tried_however_little_memory_there_is() -> None:
    assert experts_that_fit(small_layout(4), 4, CPU, 0) == 1


def test_a_model_without_room_is_refused_with_both_figures() -> None:
    layout = small_layout(4, 1000, 250)
    check_host_memory(layout, 12 * 2000)
    with pytest.raises(ConfigError, match=r"2,000 weights needs .* GB of this machine's memory"):
        check_host_memory(layout, 12 * 2000 - 1)


def test_what_is_free_is_measured_when_it_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = small_layout(4, shared=1000, expert=300)
    exactly_two = int(needed_bytes(4, 1000, 300, 2)) + 10
    monkeypatch.setattr("spes_swarm.capacity.free_bytes", lambda device: exactly_two)
    assert experts_that_fit(layout, 4, CPU) == 2


def test_the_memory_of_this_machine() -> None:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    total = int(lines["MemTotal"].split()[0]) * 1024
    assert 0 < free_bytes(CPU) < total


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_memory_of_the_gpu() -> None:
    free, total = torch.cuda.mem_get_info()
    assert free_bytes(torch.device("cuda")) == pytest.approx(free, abs=total * 0.05)
