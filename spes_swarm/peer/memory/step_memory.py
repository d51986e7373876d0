"""How much memory a training step takes, from a step that computes nothing.

The real model takes a step on tensors that have shapes and no numbers (torch's FakeTensorMode), while every
allocation and release is counted. So whatever changes the step, changes the plan. What has no numbers to go by is
assumed: every expert gets the same share of the tokens.

A GPU is planned as a CPU that computes in the GPU's precision: CUDA tensors cannot be made without a driver.

Tensor suffixes: T tokens, K experts per token, S = T * K, E experts, B sequences, G groups, D and F features.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import masking_utils

from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.expert_mlp import Routing
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.foreign.storage import foreign_bytes
from spes_swarm.model.kernels import Groups
from spes_swarm.model.losses import language_model_loss
from spes_swarm.model.output_head import aligned, assume_output_head, chunks_of
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer.step_settings import StepSettings
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.training.gradients import loss_weights
from spes_swarm.training.optimiser.matrices import hidden_matrices
from spes_swarm.training.optimiser.moment_storage import MOMENTS
from spes_swarm.training.optimiser.muon import step_bytes
from spes_swarm.training.optimiser.registry import matrix_moments


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What decides the activations of a step besides the run."""

    num_held: int
    foreign_experts: str  # one of `frozen_stack.FORMS`
    foreign_storage: str = "device"  # where they are; see PeerConfig
    precision: str  # "fp32" or "bf16"
    activation_checkpointing: str
    on_gpu: bool

    @classmethod
    def of(cls, peer: PeerConfig, device: torch.device, num_held: int) -> Self:
        """Returns that of the steps of a peer."""
        settings = StepSettings.of(peer, device)
        return cls(
            num_held=num_held,
            foreign_experts=settings.foreign_experts,
            foreign_storage=settings.foreign_storage,
            precision=settings.precision,
            activation_checkpointing=peer.activation_checkpointing,
            on_gpu=device.type == "cuda",
        )


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes of a step in which B sequences are computed at a time."""

    weights: int  # of the whole model on the device: others' experts as stored
    gradients: int
    optimiser: int  # all moments in fp32
    activations: int  # everything else at the peak, except logits
    logits: int  # at the peak: a chunk of them, or none if the peak is in a layer's backward pass

    @property
    def temporary(self) -> int:
        """The largest sum of activations, logits, and what is computed from them."""
        return self.activations + self.logits

    @property
    def peak(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimiser + self.temporary


def step_memory(run: RunConfig, shape: StepShape, micro_batch_size: int) -> StepMemory:
    """Returns the memory of a step without allocating it; takes seconds.

    The optimiser's step comes after the activations are gone. It is not run. The temporaries of Muon's step count if
    they exceed the activations; those of AdamW's never do.
    """
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        _without_masks(),
        chunks_of("cuda" if shape.on_gpu else "cpu"),
        Allocations(run.model.vocab_size) as allocations,
    ):
        model = build_empty_model(run.model.type, run.model.settings)
        sparse = SparseModel(model, range(shape.num_held), foreign_form=shape.foreign_experts)
        checkpoint_activations(model, shape.activation_checkpointing)
        assume_output_head(model)
        for module in model.modules():
            if isinstance(module, SparseExperts):
                module.kernel, module.route = _ShapesOnly(), partial(_even_routing, shape.on_gpu)
        model.train()
        allocations.restart()
        weights = allocations.live
        trainable = [parameter for _, parameter in sparse.trainable_parameters()]
        trained = sum(torch.float32.itemsize * parameter.numel() for parameter in trainable)
        ids_BS = torch.zeros((micro_batch_size, run.training.sequence_length), dtype=torch.int64)
        if micro_batch_size < run.training.batch_size:
            # From the second micro-batch on, gradients of the first are there to be added to.
            for parameter in trainable:
                parameter.grad = torch.zeros_like(parameter)
        with torch.autocast("cpu", torch.bfloat16, enabled=shape.precision == "bf16"):
            losses = language_model_loss(model, ids_BS, loss_weights(run.training), sparse.held, progress=0.0)
        losses.total.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
    moments, of_step = _optimiser_bytes(run, sparse, shape.on_gpu)
    temporary = max(of_step, allocations.peak - weights - trained)
    # All gradients are counted, even those that do not exist yet at the peak; activations are the remainder.
    logits = min(temporary, allocations.logits_at_peak)
    layers = [module for module in model.modules() if isinstance(module, SparseExperts)]
    stored = sum(buffer.nbytes for layer in layers for buffer in layer.foreign.buffers())
    on_device = foreign_bytes(shape.foreign_storage, stored, len(layers)).on_device
    return StepMemory(
        weights=weights - stored + on_device,
        gradients=trained,
        optimiser=moments,
        activations=temporary - logits,
        logits=logits,
    )


def _optimiser_bytes(run: RunConfig, sparse: SparseModel, on_gpu: bool) -> tuple[int, int]:
    """Returns the bytes of all moments in fp32, and those of the optimiser's step."""
    of_matrix = matrix_moments(run.training.optimiser)
    matrices = hidden_matrices(sparse.module)
    stacks = {parameter for kind in sparse.expert_stacks() for parameter in kind}
    moments = 0
    sizes: list[int] = []
    for name, parameter in sparse.trainable_parameters():
        is_matrix = parameter in stacks or name in matrices
        moments += torch.float32.itemsize * parameter.numel() * len(of_matrix if is_matrix else MOMENTS)
        if is_matrix:
            size = parameter.shape[-2] * parameter.shape[-1]
            sizes += [size] * (parameter.numel() // size)
    device = torch.device("cuda" if on_gpu else "cpu")
    return moments, 0 if of_matrix == MOMENTS else step_bytes(sizes, device)


@contextmanager
def _without_masks() -> Iterator[None]:
    """Keeps transformers from making attention masks for packed sequences.

    From numbers it sees that there are none; without numbers it makes masks to be safe. Calls are made in one thread.
    """
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


class StepEstimate:
    """The memory of steps of any number of sequences, without what weights, gradients and moments take.

    A step of a deep model on tensors without numbers takes seconds. Where all layers are alike, steps of models with
    one and with two of them give a lower bound: the peak grows by as much with each further layer, or by more once it
    has moved to another place. A model of at most two layers takes its own step.
    """

    def __init__(self, run: RunConfig, shape: StepShape, layout: Layout) -> None:
        self._run = run
        self._shape = shape
        self._num_alike = layers_if_alike(run.model.settings, layout)
        trained = layout.blocks[SHARED_BLOCK].size + shape.num_held * layout.expert_block(0).size
        self._gradients = torch.float32.itemsize * trained
        self._known: dict[int, StepMemory] = {}
        self._bounds: dict[int, int] = {}

    def step(self, micro_batch_size: int) -> StepMemory:
        """Returns the memory of a step that computes this many sequences at a time."""
        if micro_batch_size not in self._known:
            self._known[micro_batch_size] = step_memory(self._run, self._shape, micro_batch_size)
        return self._known[micro_batch_size]

    def temporary(self, micro_batch_size: int) -> int:
        """Returns the bytes of activations, logits, and what is computed from them."""
        return self.step(micro_batch_size).temporary

    def at_least(self, micro_batch_size: int) -> int:
        """Returns a lower bound of `temporary`, which is faster to compute."""
        if self._num_alike is None or self._num_alike <= 2 or micro_batch_size in self._known:
            return self.temporary(micro_batch_size)
        if micro_batch_size not in self._bounds:
            shallow = (with_layers(self._run, count) for count in (1, 2))
            one, two = (step_memory(run, self._shape, micro_batch_size).temporary for run in shallow)
            self._bounds[micro_batch_size] = one + (self._num_alike - 1) * (two - one)
        return self._bounds[micro_batch_size]

    def largest_micro_batch(self, room: float, most: int) -> int:
        """Returns the most sequences at a time that fit into `room` bytes: `most`, or a power of two; 0 if none do."""
        if (one := self.at_least(1)) > room:
            return 0
        if most == 1:
            return int(self.temporary(1) <= room)
        each = max(1, self.at_least(2) - one)
        # A whole batch finds no gradients of an earlier micro-batch.
        spared = {self._run.training.batch_size: self._gradients}
        sizes = sorted({most, *(1 << power for power in range(most.bit_length()))}, reverse=True)
        likely = (size for size in sizes if one + (size - 1) * each - spared.get(size, 0) <= room)
        return next((size for size in likely if self.temporary(size) <= room), 0)


def with_layers(run: RunConfig, count: int) -> RunConfig:
    """Returns the run with a model of `count` layers."""
    settings = {**run.model.settings, "num_hidden_layers": count}
    return replace(run, model=replace(run.model, settings=settings))


def layers_if_alike(settings: Mapping[str, Any], layout: Layout) -> int | None:
    """Returns the number of layers if all have the same tensors and no setting tells them apart, else None."""
    depth = settings.get("num_hidden_layers")
    if not isinstance(depth, int) or any(
        isinstance(value, list) and len(value) == depth for value in settings.values()
    ):
        return None
    tensors: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for block in layout.blocks[:2]:  # the shared tensors, and one expert's
        for slot in block.slots:
            if (match := re.search(r"\blayers\.(\d+)\.(.+)", slot.name)) is not None:
                tensors.setdefault(int(match[1]), set()).add((match[2], slot.shape))
    first = tensors.get(0)
    return depth if len(tensors) == depth and all(each == first for each in tensors.values()) else None


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, each storage once.

    Attributes:
        live: bytes now.
        peak: the largest value of `live`.
        logits_at_peak: bytes, at the peak, of tensors with one column per entry of the vocabulary.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.live = self.peak = self.logits_at_peak = 0
        self._columns = () if vocabulary is None else (vocabulary, aligned(vocabulary))
        self._logits = 0
        self._seen: set[int] = set()

    def restart(self) -> None:
        """Forgets the peaks."""
        self.peak, self.logits_at_peak = self.live, self._logits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), leaf.dim() > 1 and leaf.shape[-1] in self._columns)
        return result

    def _count(self, storage: torch.UntypedStorage, is_logits: bool) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self._add(size, is_logits)
        weakref.finalize(storage, self._release, key, size, is_logits)

    def _release(self, key: int, size: int, is_logits: bool) -> None:
        self._seen.discard(key)
        self._add(-size, is_logits)

    def _add(self, size: int, is_logits: bool) -> None:
        self.live += size
        if is_logits:
            self._logits += size
        if self.live > self.peak:
            self.peak, self.logits_at_peak = self.live, self._logits


class _ShapesOnly:
    """A kernel whose results have the right shapes; the first group's matrix stands for all."""

    source, dispatch = "shapes only", None

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""
        return x_TD @ w_GFD[0].T

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_x_TD."""
        return grad_y_TF @ w_GFD[0]

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_w_GFD."""
        return x_TD.new_empty((len(groups.ends_G), grad_y_TF.shape[1], x_TD.shape[1]))


def _even_routing(on_gpu: bool, slots_TK: Tensor, num_slots: int, num_held: int) -> Routing:
    """Returns a routing in which every slot has the same number of rows."""
    T, K = slots_TK.shape
    token_S = slots_TK.new_empty((T * K,))
    ends_E = slots_TK.new_empty((num_slots,), dtype=torch.int32)
    ends = [T * K * slot // num_slots for slot in range(num_slots + 1)]
    counts = tuple(end - start for start, end in pairwise(ends))
    return Routing(token_S, torch.empty_like(slots_TK), ends_E, counts, ends[num_held], one_by_one=not on_gpu)
