"""What a peer would need for a run: memory by class, and what a round costs. Nothing of the model's size is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from spes_swarm.base.errors import CapacityError
from spes_swarm.base.wording import plural
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory.capacity import Workload, gigabytes
from spes_swarm.peer.memory.step_memory import StepEstimate, StepShape
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK

# (form of others' experts, activation checkpointing, form of AdamW's moments), best first: what needs less memory costs
# more time, or rounds.
_SMALL = (("bf16", "layers", "device"), ("int8", "layers", "device"))
_SMALLER = (("int8", "layers", "int8"), ("int4", "layers", "int8"))
_CHOICES = (
    ("bf16", "none", "device"),
    ("bf16", "selective", "device"),
    *_SMALL,
    ("int8", "layers", "host"),
    *_SMALLER,
    ("int4", "layers", "host"),
)
_CPU_CHOICES = (("fp32", "none", "device"), ("fp32", "layers", "device"), *_SMALL, *_SMALLER)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a peer has. Sizes in bytes, bandwidths in Mbit/s."""

    device: str  # "gpu" or "cpu"
    memory: int  # of the device; unused on a CPU
    host_memory: int
    upload: float
    download: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for a peer, and what follows from them. Sizes in bytes."""

    experts: int
    foreign_experts: str
    activation_checkpointing: str
    optimizer_states: str
    micro_batch_size: int
    reference_storage: str
    device: dict[str, int]  # by class, of the device; on a CPU of the host
    host: dict[str, int]
    round_bytes: int  # that a peer sends, and as many that it receives
    round_seconds: float
    covering_peers: int  # how many such peers hold every expert once

    @property
    def device_peak(self) -> int:
        """All classes of the device."""
        return sum(self.device.values())

    @property
    def host_peak(self) -> int:
        """All classes of the host."""
        return sum(self.host.values())

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self) | {"device_peak": self.device_peak, "host_peak": self.host_peak}


def plan(run: RunConfig, experts: int, machine: Machine, peers: int) -> Plan:
    """Returns the fastest settings with which `experts` fit, in a swarm of that many peers.

    Raises:
        CapacityError: they do not fit with any; the message says what is missing.
    """
    on_gpu = machine.device == "gpu"
    missing = ""
    estimates: dict[tuple[str, str], StepEstimate] = {}
    for form, checkpointing, states in _CHOICES if on_gpu else _CPU_CHOICES:
        for storage in ("memory", "disk"):
            work = _workload(run, on_gpu, form, states, storage)
            static, host = work.device_bytes(experts), work.host_bytes(experts)
            if sum(host.values()) > machine.host_memory:
                missing = f"{gigabytes(sum(host.values()))} of host memory"
                continue
            room = machine.memory if on_gpu else machine.host_memory - sum(host.values())
            if sum(static.values()) > room:
                missing = f"{gigabytes(sum(static.values()))} of {machine.device} memory before the first activation"
                continue
            shape = StepShape(
                num_held=experts,
                foreign_experts=form,
                precision="bf16" if on_gpu else "fp32",
                activation_checkpointing=checkpointing,
                on_gpu=on_gpu,
            )
            # Activations are the same wherever the reference and the moments are.
            estimate = estimates.setdefault((form, checkpointing), StepEstimate(run, shape, work.layout))
            size = estimate.largest_micro_batch(room - sum(static.values()), run.training.batch_size)
            if size > 0:
                return _plan(run, work, machine, peers, experts, shape, storage, size, estimate.temporary(size))
            missing = f"{gigabytes(sum(static.values()) + estimate.temporary(1))} of {machine.device} memory"
    raise CapacityError(
        f"training {plural(experts, 'expert')} needs at least {missing}, even with others' experts in "
        "int4, moments in 8 bits and activation checkpointing; plan fewer --experts, more memory, or a smaller model"
    )


def _workload(run: RunConfig, on_gpu: bool, form: str, states: str, storage: str) -> Workload:
    peer = PeerConfig(foreign_experts=form, optimizer_states=states, reference_storage=storage)
    return Workload.of(run, peer, torch.device("cuda" if on_gpu else "cpu"))


def _plan(
    run: RunConfig,
    work: Workload,
    machine: Machine,
    peers: int,
    experts: int,
    shape: StepShape,
    storage: str,
    size: int,
    temporary: int,
) -> Plan:
    layout = work.layout
    num_bytes = get_codec(run.round.codec).num_bytes
    shared = num_bytes(layout.blocks[SHARED_BLOCK].size)
    all_experts = num_bytes(layout.num_elements - layout.blocks[SHARED_BLOCK].size)
    # Shared parts are an all-reduce, and experts with one holder an all-gather.
    round_bytes = int((peers - 1) / peers * (2 * shared + all_experts))
    return Plan(
        experts=experts,
        foreign_experts=shape.foreign_experts,
        activation_checkpointing=shape.activation_checkpointing,
        optimizer_states=work.optimizer_states,
        micro_batch_size=size,
        reference_storage=storage,
        device=work.device_bytes(experts) | {"activations": temporary},
        host=work.host_bytes(experts),
        round_bytes=round_bytes,
        round_seconds=8 * round_bytes / 1e6 / min(machine.upload, machine.download),
        covering_peers=-(-run.model.num_experts // experts),
    )
