"""Selects the device, and checks what fits into device and host memory.

A peer needs, where N is the number of weights and T the number trained here (shared layers and held experts):

- on the device: 8 bytes per trained weight (weight, gradient), its two AdamW moments (8 bytes, or 2 in 8 bits, unless
  they are in host memory), and the other experts in the form in which they are stored, 0.56 to 4 bytes per weight;
- in host memory: the reference (4 N bytes) and the contribution (4 T), unless they are on a disk, and during a round
  its results at the codec's size, and a copy of the moments (8 T) while a checkpoint is written. The model of a GPU is
  put together on the host, without gradients and moments.

Activations come on top (step_memory.py counts them). What Python, torch and CUDA take themselves does not count. So
`auto` leaves part of the memory free, and only what cannot possibly fit is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.base.wording import plural
from spes_swarm.config.experts_wanted import ExpertsWanted, parse_experts
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.experts import PROJECTIONS
from spes_swarm.model.foreign.storage import ForeignBytes, foreign_bytes
from spes_swarm.model.frozen_stack import FORMS, bytes_per_weight
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.memory.host_memory import belongs_on_disk, free_host_bytes
from spes_swarm.peer.step_settings import StepSettings
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.training.optimiser.moment_storage import moment_bytes_per_weight

_WEIGHT, _GRADIENT, _MOMENTS_COPY = 4, 4, 8  # bytes per trained weight
# The rest is for activations, allocator fragmentation and other processes.
_USABLE_FRACTION = 0.7
_SMALLEST_FORM, _SMALLEST_STATES = FORMS[-1], "int8"  # of others' experts, and of moments on the device


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
    foreign_experts: str  # form of others' experts: one of `frozen_stack.FORMS`
    optimizer_states: str = "device"  # form of the moments: one of `moment_storage.FORMS`
    foreign_storage: str = "device"  # where others' experts are; see `new_storage`
    result_bytes: int  # per round
    on_disk: bool  # whether the reference and the contribution are
    num_ranks: int = 1  # of this peer, all on this machine

    @classmethod
    def of(cls, run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1) -> Workload:
        """Derives the workload from the run's shapes; allocates nothing of the model's size."""
        layout = layout_of(build_model(run.model.type, run.model.settings, run.training.seed, "cpu", on_meta=True))
        return cls(
            layout=layout,
            device=device,
            foreign_experts=StepSettings.of(peer, device).foreign_experts,
            foreign_storage=StepSettings.of(peer, device, num_ranks).foreign_storage,
            optimizer_states=peer.optimizer_states,
            result_bytes=get_codec(run.round.codec).num_bytes(layout.num_elements),
            on_disk=belongs_on_disk(layout.num_elements, peer.reference_storage),
            num_ranks=num_ranks,
        )

    def foreign_bytes(self, num_experts: int) -> ForeignBytes:
        """Returns what the experts that others train take, for each rank."""
        expert = self.layout.expert_block(0)
        stored = bytes_per_weight(self.foreign_experts) * (self.layout.num_experts - num_experts) * expert.size
        num_layers = len(expert.slots) // len(PROJECTIONS)
        return foreign_bytes(
            self.foreign_storage,
            int(stored),
            num_layers,
            on_gpu=self.device.type != "cpu",
            num_ranks=self.num_ranks,
        )

    def device_bytes(self, num_experts: int) -> dict[str, int]:
        """Returns what training takes without activations, by class."""
        shared, expert = self.layout.blocks[SHARED_BLOCK].size, self.layout.expert_block(0).size
        trained = shared + num_experts * expert
        return {
            "shared": _WEIGHT * shared,
            "held": _WEIGHT * num_experts * expert,
            "foreign": self.foreign_bytes(num_experts).on_device,
            "gradients": _GRADIENT * trained,
            "optimiser": int(moment_bytes_per_weight(self.optimizer_states).on_device * trained),
        }

    def host_bytes(self, num_experts: int) -> dict[str, int]:
        """Returns what the exchange takes, by class, and what the model of a GPU takes before it moves there."""
        on_device = self.device_bytes(num_experts)
        weights = on_device["shared"] + on_device["held"]
        trained = weights // _WEIGHT
        host = {
            "reference": 0 if self.on_disk else _WEIGHT * self.layout.num_elements,
            "contribution": 0 if self.on_disk else weights,
            "round": self.result_bytes,
            "checkpoint": _MOMENTS_COPY * trained,
        }
        if self.optimizer_states == "host":
            host["optimiser"] = int(moment_bytes_per_weight("host").on_host * trained)
        if self.foreign_storage == "host":
            host["foreign"] = self.num_ranks * self.foreign_bytes(num_experts).on_host
        if self.device.type != "cpu":
            # It is gone before the first round. Host memory and files are filled where they are.
            moved = weights + (on_device["foreign"] if self.foreign_storage in ("device", "ranks") else 0)
            host["round"] = max(self.result_bytes, moved)
        return host

    def needed(self, num_experts: int) -> tuple[int, int]:
        """Returns the bytes needed on the device and on the host; on the CPU all of them are on the host."""
        on_device = sum(self.device_bytes(num_experts).values())
        on_host = sum(self.host_bytes(num_experts).values())
        return (0, on_device + on_host) if self.device.type == "cpu" else (on_device, on_host)


def experts_that_fit(workload: Workload, wanted: ExpertsWanted, most: int) -> int:
    """Returns how many experts to train: `wanted`, or for "auto" up to `most`, leaving memory for activations.

    Raises:
        CapacityError: the wanted experts do not fit, or for "auto" not even one; the message says what would fit.
    """
    free_on_device, free_on_host = free_bytes(workload.device), free_host_bytes()

    def fits(num_experts: int, work: Workload = workload, fraction: float = _USABLE_FRACTION) -> bool:
        on_device, on_host = work.needed(num_experts)
        return (
            workload.device.type == "cpu" or on_device <= fraction * free_on_device
        ) and on_host <= fraction * free_on_host

    if wanted == "auto":
        num_experts = _largest(most, fits) or 1
    else:
        num_experts = len(wanted) if isinstance(wanted, tuple) else wanted
    if fits(num_experts, fraction=1.0):
        return num_experts
    on_device, on_host = workload.needed(num_experts)
    smallest = replace(workload, foreign_experts=_SMALLEST_FORM, optimizer_states=_SMALLEST_STATES).needed(1)
    if workload.device.type != "cpu" and on_device > free_on_device:
        where, needed, free, least = memory_of(workload.device), on_device, free_on_device, smallest[0]
    else:
        where, needed, free, least = memory_of(torch.device("cpu")), on_host, free_on_host, smallest[1]
    raise CapacityError(
        f"training {plural(num_experts, 'expert')} needs "
        f"{gigabytes(needed)} of {where}, but only {gigabytes(free)} is free: "
        + next(
            chain(
                _what_would_fit(fits, num_experts, workload),
                _what_would_fit(partial(fits, fraction=1.0), num_experts, workload),
            ),
            f"one expert, with the others in {_SMALLEST_FORM} and moments in {_SMALLEST_STATES}, still needs "
            f"{gigabytes(least)}; use a machine with more memory, or found a run with a smaller model",
        )
    )


def _what_would_fit(fits: Callable[..., bool], num_experts: int, workload: Workload) -> Iterator[str]:
    """Yields settings that would fit, best first."""
    if fewer := _largest(num_experts - 1, fits):
        yield f"--experts {fewer} would fit"
    for flags, smaller in smaller_workloads(workload):
        if number := _largest(num_experts, partial(fits, work=smaller)):
            yield f"--experts {number} {flags} would fit"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest number from 1 to `most` that fits, or 0. If a number fits, all smaller ones must fit."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def smaller_workloads(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yields flags, and what a peer needs with them: others' experts in fewer bytes, then the moments, too."""
    forms = FORMS[FORMS.index(workload.foreign_experts) + 1 :]
    for form in forms:
        yield f"--foreign-experts {form}", replace(workload, foreign_experts=form)
    if workload.optimizer_states == "device":
        flag = f"--optimizer-states {_SMALLEST_STATES}"
        smaller = replace(workload, optimizer_states=_SMALLEST_STATES)
        yield flag, smaller
        for form in forms:
            yield f"--foreign-experts {form} {flag}", replace(smaller, foreign_experts=form)


def memory_of(device: torch.device) -> str:
    """Returns the words for a device's memory."""
    return f"the memory of {device}" if device.type == "cuda" else "this machine's memory"


def gigabytes(num_bytes: int) -> str:
    """Returns a size in GB, or in MB below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def plan_experts(run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1) -> int:
    """Returns how many experts this peer will train, activations aside, before anything large is opened or built.

    Raises:
        ConfigError: the model lacks the wanted experts, or the batch is too large.
        CapacityError: see `experts_that_fit`.
    """
    wanted = parse_experts(peer.experts, run.model.num_experts)
    run.training.batch_size_of(peer.batch_size)
    return experts_that_fit(Workload.of(run, peer, device, num_ranks), wanted, run.experts_per_peer)


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
