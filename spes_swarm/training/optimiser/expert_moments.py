"""The optimiser state of experts that change hands: their rows of its tensors, and the warm-up after adoption.

Shapes: N elements of one expert's block, K moments per weight. Stacks of held experts have these as
their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from spes_swarm.base.arrays import FloatArray
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.protocol.consensus.layout import TensorSlot
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser
from spes_swarm.training.profiling import span


def _rows(model: SparseModel, expert: int) -> Iterator[tuple[TensorSlot, nn.Parameter, int]]:
    """Yields, for each tensor of a held expert, its slot in the block, its stacked parameter, and its row there."""
    parameters = dict(model.trainable_parameters())
    row = model.held.index(expert)
    for slot in model.layout.expert_block(expert).slots:
        yield slot, parameters[slot.name], row


def read_moments(optimiser: PeerOptimiser, model: SparseModel, expert: int, out_KN: FloatArray) -> int:
    """Copies a held expert's moments, one kind after the other, into `out_KN`; returns the optimiser's step.

    Before the first step they are zero.
    """
    step = 0
    for index, moment in enumerate(optimiser.expert_moments):
        for slot, parameter, row in _rows(model, expert):
            out_N = torch.from_numpy(_of_slot(model, expert, slot, index, out_KN))
            optimiser.read_moment(parameter, moment, out_N, row)
            step = max(step, optimiser.num_steps(parameter))
    return step


def write_moments(optimiser: PeerOptimiser, model: SparseModel, expert: int, moments_KN: FloatArray, step: int) -> None:
    """Sets the moments of a held expert.

    There is one step count per stack. It becomes at least `step`: with a smaller one, AdamW's bias correction would
    inflate the moments. If the optimiser has not taken a step yet, the other rows start at zero.
    """
    for slot, parameter, row in _rows(model, expert):
        optimiser.set_num_steps(parameter, max(optimiser.num_steps(parameter), step))
        for index, moment in enumerate(optimiser.expert_moments):
            values_N = np.ascontiguousarray(_of_slot(model, expert, slot, index, moments_KN))
            optimiser.write_moment(parameter, moment, torch.from_numpy(values_N), row)


def _of_slot(model: SparseModel, expert: int, slot: TensorSlot, index: int, moments_KN: FloatArray) -> FloatArray:
    """Returns the part of an expert's moments that belongs to a tensor; `index` counts the kinds of moments."""
    block = model.layout.expert_block(expert)
    start = index * block.size + slot.start - block.start
    return moments_KN[start : start + slot.size]


class WarmUp:
    """Shortens the first steps of experts that were adopted without moments.

    There is one step size per stack, so the full step is taken and then scaled down, for those rows only.
    """

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._done: dict[int, int] = {}

    def start(self, experts: Collection[int]) -> None:
        """Starts the warm-up of these experts."""
        if self._num_steps:
            self._done.update(dict.fromkeys(experts, 0))

    def stop(self, experts: Collection[int]) -> None:
        """Ends the warm-up of these experts: they take full steps from now on, or are no longer held."""
        for expert in experts:
            self._done.pop(expert, None)

    @torch.no_grad()
    @span("optimiser")
    def step(self, model: SparseModel, take: Callable[[], object]) -> None:
        """Takes an optimiser step, of which experts in warm-up keep a fraction that grows linearly to 1."""
        before: list[tuple[Tensor, Tensor, float]] = []
        for expert, done in self._done.items():
            for _, parameter, row in _rows(model, expert):
                live = parameter.detach()[row]
                before.append((live, live.clone(), (done + 1) / (self._num_steps + 1)))
        with torch.enable_grad():
            take()
        for live, old, share in before:
            live.sub_(old).mul_(share).add_(old)
        self._done = {expert: done + 1 for expert, done in self._done.items() if done + 1 < self._num_steps}
