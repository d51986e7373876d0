"""How a peer computes its steps: resolves the settings left to `auto`, and describes the model for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from spes_swarm.base import log
from spes_swarm.config.peer import OnDeviceOrHost, PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.compilation import check_compiler
from spes_swarm.model.kernel_trial import try_kernel
from spes_swarm.training.gradients import loss_weights
from spes_swarm.training.ranks.orders import Replica


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings that change what is learned only by rounding; they follow from the configuration and the device."""

    precision: Literal["fp32", "bf16"]  # of matrix products; bf16 by autocast
    foreign_experts: Literal["fp32", "bf16", "int8", "int4"]  # form of other peers' experts
    foreign_storage: OnDeviceOrHost  # where they are; see `new_storage`
    micro_batch_size: int | None  # most sequences at a time; None: as many as fit
    notes: str  # what the user should know before the model is built: clauses that begin with a semicolon

    @classmethod
    def of(cls, peer: PeerConfig, device: torch.device) -> Self:
        """Resolves every "auto", and replaces settings that have no effect.

        Under bf16 autocast, experts that are stored in bf16 give the same products as those that are cast in every
        step, so on a GPU this costs no precision. CPUs that are slow in bf16 are the rule.
        """
        without_effect = ""
        if peer.foreign_storage == "host" and device.type == "cpu":
            without_effect = "; --foreign-storage host has no effect on a CPU, which computes in host memory"
        usual: Literal["fp32", "bf16"] = "bf16" if device.type == "cuda" else "fp32"
        precision = usual if peer.precision == "auto" else peer.precision
        return cls(
            precision=precision,
            foreign_experts=usual if peer.foreign_experts == "auto" else peer.foreign_experts,
            foreign_storage="device" if without_effect else peer.foreign_storage,
            micro_batch_size=None if peer.micro_batch_size == "auto" else int(peer.micro_batch_size),
            notes=("; the first steps compile it and are slow" if peer.compile else "") + without_effect,
        )


def check_tools(peer: PeerConfig, device: torch.device) -> None:
    """Fails early if building or running the model lacks something.

    Raises:
        ConfigError: the expert kernel does not work, or no compiler works.
    """
    try_kernel(peer.kernel, device, StepSettings.of(peer, device).precision)
    if peer.compile:
        check_compiler(device)


def replica_of(
    run: RunConfig,
    peer: PeerConfig,
    device: torch.device,
    held: Sequence[int],
    micro_batch_size: int,
    settings: StepSettings,
) -> Replica:
    """Returns what each rank of a peer needs to build the model of a run, and to compute gradients of it."""
    return Replica(
        model_type=run.model.type,
        settings=dict(run.model.settings),
        held=tuple(held),
        kernel=peer.kernel,
        foreign_experts=settings.foreign_experts,
        foreign_storage=settings.foreign_storage,
        output_dir=peer.output_dir,
        log=(log.context.run, log.context.peer, peer.log_level),
        activation_checkpointing=peer.activation_checkpointing,
        compile=peer.compile,
        precision=settings.precision,
        micro_batch_size=micro_batch_size,
        num_threads=peer.num_threads,
        losses=loss_weights(run.training),
        device_type=device.type,
    )
