"""Settings of a peer that save memory at the cost of time, precision, or both, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from spes_swarm.config.peer import PeerConfig
from spes_swarm.peer.step_settings import StepSettings

# The fastest first; each is taken in addition to those before it. A value that comes later saves more. Others' experts
# go to host memory last, even after int4: that costs the 2B 18 % of its step, and each rank has its own copy there,
# while the loss with int4 differs from that with fp32 by no more than chance (both are in docs/experiments.md).
_SAVINGS = {
    "cuda": (
        ("foreign_experts", "bf16"),
        ("activation_checkpointing", "selective"),
        ("activation_checkpointing", "layers"),
        ("foreign_experts", "int8"),
        ("optimizer_states", "host"),
        ("foreign_experts", "int4"),
        ("foreign_storage", "host"),
    ),
    "cpu": (
        ("activation_checkpointing", "layers"),
        ("foreign_experts", "bf16"),
        ("foreign_experts", "int8"),
        ("foreign_experts", "int4"),
    ),
}
_NAMES = ("foreign_experts", "activation_checkpointing", "optimizer_states", "foreign_storage")


def savings(settings: Mapping[str, str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields changes of some settings, given with their values: each saves more memory than the one before it."""
    steps = _SAVINGS[device.type]
    changes: dict[str, str] = {}
    for index, (name, value) in enumerate(steps):
        if name in settings and (name, settings[name]) not in steps[index:]:
            changes = {**changes, name: value}
            yield changes


def peers_to_try(device: torch.device) -> Iterator[PeerConfig]:
    """Yields peers that train on this type of device: with the fastest settings, then with one saving after another."""
    fastest = PeerConfig(foreign_experts=StepSettings.of(PeerConfig(), device).foreign_experts)
    yield fastest
    for changes in savings(settings_of(fastest), device):
        yield replace(fastest, **changes)


def settings_of(peer: PeerConfig) -> dict[str, Any]:
    """Returns those settings of a peer that can save memory, by name."""
    return {name: getattr(peer, name) for name in _NAMES}


def as_flags(settings: Mapping[str, object]) -> str:
    """Returns settings of a PeerConfig as they are written on a command line."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in settings.items())
