"""The optimiser state of experts that change hands: their rows of the AdamW state, and the warm-up after adoption.

Shapes: N elements of one expert's block; stacks of held experts have the held experts as their first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from spes_swarm.base.arrays import FloatArray
from spes_swarm.model.half_weights import read_master, write_master
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.protocol.consensus.layout import TensorSlot
from spes_swarm.protocol.ownership.moment_rules import largest_ratio
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.moment_storage import MOMENTS


def _rows(model: SparseModel, expert: int) -> Iterator[tuple[TensorSlot, nn.Parameter, int]]:
    """Yields, for each tensor of a held expert, its slot in the block, its stacked parameter, and its row there."""
    parameters = dict(model.trainable_parameters())
    row = model.held.index(expert)
    for slot in model.layout.expert_block(expert).slots:
        yield slot, parameters[slot.name], row


def read_moments(optimiser: PeerAdamW, model: SparseModel, expert: int, out_2N: FloatArray) -> int:
    """Copies a held expert's first and second moments into `out_2N`; returns the optimiser's step.

    Before the first step they are zero. Moments in 8 bits are made possible first (see `moment_rules`): rounding can
    make a first moment too large for its second moment, and other peers would refuse them all.
    """
    step = 0
    for half, moment in enumerate(MOMENTS):
        for slot, parameter, row in _rows(model, expert):
            out_N = torch.from_numpy(_of_slot(model, expert, slot, half, out_2N))
            optimiser.read_moment(parameter, moment, out_N, row)
            step = max(step, optimiser.num_steps(parameter))
    ratio = largest_ratio(*optimiser.defaults["betas"])
    if optimiser.form == "int8" and math.isfinite(ratio):
        first_N, second_N = np.split(out_2N, 2)  # views
        largest_N = ratio * np.sqrt(second_N)
        np.clip(first_N, -largest_N, largest_N, out=first_N)
    return step


def write_moments(optimiser: PeerAdamW, model: SparseModel, expert: int, moments_2N: FloatArray, step: int) -> None:
    """Sets the moments of a held expert.

    AdamW has one step count per stack. It becomes at least `step`: with a smaller one, bias correction would inflate
    the moments. If the optimiser has not taken a step yet, the other rows start at zero.
    """
    for slot, parameter, row in _rows(model, expert):
        optimiser.set_num_steps(parameter, max(optimiser.num_steps(parameter), step))
        for half, moment in enumerate(MOMENTS):
            values_N = np.ascontiguousarray(_of_slot(model, expert, slot, half, moments_2N))
            optimiser.write_moment(parameter, moment, torch.from_numpy(values_N), row)


def _of_slot(model: SparseModel, expert: int, slot: TensorSlot, half: int, moments_2N: FloatArray) -> FloatArray:
    """Returns the part of an expert's moments that belongs to a tensor; `half` is 0 for first ones, 1 for second."""
    block = model.layout.expert_block(expert)
    start = half * block.size + slot.start - block.start
    return moments_2N[start : start + slot.size]


class WarmUp:
    """Shortens the first steps of experts that were adopted without moments.

    AdamW has one step size per stack, so the full step is taken and then scaled down, for those rows only.
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
    def step(self, model: SparseModel, take: Callable[[], object]) -> None:
        """Takes an optimiser step, of which experts in warm-up keep a fraction that grows linearly to 1."""
        before: list[tuple[nn.Parameter, int, Tensor, float]] = []
        for expert, done in self._done.items():
            for _, parameter, row in _rows(model, expert):
                before.append((parameter, row, read_master(parameter, row).clone(), (done + 1) / (self._num_steps + 1)))
        with torch.enable_grad():
            take()
        for parameter, row, old, share in before:
            write_master(parameter, read_master(parameter, row).sub_(old).mul_(share).add_(old), row)
        self._done = {expert: done + 1 for expert, done in self._done.items() if done + 1 < self._num_steps}
