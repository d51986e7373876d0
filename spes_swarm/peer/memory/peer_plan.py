"""How many experts this peer trains and how many sequences it computes at a time, counted before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from spes_swarm.base.errors import CapacityError
from spes_swarm.base.wording import plural
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory.capacity import Workload, free_bytes, gigabytes, memory_of, plan_experts, smaller_workloads
from spes_swarm.peer.memory.disk_space import check_disk
from spes_swarm.peer.memory.host_memory import free_host_bytes
from spes_swarm.peer.memory.step_memory import StepEstimate, StepShape
from spes_swarm.peer.step_settings import StepSettings
from spes_swarm.training.ranks.placement import Placement

# Of the free memory, for whole micro-batches. A GPU's allocator reports what it cannot find, and the micro-batch is
# halved; on a CPU the C library keeps freed memory, and the kernel kills the process.
_USABLE_FRACTION = {"cuda": 0.95, "cpu": 0.7}
# A step keeps fewer numbers than this for each token, layer and feature of the model.
_MOST_ACTIVATIONS = 100
_NEGLIGIBLE_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class PeerPlan:
    """What fits on this machine."""

    experts: int  # to train
    micro_batch_size: int  # sequences
    note: str = ""  # about the disk, for the user
    previous: str  # where the previous reference goes: "memory", "disk" or "none"


def plan_peer(run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1) -> PeerPlan:
    """Returns how many experts and sequences fit, activations included; "auto" makes room for activations.

    Each of `num_ranks` processes on this machine computes a share of the batch. Of several GPUs only that of rank 0,
    which needs the most memory, is counted.

    Raises:
        ConfigError: as `plan_experts`, or the batch cannot be divided evenly among the ranks.
        CapacityError: as `plan_experts` and `check_disk`; also if not even one sequence fits in addition to the
            weights. The message says what would fit.
    """
    Placement(rank=0, world_size=num_ranks).check_batch(run.training.batch_size_of(peer.batch_size))
    work, experts = plan_experts(run, peer, device, num_ranks)
    note = check_disk(work, experts, peer)
    batch_size = run.training.batch_size_of(peer.batch_size) // num_ranks
    most = min(batch_size, StepSettings.of(peer, device).micro_batch_size or batch_size)
    free = free_bytes(device)
    sharing = num_ranks if device.type == "cpu" else 1  # ranks whose activations are in the same memory
    if _is_negligible(run, sharing * most, free):
        return PeerPlan(experts=experts, micro_batch_size=most, note=note, previous=work.previous)
    run = replace(run, training=replace(run.training, batch_size=batch_size))
    estimate = StepEstimate(run, StepShape.of(peer, device, experts), work.layout)
    smallest = experts if peer.experts.number is not None else 1
    while experts > smallest and sharing * estimate.temporary(1) > free - work.beside_activations(experts):
        experts -= 1
    static = work.beside_activations(experts)
    size = estimate.largest_micro_batch((_USABLE_FRACTION[device.type] * free - static) / sharing, most)
    if size == 0 and (needed := static + sharing * estimate.temporary(1)) > free:
        raise CapacityError(
            f"training {plural(experts, 'expert')} needs {gigabytes(needed)} of {memory_of(device)}, activations of "
            f"one sequence{' in each rank' if sharing > 1 else ''} included, but only {gigabytes(free)} is free: "
            + next(
                _what_would_fit(run, peer, work, experts, free, sharing),
                "nothing that these settings leave open makes it fit; use a machine with more memory, or found a run "
                "with a smaller model or shorter sequences",
            )
        )
    return PeerPlan(experts=experts, micro_batch_size=max(1, size), note=note, previous=work.previous)


def _what_would_fit(
    run: RunConfig, peer: PeerConfig, work: Workload, experts: int, free: int, sharing: int
) -> Iterator[str]:
    """Yields settings that would fit, best first; the others' experts' form hardly changes the activations."""
    layers = StepShape.of(replace(peer, activation_checkpointing="layers"), work.device, experts)
    temporary = sharing * StepEstimate(run, layers, work.layout).temporary(1)
    flag = "" if peer.activation_checkpointing == "layers" else "--activation-checkpointing layers "
    options = [("", work), *((f"{flags} ", smaller) for flags, smaller in smaller_workloads(work))]
    free_on_host = free_host_bytes()
    for number in range(experts, 0, -1):
        fewer = f"--experts {number} " if number < experts else ""
        for flags, smaller in options:
            # Moments that move off a GPU need host memory.
            if smaller.beside_activations(number) + temporary <= free and smaller.needed(number)[1] <= free_on_host:
                yield f"{flag}{fewer}{flags}would fit"


def _is_negligible(run: RunConfig, sequences: int, free: int) -> bool:
    """Returns True if the activations of that many sequences surely take a small part of the free memory."""
    hidden, layers = (run.model.settings.get(key) for key in ("hidden_size", "num_hidden_layers"))
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return False
    tokens = sequences * run.training.sequence_length
    return 4 * tokens * hidden * layers * _MOST_ACTIVATIONS < _NEGLIGIBLE_SHARE * free
