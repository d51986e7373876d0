"""Selects the device, and checks what fits into device and host memory.

A peer needs, where N is the number of weights and T the number trained here (shared layers and held experts):

- on the device: 4 bytes per weight, 12 more per trained weight (gradient, two AdamW moments), and during a step the
  logits of the batch with their gradient;
- in host memory: the reference (4 N bytes), the contribution (4 T) and, during a round, its results at the codec's
  size. For a GPU the model is first built on the host, too (4 N beside the reference).

This is a lower bound: activations come on top. So `auto` leaves part of the memory free, and only what cannot possibly
fit is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.experts_wanted import ExpertsWanted, parse_experts
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.host_memory import free_host_bytes
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout

_BYTES_PER_WEIGHT = 4
# A trained weight has, besides itself, a gradient and two AdamW moments.
_EXTRA_BYTES_PER_TRAINED_WEIGHT = 12
# The rest is for activations, allocator fragmentation and other processes.
_USABLE_FRACTION = 0.7


def free_bytes(device: torch.device) -> int:
    """Returns the free memory of a device in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What determines how much memory a peer needs."""

    layout: Layout
    device: torch.device
    logits_bytes: int  # per sequence, including their gradient
    result_bytes: int  # per round

    @classmethod
    def of(cls, run: RunConfig, device: torch.device) -> Workload:
        """Derives the workload from the run's shapes; allocates nothing of the model's size."""
        layout = layout_of(build_model(run.model.type, run.model.settings, run.training.seed, "cpu", on_meta=True))
        bytes_per_logit = 2 if device.type == "cuda" else 4  # bf16 under autocast, else fp32
        return cls(
            layout=layout,
            device=device,
            logits_bytes=2 * bytes_per_logit * run.training.sequence_length * run.model.vocab_size,
            result_bytes=get_codec(run.round.codec).num_bytes(layout.num_elements),
        )

    def needed(self, num_experts: int, batch_size: int) -> tuple[int, int]:
        """Returns the bytes needed on the device and on the host; on the CPU all of them are on the host."""
        weights = _BYTES_PER_WEIGHT * self.layout.num_elements
        num_trained = self.layout.blocks[SHARED_BLOCK].size + num_experts * self.layout.expert_block(0).size
        training = weights + _EXTRA_BYTES_PER_TRAINED_WEIGHT * num_trained
        exchange = weights + _BYTES_PER_WEIGHT * num_trained
        logits = batch_size * self.logits_bytes
        if self.device.type == "cpu":  # the logits are freed between a step and a round
            return 0, training + exchange + max(logits, self.result_bytes)
        return training + logits, max(exchange + self.result_bytes, 2 * weights)


def experts_that_fit(workload: Workload, wanted: ExpertsWanted, most: int, batch_size: int) -> int:
    """Returns how many experts to train: `wanted`, or for "auto" up to `most`, leaving memory for activations.

    Raises:
        CapacityError: the wanted experts do not fit, or for "auto" not even one; the message says what would fit.
    """
    free_on_device, free_on_host = free_bytes(workload.device), free_host_bytes()

    def fits(num_experts: int, num_sequences: int, fraction: float = _USABLE_FRACTION) -> bool:
        on_device, on_host = workload.needed(num_experts, num_sequences)
        return (
            workload.device.type == "cpu" or on_device <= fraction * free_on_device
        ) and on_host <= fraction * free_on_host

    if wanted == "auto":
        comfortable = _largest(most, lambda number: fits(number, batch_size))
        num_experts = comfortable or 1
    else:
        num_experts = len(wanted) if isinstance(wanted, tuple) else wanted
    if fits(num_experts, batch_size, fraction=1.0):
        return num_experts
    on_device, on_host = workload.needed(num_experts, batch_size)
    smallest = workload.needed(1, 1)
    if workload.device.type != "cpu" and on_device > free_on_device:
        where, needed, free, least = f"the memory of {workload.device}", on_device, free_on_device, smallest[0]
    else:
        where, needed, free, least = "this machine's memory", on_host, free_on_host, smallest[1]
    raise CapacityError(
        f"training {num_experts} expert{'s' if num_experts > 1 else ''} in batches of {batch_size} needs "
        f"{_gigabytes(needed)} of {where}, but only {_gigabytes(free)} is free: "
        + next(
            chain(
                _what_would_fit(fits, num_experts, batch_size),
                _what_would_fit(partial(fits, fraction=1.0), num_experts, batch_size),
            ),
            f"one expert and one sequence at a time still need {_gigabytes(least)}; use a machine with more memory, or "
            "found a run with a smaller model",
        )
    )


def _what_would_fit(fits: Callable[[int, int], bool], num_experts: int, batch_size: int) -> Iterator[str]:
    """Yields settings that would fit, best first."""
    if fewer := _largest(num_experts - 1, lambda number: fits(number, batch_size)):
        yield f"--experts {fewer} would fit"
    if smaller := _largest(batch_size - 1, lambda number: fits(num_experts, number)):
        yield f"--batch-size {smaller} would fit"
    if smaller := _largest(batch_size - 1, lambda number: fits(1, number)):
        yield f"--experts 1 --batch-size {smaller} would fit"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `most` that fits, or 0. If a number fits, all smaller ones must fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def plan_experts(run: RunConfig, peer: PeerConfig, device: torch.device) -> int:
    """Returns how many experts this peer will train, before anything large is opened or built.

    Raises:
        ConfigError: the model lacks the wanted experts, or the batch is too large.
        CapacityError: see `experts_that_fit`.
    """
    wanted = parse_experts(peer.experts, run.model.num_experts)
    batch_size = run.training.batch_size_of(peer.batch_size)
    return experts_that_fit(Workload.of(run, device), wanted, run.experts_per_peer, batch_size)


def choose_device(name: str) -> torch.device:
    """Returns the named device; "auto" is CUDA if it is usable, else the CPU.

    Raises:
        ConfigError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as exc:
        raise ConfigError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from exc
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was requested, but this machine has no usable CUDA device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r} was requested, but this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return device
