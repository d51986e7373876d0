"""Predicts how fast this machine would train a run, from a few seconds of real steps.

Models of the run with one and with two layers, at full width and with the settings of a plan, take steps on this
machine's device; the time that the second layer adds stands for every other layer. If that would take too long or too
much memory, the steps have fewer tokens and the models a smaller vocabulary. The time of a layer is then extrapolated
linearly over its operations from two measurements, because a part of it, such as expanding rounded experts, does not
depend on the number of tokens. The time of embedding and head is extrapolated over tokens, and in proportion to the
vocabulary. The exchange between ranks is not included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from spes_swarm.base.errors import CapacityError, ConfigError
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.flops import ModelFlops
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.peer.memory.capacity import Workload, free_bytes, gigabytes, memory_of
from spes_swarm.peer.memory.choices import step_shape
from spes_swarm.peer.memory.host_memory import free_host_bytes
from spes_swarm.peer.memory.step_memory import layers_if_alike, step_memory, with_layers
from spes_swarm.peer.step_settings import StepSettings, kernel_of, lower_halves_device, replica_of
from spes_swarm.training.gradients import Gradients, autocast, loss_weights
from spes_swarm.training.optimiser.registry import make_optimiser
from spes_swarm.training.throughput import peak_flops

_STEP_S = 0.5  # approximate length of the longest measured step
_PROBE_TOKENS = (32, 128)
_SHARE_OF_LONG = 4  # the short step has this many times fewer tokens than the long one
_REPEATS = 3
_USABLE_FRACTION = 0.5  # of the free memory
_ENOUGH_BYTES = 4 * 10**9  # the vocabulary shrinks until the model fits into this, or to its minimum
_LEAST_VOCABULARY = 1024
_POOL_ELEMENTS = 1_000_003  # prime, so that rows filled from the same numbers differ


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The predicted speed of a peer, all ranks together."""

    device: str
    tokens_per_second: float
    step_seconds: float  # of a local step, optimiser included
    round_step_seconds: float  # of the local steps between two rounds
    teraflops: float  # 1e12 model operations per second
    mfu: float | None  # share of the devices' peak, 0 to 1; None: unknown, as on a CPU


@dataclass(frozen=True)
class _Tokens:
    """The size of a measured step."""

    sequences: int
    length: int

    @property
    def total(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True)
class _Line:
    """Seconds as a linear function of tokens or operations."""

    fixed: float
    slope: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> _Line:
        """Returns the line through the points (x, seconds) of a short and a long step.

        If a disturbed measurement makes the time fall with x or start below zero, or if there is only one point, the
        time is taken to be proportional to x in the long step.
        """
        (x, y), (long_x, long_y) = points[0], points[-1]
        slope = (long_y - y) / (long_x - x) if long_x > x else 0.0
        fixed = long_y - slope * long_x
        return cls(fixed, slope) if slope > 0 and fixed >= 0 else cls(0.0, max(0.0, long_y) / long_x)

    def at(self, x: float) -> float:
        """Returns the seconds at x."""
        return self.fixed + self.slope * x


