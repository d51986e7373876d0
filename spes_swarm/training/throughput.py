"""How fast a peer trains: tokens and operations per second, and the share of what its device can do."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_WINDOW = 0.9  # weight of the past in the moving averages
_MIN_SECONDS = 1e-6


@dataclass(frozen=True)
class _Peak:
    """Dense matrix products of a GPU, in 1e12 operations per second, as its vendor states them."""

    names: str  # regular expression: the whole name that the driver reports
    bf16: float | None  # with fp32 accumulation; None: no bf16 units
    fp32: float  # without TF32, which torch does not use unless told to


# Dense figures as the vendors state them; where only those with 2:4 sparsity are stated, half of them. On GeForce cards
# bf16 with fp32 accumulation runs at half of the rate with fp16 accumulation. They were compared with public tables and
# articles that quote the data sheets, except those of the H200 NVL, A30, RTX 4080 and RTX 6000 Ada.
# Laptop, "D" and MIG variants have other clocks or fewer units and do not match.
_PEAKS = (
    _Peak("NVIDIA B200", 2250.0, 75.0),
    _Peak("NVIDIA H200|NVIDIA H100 80GB HBM3", 989.4, 66.9),
    _Peak("NVIDIA H100 PCIe", 756.0, 51.0),
    _Peak("NVIDIA H100 NVL|NVIDIA H200 NVL", 835.5, 60.0),
    _Peak("(NVIDIA )?A100-(SXM4|PCIE)-[48]0GB|NVIDIA A100 80GB PCIe", 312.0, 19.5),
    _Peak("NVIDIA A40", 149.7, 37.4),
    _Peak("NVIDIA A30", 165.0, 10.3),
    _Peak("NVIDIA A10", 125.0, 31.2),
    _Peak("NVIDIA L40S", 362.05, 91.6),
    _Peak("NVIDIA L40", 181.05, 90.5),
    _Peak("NVIDIA L4", 121.0, 30.3),
    _Peak("(NVIDIA )?RTX A6000", 154.8, 38.7),
    _Peak("NVIDIA RTX 6000 Ada Generation", 364.2, 91.1),
    _Peak("NVIDIA GeForce RTX 5090", 209.5, 104.8),
    _Peak("NVIDIA GeForce RTX 4090", 165.2, 82.6),
    _Peak("NVIDIA GeForce RTX 4080", 97.5, 48.7),
    _Peak("NVIDIA GeForce RTX 3090", 71.0, 35.6),
    _Peak("(NVIDIA )?(Tesla )?V100-SXM[23]-(16|32)GB", None, 15.7),
    _Peak("(NVIDIA )?Tesla T4", None, 8.1),
    _Peak("AMD Instinct MI300X", 1307.4, 163.4),
)


def peak_flops_of(name: str, precision: str) -> float | None:
    """Returns the peak operations per second of the GPU with this name, in "bf16" or "fp32"; None if unknown."""
    for peak in _PEAKS:
        if re.fullmatch(peak.names, name):
            teraflops = peak.bf16 if precision == "bf16" else peak.fp32
            return None if teraflops is None else teraflops * 1e12
    return None


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Returns the peak operations per second of a device; None if unknown, as that of any CPU.

    `precision` is that of matrix products. A GPU that is told to use TF32 for "fp32" has no known peak.
    """
    if device.type != "cuda" or (precision == "fp32" and torch.backends.cuda.matmul.allow_tf32):
        return None
    return peak_flops_of(torch.cuda.get_device_name(device), precision)


class Throughput:
    """Moving averages over the steps of a peer."""

    def __init__(self, peak: float | None, num_devices: int = 1) -> None:
        """Takes the peak of each device in operations per second, None if unknown."""
        self._peak = None if peak is None else num_devices * peak
        self.tokens_per_second = 0.0
        self._flops_per_second = 0.0

    def add(self, tokens: int, flops: int, seconds: float) -> None:
        """Adds a step; `flops` are the operations that it had to compute, see `StepFlops.model`."""
        seconds = max(seconds, _MIN_SECONDS)
        self.tokens_per_second = _average(self.tokens_per_second, tokens / seconds)
        self._flops_per_second = _average(self._flops_per_second, flops / seconds)

    @property
    def teraflops(self) -> float:
        """1e12 operations per second."""
        return self._flops_per_second / 1e12

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the devices' peak, 0 to 1; None if that is unknown."""
        return None if self._peak is None else self._flops_per_second / self._peak


def _average(past: float, value: float) -> float:
    return _WINDOW * past + (1 - _WINDOW) * value if past else value
