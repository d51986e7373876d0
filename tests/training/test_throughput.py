"""Peaks of devices by name, and moving averages of speed."""

from __future__ import annotations

import pytest
import torch

from spes_swarm.training.throughput import Throughput, peak_flops, peak_flops_of


@pytest.mark.parametrize(
    ("name", "bf16_teraflops", "fp32_teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756.0, 51.0),
        ("NVIDIA A100-SXM4-80GB", 312.0, 19.5),
        ("NVIDIA L4", 121.0, 30.3),
        ("NVIDIA L40S", 362.05, 91.6),
        ("Tesla T4", None, 8.1),
    ],
)
def test_peaks_are_those_of_data_sheets(name: str, bf16_teraflops: float | None, fp32_teraflops: float) -> None:
    expected = None if bf16_teraflops is None else pytest.approx(bf16_teraflops * 1e12)
    assert peak_flops_of(name, "bf16") == expected
    assert peak_flops_of(name, "fp32") == pytest.approx(fp32_teraflops * 1e12)


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""]
)
def test_a_variant_with_another_peak_is_unknown(name: str) -> None:
    assert peak_flops_of(name, "bf16") is None


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu"), "fp32") is None
    throughput = Throughput(None)
    throughput.add(tokens=10, flops=10, seconds=1.0)
    assert throughput.mfu is None


def test_averages_move_a_tenth_of_the_way() -> None:
    throughput = Throughput(peak=4e12)
    throughput.add(tokens=100, flops=2 * 10**12, seconds=2.0)
    assert (throughput.tokens_per_second, throughput.teraflops, throughput.mfu) == (50.0, 1.0, 0.25)
    throughput.add(tokens=100, flops=2 * 10**12, seconds=1.0)
    assert throughput.tokens_per_second == pytest.approx(55.0)
    assert throughput.mfu == pytest.approx(0.275)
