"""Selects the device, and checks what fits into device and host memory.

A peer needs, where N is the number of weights and T the number trained here (shared layers and held experts):

- on the device: 8 bytes per trained weight (weight, gradient), its moments (4 bytes each; AdamW has two for each
  weight, Muon one), and the other experts in the form in which they are stored, 0.56 to 4 bytes per weight. Moments and
  other experts can be in host memory instead;
- in host memory: the reference (4 N bytes) and the contribution (4 T), unless they are on a disk, and during a round
  its results at the codec's size, and a copy of the moments while a checkpoint is written. With error feedback,
  a round keeps its encoded contributions and up to 4 T of rounding errors, too, and a checkpoint also copies the live
  weights (4 T), all of which differ from the reference; it also copies the held experts, if they do not take part in
  every round. The model of a GPU is put together on the host, without gradients and moments.

All ranks of a peer are on one machine. Each has a model and its gradients, on its own GPU or, without GPUs, in host
memory. Everything else exists once.

Activations come on top (step_memory.py counts them). What Python, torch and CUDA take themselves does not count. So
`auto` leaves part of the memory free, and only what cannot possibly fit is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.base.wording import plural
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.experts import PROJECTIONS
from spes_swarm.model.foreign.frozen_stack import bytes_per_weight
from spes_swarm.model.foreign.storage import ForeignBytes, foreign_bytes
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.memory.host_memory import belongs_on_disk, free_host_bytes, place_of_previous
from spes_swarm.peer.memory.savings import as_flags, savings
from spes_swarm.peer.step_settings import StepSettings
from spes_swarm.protocol.consensus.codec import Codec, get_codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.training.optimiser.matrices import hidden_matrices
from spes_swarm.training.optimiser.moment_storage import MOMENTS
from spes_swarm.training.optimiser.registry import matrix_moments

_WEIGHT, _GRADIENT, _MOMENT = 4, 4, 4  # bytes per trained weight
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
    foreign_experts: str  # form of others' experts: one of `frozen_stack.FORMS`
    optimizer_states: str = "device"  # where the moments are: one of `moment_storage.FORMS`
    matrix_moments: tuple[str, ...] = MOMENTS  # of experts and hidden matrices; other weights have AdamW's
    hidden_weights: int = 0  # number of shared weights that are hidden matrices
    foreign_storage: str = "device"  # where others' experts are; see `new_storage`
    result_bytes: int  # per round
    on_disk: bool  # whether the reference and the contribution are
    previous: str = "none"  # where the previous reference is; see `place_of_previous`
    num_ranks: int = 1  # of this peer, all on this machine
    kept_codec: Codec | None = None  # of the contributions, if it has error feedback
    experts_differ: bool = False  # from the reference after most rounds, so that checkpoints copy them

    @classmethod
    def of(cls, run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1) -> Workload:
        """Derives the workload from the run's shapes; allocates nothing of the model's size."""
        model = build_model(run.model.type, run.model.settings, run.training.seed, "cpu", on_meta=True)
        layout, hidden = layout_of(model), hidden_matrices(model)
        codecs = get_codec(run.round.codec), get_codec(run.round.codec_of_results)
        return cls(
            layout=layout,
            device=device,
            foreign_experts=StepSettings.of(peer, device).foreign_experts,
            foreign_storage=StepSettings.of(peer, device).foreign_storage,
            optimizer_states=peer.optimizer_states,
            matrix_moments=matrix_moments(run.training.optimiser),
            hidden_weights=sum(slot.size for slot in layout.blocks[SHARED_BLOCK].slots if slot.name in hidden),
            result_bytes=max(codec.num_bytes(layout.num_elements) for codec in codecs),
            kept_codec=codecs[0] if codecs[0].error_feedback else None,
            on_disk=belongs_on_disk(layout.num_elements, peer.reference_storage),
            previous=place_of_previous(layout.num_elements, peer.reference_storage, peer.previous_reference),
            num_ranks=num_ranks,
            experts_differ=run.round.expert_every > 1,
        )

    def foreign_bytes(self, num_experts: int) -> ForeignBytes:
        """Returns what the experts that others train take, for each rank."""
        expert = self.layout.expert_block(0)
        stored = bytes_per_weight(self.foreign_experts) * (self.layout.num_experts - num_experts) * expert.size
        num_layers = len(expert.slots) // len(PROJECTIONS)
        return foreign_bytes(self.foreign_storage, int(stored), num_layers)

    def moment_bytes(self, num_experts: int) -> int:
        """Returns what the moments of all trained weights take, wherever they are."""
        shared, expert = self.layout.blocks[SHARED_BLOCK].size, self.layout.expert_block(0).size
        matrices, rest = self.hidden_weights + num_experts * expert, shared - self.hidden_weights
        return _MOMENT * (len(self.matrix_moments) * matrices + len(MOMENTS) * rest)

    def device_bytes(self, num_experts: int) -> dict[str, int]:
        """Returns the bytes of training on the device of rank 0 by class, without activations."""
        shared, expert = self.layout.blocks[SHARED_BLOCK].size, self.layout.expert_block(0).size
        trained = shared + num_experts * expert
        return {
            "shared": _WEIGHT * shared,
            "held": _WEIGHT * num_experts * expert,
            "foreign": self.foreign_bytes(num_experts).on_device,
            "gradients": _GRADIENT * trained,
            "optimiser": self.moment_bytes(num_experts) if self.optimizer_states == "device" else 0,
        }

    def host_bytes(self, num_experts: int) -> dict[str, int]:
        """Returns the bytes in host memory by class: of the exchange, and of other ranks or the models of GPUs."""
        on_device = self.device_bytes(num_experts)
        trained = on_device["gradients"] // _GRADIENT
        weights = _WEIGHT * trained
        in_round = self.result_bytes
        if self.kept_codec is not None:  # its encoded contributions, and the rounding errors of results reduced here
            in_round += self.kept_codec.num_bytes(trained) + weights
        host = {
            "reference": 0 if self.on_disk else _WEIGHT * self.layout.num_elements,
            "contribution": 0 if self.on_disk else weights,
            "round": in_round,
            "checkpoint": self._copied_bytes(num_experts),
        }
        if self.previous == "memory":
            host["previous"] = _WEIGHT * self.layout.num_elements + weights
        if self.optimizer_states == "host":
            host["optimiser"] = self.moment_bytes(num_experts)
        if self.foreign_storage == "host":
            host["foreign"] = self.num_ranks * self.foreign_bytes(num_experts).on_host
        if self.device.type != "cpu":
            # All ranks assemble their models on the host at once, and move them to the GPUs before the first round.
            # Experts in host memory are written in place.
            moved = weights + (on_device["foreign"] if self.foreign_storage == "device" else 0)
            host["round"] = max(in_round, self.num_ranks * moved)
        elif self.num_ranks > 1:
            model = weights + on_device["foreign"]
            host["other_ranks"] = (self.num_ranks - 1) * (model + on_device["gradients"])
        return host

    def _copied_bytes(self, num_experts: int) -> int:
        """Returns what a checkpoint copies: the moments, and live weights that differ from the reference."""
        shared, expert = self.layout.blocks[SHARED_BLOCK].size, self.layout.expert_block(0).size
        moments = self.moment_bytes(num_experts)
        if self.kept_codec is not None:
            return moments + _WEIGHT * (shared + num_experts * expert)
        return moments + (_WEIGHT * num_experts * expert if self.experts_differ else 0)

    def checkpoint_bytes(self, num_experts: int) -> int:
        """Returns the size of a checkpoint on the disk: the reference, and what is copied."""
        return _WEIGHT * self.layout.num_elements + self._copied_bytes(num_experts)

    def needed(self, num_experts: int) -> tuple[int, int]:
        """Returns the bytes needed on the device and on the host; on the CPU all of them are on the host."""
        on_device = sum(self.device_bytes(num_experts).values())
        on_host = sum(self.host_bytes(num_experts).values())
        return (0, on_device + on_host) if self.device.type == "cpu" else (on_device, on_host)

    def beside_activations(self, num_experts: int) -> int:
        """Returns the bytes needed where the activations are."""
        on_device, on_host = self.needed(num_experts)
        return on_host if self.device.type == "cpu" else on_device


def experts_that_fit(workload: Workload, wanted: int | None, most: int, free_on_device: float | None = None) -> int:
    """Returns how many experts to train: `wanted`, or if that is None up to `most`, leaving memory for activations.

    `free_on_device` is in bytes; None: it is measured.

    Raises:
        CapacityError: the wanted experts do not fit, or not even one; the message says what would fit.
    """
    free_on_host = free_host_bytes()
    if free_on_device is None:
        free_on_device = free_bytes(workload.device)
    on_gpu = workload.device.type != "cpu"

    def fits(num_experts: int, work: Workload = workload, fraction: float = _USABLE_FRACTION) -> bool:
        on_device, on_host = work.needed(num_experts)
        return on_device <= fraction * free_on_device and on_host <= fraction * free_on_host

    def shortage(work: Workload, num_experts: int) -> tuple[str, int, float]:
        """Returns which memory lacks most, the bytes needed there, and the bytes free."""
        on_device, on_host = work.needed(num_experts)
        if on_gpu and on_device - free_on_device > on_host - free_on_host:
            return memory_of(workload.device), on_device, free_on_device
        return memory_of(torch.device("cpu")), on_host, free_on_host

    def lack(work: Workload) -> float:
        """Returns how many bytes are missing for one expert, in both memories."""
        on_device, on_host = work.needed(1)
        return max(0.0, on_device - free_on_device) + max(0, on_host - free_on_host)

    num_experts = wanted if wanted is not None else _largest(most, fits) or 1
    if fits(num_experts, fraction=1.0):
        return num_experts
    where, needed, free = shortage(workload, num_experts)
    flags, smallest = min((("", workload), *smaller_workloads(workload)), key=lambda each: lack(each[1]))
    least_where, least, _ = shortage(smallest, 1)
    raise CapacityError(
        f"training {plural(num_experts, 'expert')} needs {gigabytes(needed)} of {where}, but only "
        f"{gigabytes(free)} is free: "
        + next(
            chain(
                _what_would_fit(fits, num_experts, workload),
                _what_would_fit(partial(fits, fraction=1.0), num_experts, workload),
            ),
            f"one expert{' with ' if flags else ''}{flags} still needs {gigabytes(least)}"
            f"{'' if least_where == where else f' of {least_where}'}; use a machine with more memory, or found a run "
            "with a smaller model",
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
    """Yields flags and the workload with them: one saving after another, each with the previous reference on disk, too.

    That slows down no step, so it comes first on its own.
    """
    settings = {name: getattr(workload, name) for name in ("foreign_experts", "optimizer_states", "foreign_storage")}
    for changes in ({}, *savings(settings, workload.device)):
        work = replace(workload, **changes)
        if changes:
            yield as_flags(changes), work
        if workload.previous == "memory":
            yield as_flags({"previous_reference": "disk", **changes}), replace(work, previous="disk")


def memory_of(device: torch.device) -> str:
    """Returns the words for a device's memory."""
    return f"the memory of {device}" if device.type == "cuda" else "this machine's memory"


