"""Which device to train on, and how many experts fit into its memory."""

from __future__ import annotations

import psutil
import torch

from spes_swarm.errors import ConfigError
from spes_swarm.layout import SHARED_BLOCK, Layout

_BYTES_PER_WEIGHT = 4
# A trained weight has, besides itself, a gradient and two AdamW moments.
_EXTRA_BYTES_PER_TRAINED_WEIGHT = 12
# What is left for activations, the allocator's fragments and everybody else.
_USABLE_FRACTION = 0.7


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device at this moment."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def experts_that_fit(layout: Layout, want: int, device: torch.device, free: int | None = None) -> int:
    """The largest number of experts, up to `want`, that can be trained in the device's free memory; at least one.

    `free` is in bytes; it is measured when None.
    """
    budget = (free if free is not None else free_bytes(device)) * _USABLE_FRACTION
    budget -= _BYTES_PER_WEIGHT * layout.num_elements
    budget -= _EXTRA_BYTES_PER_TRAINED_WEIGHT * layout.blocks[SHARED_BLOCK].size
    per_expert = _EXTRA_BYTES_PER_TRAINED_WEIGHT * layout.expert_block(0).size
    return max(1, min(want, int(budget // per_expert)))


def check_host_memory(layout: Layout, available: int | None = None) -> None:
    """Refuses a model that this machine has no room for, before it is built: weights, reference and contribution.

    `available` is in bytes; it is measured when None.

    Raises:
        ConfigError: with both figures.
    """
    room = available if available is not None else int(psutil.virtual_memory().available)
    needed = 3 * _BYTES_PER_WEIGHT * layout.num_elements
    if needed > room:
        raise ConfigError(
            f"a model of {layout.num_elements:,} weights needs {needed / 1e9:.1f} GB of this machine's memory, and "
            f"{room / 1e9:.1f} GB are free: choose a smaller one, or a larger machine"
        )


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto" is CUDA where there is a usable one.

    Raises:
        ConfigError: there is no such device on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but this machine has no usable CUDA device")
    return device