def calibrate(run: RunConfig, peer: PeerConfig, device: torch.device, num_ranks: int = 1) -> Speed:
    """Predicts the speed of a peer by measuring a few steps on a device.

    Args:
        run: the swarm's settings.
        peer: its settings; `experts`, `batch_size` and `micro_batch_size` are numbers.
        device: where to measure; it stands for the devices of all ranks.
        num_ranks: number of ranks that share the batch.

    Raises:
        ConfigError: the layers of the model differ.
        CapacityError: even with the smallest vocabulary, two layers do not fit into half of the free memory.
    """
    # A plan is made before there is an output directory, in whose place the files of others' experts are.
    peer = replace(peer, output_dir=str(_existing(Path(peer.output_dir))))
    experts, work = int(peer.experts), Workload.of(run, peer, device)
    num_layers = layers_if_alike(run.model.settings, work.layout)
    if num_layers is None:
        raise ConfigError("--calibrate: the layers of this model differ, so two cannot represent all; leave it out")
    batch_size = run.training.batch_size_of(peer.batch_size)
    whole = _Tokens(min(int(peer.micro_batch_size), batch_size // num_ranks), run.training.sequence_length)
    operations = _Operations.of(run, experts)
    reduced = _with_room(run, peer, device)
    probe = _Probe(with_layers(reduced, 2), peer, device)
    sizes = probe.affordable(whole)
    two = [probe.measure(size) for size in sizes]
    del probe  # both models at once might not fit
    one = [_Probe(with_layers(reduced, 1), peer, device).measure(size) for size in sizes]
    layer = [max(0.0, two_s.gradients - one_s.gradients) for two_s, one_s in zip(two, one, strict=True)]
    ends = [max(0.0, one_s.gradients - layer_s) for one_s, layer_s in zip(one, layer, strict=True)]
    layer_line = _Line.through([(operations.in_layers(size), y) for size, y in zip(sizes, layer, strict=True)])
    ends_line = _Line.through([(size.total, y) for size, y in zip(sizes, ends, strict=True)])
    vocabularies = run.model.vocab_size / reduced.model.vocab_size
    micro_batch_s = num_layers * layer_line.at(operations.in_layers(whole)) + vocabularies * ends_line.at(whole.total)
    trained = work.device_bytes(experts)["gradients"] // torch.float32.itemsize
    step_s = micro_batch_s * batch_size / num_ranks / whole.sequences + two[-1].optimiser * trained
    tokens = batch_size * whole.length
    flops_per_second = operations.of_step(_Tokens(batch_size, whole.length)) / step_s
    peak = peak_flops(device, StepSettings.of(peer, device).precision)
    return Speed(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        tokens_per_second=tokens / step_s,
        step_seconds=step_s,
        round_step_seconds=run.round.inner_steps * step_s,
        teraflops=flops_per_second / 1e12,
        mfu=None if peak is None else flops_per_second / (num_ranks * peak),
    )


def _existing(directory: Path) -> Path:
    """Returns a directory, or the nearest above it that exists."""
    return next(each for each in (directory.absolute(), *directory.absolute().parents) if each.is_dir())


@dataclass(frozen=True)
class _Operations:
    """Counts the operations of sequences of any length, if all experts get the same share of tokens."""

    flops: ModelFlops
    length: int  # of the sequences that these were counted for
    held: float  # share of the experts

    @classmethod
    def of(cls, run: RunConfig, experts: int) -> _Operations:
        model = build_model(run.model.type, run.model.settings, seed=0, device="meta", on_meta=True)
        length = run.training.sequence_length
        return cls(ModelFlops.of(SparseModel(model, range(experts)), length), length, experts / run.model.num_experts)

    def of_step(self, size: _Tokens) -> int:
        """Returns the operations of a step."""
        attention = self.flops.attention_per_token * size.length // self.length
        flops = replace(self.flops, attention_per_token=attention)
        return flops.step(size.total, int(self.held * size.total * flops.rows_per_token)).model

    def in_layers(self, size: _Tokens) -> int:
        """Returns the operations of a step without the head."""
        return replace(self, flops=replace(self.flops, head_per_token=0)).of_step(size)


def _with_room(run: RunConfig, peer: PeerConfig, device: torch.device) -> RunConfig:
    """Shrinks the vocabulary of a run until two layers and a step of one sequence fit into memory.

    Raises:
        CapacityError: they do not fit even with the smallest vocabulary.
    """
    room = _USABLE_FRACTION * min(free_bytes(device), free_host_bytes())
    needed = _needed(with_layers(run, 2), peer, device, 1)
    while needed > min(room, _ENOUGH_BYTES) and run.model.vocab_size >= 2 * _LEAST_VOCABULARY:
        run = _with_vocabulary(run, run.model.vocab_size // 2)
        needed = _needed(with_layers(run, 2), peer, device, 1)
    if needed > room:
        raise CapacityError(
            f"--calibrate: two layers of the model take {gigabytes(needed)} of {memory_of(device)}, but only half of "
            f"what is free, {gigabytes(room)}, may be used; leave --calibrate out"
        )
    return run


def _needed(run: RunConfig, peer: PeerConfig, device: torch.device, sequences: int) -> int:
    """Returns the bytes of a model and of its step."""
    experts = int(peer.experts)
    static = sum(Workload.of(run, peer, device).device_bytes(experts).values())
    return static + step_memory(run, step_shape(peer, device, experts), sequences).temporary


def _with_vocabulary(run: RunConfig, size: int) -> RunConfig:
    no_tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # whose ids might be too large
    settings = {**run.model.settings, **no_tokens, "vocab_size": size}
    return replace(run, model=replace(run.model, settings=settings))


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """The time of a step."""

    gradients: float
    optimiser: float  # for each trained weight


class _Probe:
    """A model with random weights that takes steps."""

    def __init__(self, run: RunConfig, peer: PeerConfig, device: torch.device) -> None:
        self._run = run
        self._peer = peer
        self._device = device
        experts, sequences = int(peer.experts), int(peer.micro_batch_size)
        kernel = kernel_of(run, peer, device, experts, sequences).kernel
        replica = replica_of(run, peer, device, range(experts), sequences, StepSettings.of(peer, device), kernel)
        self._model = replica.build(device, lower_halves=lower_halves_device(peer, device))
        _fill(self._model)
        training = run.training
        self._optimiser = make_optimiser(self._model, training, form=peer.optimizer_states)
        self._optimiser.set_learning_rate(1e-6)
        self._trained = sum(parameter.numel() for _, parameter in self._model.trainable_parameters())

    def affordable(self, whole: _Tokens) -> list[_Tokens]:
        """Returns the sizes of a short and a long step to measure, or only `whole` if that is fast enough."""
        short, long = (_Tokens(1, min(tokens, whole.length)) for tokens in _PROBE_TOKENS)
        seconds = [self.measure(size).gradients for size in (short, long)]
        line = _Line.through([(short.total, seconds[0]), (long.total, seconds[1])])
        tokens = max(long.total, int((_STEP_S - line.fixed) / line.slope))
        if tokens < whole.length:
            return [_Tokens(1, max(2, tokens // _SHARE_OF_LONG)), _Tokens(1, tokens)]
        sequences = min(whole.sequences, tokens // whole.length)
        room = _USABLE_FRACTION * free_bytes(self._device)
        while sequences > 1 and _needed(self._run, self._peer, self._device, sequences) > room:
            sequences //= 2
        largest = _Tokens(sequences, whole.length)
        if sequences == whole.sequences:
            return [whole]
        if sequences < _SHARE_OF_LONG:
            return [_Tokens(1, max(2, whole.length // _SHARE_OF_LONG)), largest]
        return [_Tokens(sequences // _SHARE_OF_LONG, whole.length), largest]

    def measure(self, size: _Tokens) -> _Seconds:
        """Returns the minimum over a few steps, which other programs disturb least, after a warm-up step."""
        self._take(size)
        taken = [self._take(size) for _ in range(_REPEATS)]
        return _Seconds(
            gradients=min(each.gradients for each in taken), optimiser=min(each.optimiser for each in taken)
        )

    def _take(self, size: _Tokens) -> _Seconds:
        gradients = Gradients(
            self._model,
            loss_weights(self._run.training),
            size.sequences,
            device=self._device,
            autocast=partial(autocast, self._device, StepSettings.of(self._peer, self._device).precision),
            warn=lambda kind, text: None,
        )
        shape = (size.sequences, size.length)
        batch_BS = np.random.default_rng(0).integers(0, self._run.model.vocab_size, shape)
        computed = _timed(self._device, lambda: gradients.compute(batch_BS, 1.0))
        stepped = _timed(self._device, self._optimiser.step)
        return _Seconds(gradients=computed, optimiser=stepped / self._trained)


def _timed(device: torch.device, call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


@torch.no_grad()
def _fill(model: SparseModel) -> None:
    """Overwrites all weights with small random numbers, so that all experts get about as many tokens."""
    pool_N = 0.02 * torch.randn(_POOL_ELEMENTS, generator=torch.Generator().manual_seed(0))
    for _, parameter in model.trainable_parameters():
        if parameter.dim() > 1:
            for piece_N in torch.split(parameter.view(-1), _POOL_ELEMENTS):
                piece_N.copy_(pool_N[: len(piece_N)])
        else:
            parameter.fill_(1.0)
    for expert in set(range(model.layout.num_experts)) - set(model.held):
        for slot in model.layout.expert_block(expert).slots:
            model.write_slot(slot, np.resize(pool_N.numpy(), slot.size))
