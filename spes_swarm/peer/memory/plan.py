"""What a peer would need for a run: memory by class, and what a round costs. Nothing of the model's size is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.base.wording import plural
from spes_swarm.config.peer import PeerConfig, Storage, StorageOrNone
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory.capacity import Workload, gigabytes
from spes_swarm.peer.memory.savings import as_flags, peers_to_try, settings_of
from spes_swarm.peer.memory.step_memory import StepEstimate, StepMemory, StepShape
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a peer has. Sizes in bytes, bandwidths in Mbit/s."""

    device: torch.device  # of the type "cuda" or "cpu"
    memory: int  # of each GPU; unused on a CPU
    host_memory: int
    upload: float
    download: float
    ranks: int = 1  # processes of the peer: one for each GPU, or several on the CPU


# Of the reference and of the one before it, which is needed only to take back a commit.
_PLACES: tuple[tuple[Storage, StorageOrNone], ...] = (("memory", "memory"), ("memory", "disk"), ("disk", "disk"))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Settings for a peer, and what follows from them. Sizes in bytes."""

    trains_on: str  # "gpu" or "cpu"
    experts: int
    peer: PeerConfig  # its settings that save memory, and where its references are
    ranks: int
    batch_size: int  # sequences of a local step, of all ranks together
    micro_batch_size: int  # sequences that a rank computes at a time
    device: dict[str, int]  # by class, of each GPU; on a CPU in host memory, with `host`
    host: dict[str, int]
    peers: int  # in the swarm
    round_bytes: int  # that a peer sends, and as many that it receives; the mean, where experts skip rounds
    step_bytes: int  # round_bytes over H of the first rounds
    round_seconds: float  # to send round_bytes
    num_experts: int  # of the model
    covered_experts: int  # trained at a time if all `peers` are such peers; if these are not all, experts take turns
    turn_rounds: int  # the length of a turn
    covering_peers: int  # how many such peers hold every expert once

    @property
    def device_peak(self) -> int:
        """All classes of the device."""
        return sum(self.device.values())

    @property
    def host_peak(self) -> int:
        """All bytes in host memory."""
        return sum(self.host.values()) + (self.device_peak if self.trains_on == "cpu" else 0)

    def settings(self) -> dict[str, Any]:
        """Returns the settings of a peer by their names in a PeerConfig."""
        return {
            "experts": self.experts,
            **settings_of(self.peer),
            "micro_batch_size": self.micro_batch_size,
            "reference_storage": self.peer.reference_storage,
            "previous_reference": self.peer.previous_reference,
        }

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        values = {name: value for name, value in asdict(self).items() if name != "peer"}
        return values | self.settings() | {"device_peak": self.device_peak, "host_peak": self.host_peak}


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """Settings with which a number of experts fits."""

    peer: PeerConfig
    work: Workload
    micro_batch_size: int
    step: StepMemory


@dataclass(frozen=True, kw_only=True)
class _Shortage:
    """Settings with which it does not fit."""

    peer: PeerConfig
    memory: str  # the memory that is too small
    least: int  # bytes needed there
    size: int  # bytes available there


def plan(run: RunConfig, experts: int | None, machine: Machine, peers: int, batch_size: int | None = None) -> Plan:
    """Returns the fastest settings with which `experts` fit, and the costs in a swarm of `peers`.

    Args:
        run: the swarm's settings.
        experts: number of experts to train; None: the run's number, or fewer if they do not fit.
        machine: the peer's machine.
        peers: number of peers in the swarm.
        batch_size: sequences of a local step; None: the run's.

    Raises:
        ConfigError: the batch is too large, or cannot be divided among the ranks.
        CapacityError: they fit with no settings; the message says how much is missing, and what would fit.
    """
    batch_size = run.training.batch_size_of(batch_size)
    if batch_size % machine.ranks:
        raise ConfigError(
            f"--ranks: a batch of {batch_size} cannot be divided evenly among {machine.ranks}; "
            f"give a --batch-size that is a multiple of {machine.ranks}"
        )
    planner = _Planner(run, machine, batch_size // machine.ranks)
    wanted = run.experts_per_peer if experts is None else experts
    found = planner.fit(wanted)
    if isinstance(found, _Shortage):
        fewer, fewer_fit = planner.most(wanted - 1)
        if experts is not None or fewer_fit is None:
            raise CapacityError(
                f"training {plural(wanted, 'expert')} needs at least {gigabytes(found.least)} of {found.memory}, "
                f"with {as_flags(settings_of(found.peer))}: "
                + (f"--experts {fewer} would fit" if fewer else "plan with more memory, or with a smaller model")
            )
        wanted, found = fewer, fewer_fit
    work = found.work
    codec, result_codec = get_codec(run.round.codec), get_codec(run.round.codec_of_results)
    shared_elements = work.layout.blocks[SHARED_BLOCK].size
    shared = codec.num_bytes(shared_elements) + result_codec.num_bytes(shared_elements)
    all_experts = codec.num_bytes(work.layout.num_elements - shared_elements)
    # Shared parts are an all-reduce, and experts with one holder an all-gather.
    round_bytes = int((peers - 1) / peers * (shared + all_experts / run.round.expert_every))
    step = {name: planner.sharing * getattr(found.step, name) for name in ("activations", "logits")}
    return Plan(
        trains_on="cpu" if machine.device.type == "cpu" else "gpu",
        experts=wanted,
        peer=found.peer,
        ranks=machine.ranks,
        batch_size=batch_size,
        micro_batch_size=found.micro_batch_size,
        device=work.device_bytes(wanted) | step,
        host=work.host_bytes(wanted),
        peers=peers,
        round_bytes=round_bytes,
        step_bytes=round_bytes // RoundClock.of(run).inner_steps_after(0),
        round_seconds=8 * round_bytes / 1e6 / min(machine.upload, machine.download),
        num_experts=run.model.num_experts,
        covered_experts=min(run.model.num_experts, peers * wanted),
        turn_rounds=run.ownership.rotate_every_rounds,
        covering_peers=-(-run.model.num_experts // wanted),
    )


class _Planner:
    """Tries settings for one run on one machine; caches the memory of each step."""

    def __init__(self, run: RunConfig, machine: Machine, batch_size: int) -> None:
        """Takes the sequences of a local step that one rank computes."""
        self._run = replace(run, training=replace(run.training, batch_size=batch_size))
        self._machine = machine
        # Number of ranks whose activations are in the same memory.
        self.sharing = machine.ranks if machine.device.type == "cpu" else 1
        # Activations do not depend on where the reference and the moments are.
        self._estimates: dict[StepShape, StepEstimate] = {}

    def fit(self, experts: int) -> _Fit | _Shortage:
        """Returns the fastest settings with which these experts fit, or those with the smallest shortage."""
        shortages = []
        for peer in peers_to_try(self._machine.device):
            for storage, previous in _PLACES:
                found = self._try(experts, replace(peer, reference_storage=storage, previous_reference=previous))
                if isinstance(found, _Fit):
                    return found
                shortages.append(found)
        return min(shortages, key=lambda each: each.least / each.size)

    def most(self, limit: int) -> tuple[int, _Fit | None]:
        """Returns the largest number of experts up to `limit` that fits, with its settings, or (0, None)."""
        low, high = 0, limit
        best: _Fit | None = None
        while low < high:
            middle = (low + high + 1) // 2
            if isinstance(found := self.fit(middle), _Fit):
                low, best = middle, found
            else:
                high = middle - 1
        return low, best

    def _try(self, experts: int, peer: PeerConfig) -> _Fit | _Shortage:
        machine = self._machine
        on_cpu = machine.device.type == "cpu"
        work = Workload.of(self._run, peer, machine.device, machine.ranks)
        (_, host), fixed = work.needed(experts), work.beside_activations(experts)
        name, size = ("host memory", machine.host_memory) if on_cpu else ("GPU memory", machine.memory)
        short = partial(_Shortage, peer=peer)
        if not on_cpu and host > machine.host_memory:
            return short(memory="host memory", least=host, size=machine.host_memory)
        if fixed > size:
            return short(memory=f"{name} before the first activation", least=fixed, size=size)
        estimate = self._estimate(StepShape.of(peer, machine.device, experts), work.layout)
        sequences = estimate.largest_micro_batch((size - fixed) / self.sharing, self._run.training.batch_size)
        if not sequences:
            return short(memory=name, least=fixed + self.sharing * estimate.at_least(1), size=size)
        return _Fit(peer=peer, work=work, micro_batch_size=sequences, step=estimate.step(sequences))

    def _estimate(self, shape: StepShape, layout: Layout) -> StepEstimate:
        return self._estimates.setdefault(shape, StepEstimate(self._run, shape, layout))