def gigabytes(num_bytes: float) -> str:
    """Returns a size in GB, or in MB below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def plan_experts(
    run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1, free_on_device: float | None = None
) -> tuple[Workload, int]:
    """Returns how many experts this peer will train, activations aside, before anything large is opened or built.

    Raises:
        ConfigError: the model lacks the wanted experts, or the batch is too large.
        CapacityError: see `experts_that_fit`.
    """
    peer.experts.check(run.model.num_experts)
    wanted = peer.experts.number
    run.training.batch_size_of(peer.batch_size)
    workload = Workload.of(run, peer, device, num_ranks)
    if peer.previous_reference == "auto":  # in memory only if that costs neither the peer nor an expert
        elsewhere = replace(workload, previous="disk")
        experts = experts_that_fit(elsewhere, wanted, run.experts_per_peer, free_on_device)
        with suppress(CapacityError):
            if experts_that_fit(workload, wanted, run.experts_per_peer, free_on_device) == experts:
                return workload, experts
        return elsewhere, experts
    return workload, experts_that_fit(workload, wanted, run.experts_per_peer, free_on_device)


def check_host_memory(run: RunConfig, peer: PeerConfig, on_gpu: bool, num_ranks: int = 1) -> tuple[Workload, int]:
    """Refuses a run that cannot fit into host memory, without counting activations; returns as `plan_experts`.

    It does not use a GPU, so the network process can still be forked afterwards. GPU memory is not checked.

    Raises:
        ConfigError, CapacityError: as `plan_experts`.
    """
    device = torch.device("cuda" if on_gpu else "cpu")
    return plan_experts(run, peer, device, num_ranks, math.inf)


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
