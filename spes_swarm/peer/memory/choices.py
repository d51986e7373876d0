"""Settings that save memory at the cost of time, precision, or both, in the order in which a plan tries them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from spes_swarm.config.peer import PeerConfig
from spes_swarm.peer.memory.step_memory import StepShape
from spes_swarm.peer.step_settings import StepSettings


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings of a PeerConfig, by their names there; the defaults are the fastest on a GPU."""

    foreign_experts: str = "bf16"
    activation_checkpointing: str = "none"
    optimizer_states: str = "device"
    foreign_storage: str = "device"

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return asdict(self)

    def apply(self, peer: PeerConfig) -> PeerConfig:
        """Returns the peer with these settings."""
        return replace(peer, **asdict(self))


_FAST = Choice()
_ON_CPU = Choice(foreign_experts="fp32")
_LAYERS = replace(_FAST, activation_checkpointing="layers")
_INT8 = replace(_LAYERS, foreign_experts="int8")
_INT4 = replace(_LAYERS, foreign_experts="int4")

# Fastest first. To add a setting, add a field to Choice, and a line here at the right place.
_CHOICES = {
    "cuda": (
        _FAST,
        replace(_FAST, activation_checkpointing="selective"),
        _LAYERS,
        _INT8,
        replace(_INT8, optimizer_states="host"),
        replace(_INT4, optimizer_states="host"),
        replace(_INT8, optimizer_states="host", foreign_storage="host"),
    ),
    "cpu": (
        _ON_CPU,
        replace(_ON_CPU, activation_checkpointing="layers"),
        _LAYERS,
        _INT8,
        _INT4,
    ),
}


def choices(device: torch.device) -> tuple[Choice, ...]:
    """Returns the settings to try on this type of device, fastest first."""
    return _CHOICES[device.type]


def step_shape(peer: PeerConfig, device: torch.device, num_held: int) -> StepShape:
    """Returns the settings that determine the activations of this peer's steps."""
    settings = StepSettings.of(peer, device)
    return StepShape(
        num_held=num_held,
        foreign_experts=settings.foreign_experts,
        foreign_storage=settings.foreign_storage,
        precision=settings.precision,
        activation_checkpointing=peer.activation_checkpointing,
        on_gpu=device.type == "cuda",
    )
