"""The optimiser state of experts that change hands: their rows of the AdamW state, and the warm-up after adoption.

Shapes: N elements of one expert's block; stacks of held experts have the held experts as their first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from spes_swarm.base.arrays import FloatArray
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.protocol.consensus.layout import TensorSlot

_MOMENTS = ("exp_avg", "exp_avg_sq")


def _rows(model: SparseModel, expert: int) -> Iterator[tuple[TensorSlot, nn.Parameter, int]]:
    """Yields, for each tensor of a held expert, its slot in the block, its stacked parameter, and its row there."""
    parameters = dict(model.trainable_parameters())
    row = model.held.index(expert)
    for slot in model.layout.expert_block(expert).slots:
        yield slot, parameters[slot.name], row


def read_moments(optimiser: torch.optim.AdamW, model: SparseModel, expert: int, out_2N: FloatArray) -> int:
    """Copies a held expert's first and second moments into `out_2N`; returns the optimiser's step.

    Before the first step they are zero.
    """
    block = model.layout.expert_block(expert)
    step = 0
    for half, key in enumerate(_MOMENTS):
        for slot, parameter, row in _rows(model, expert):
            start = half * block.size + slot.start - block.start
            state = optimiser.state.get(parameter)
            if not state:
                out_2N[start : start + slot.size] = 0.0
                continue
            out_2N[start : start + slot.size] = state[key][row].detach().float().cpu().numpy().reshape(-1)
            step = max(step, int(state["step"]))
    return step


def write_moments(
    optimiser: torch.optim.AdamW, model: SparseModel, expert: int, moments_2N: FloatArray, step: int
) -> None:
    """Sets the moments of a held expert.

    AdamW has one step count per stack. It becomes at least `step`: with a smaller one, bias correction would inflate
    the moments. If the optimiser has not taken a step yet, the other rows start at zero.
    """
    block = model.layout.expert_block(expert)
    for slot, parameter, row in _rows(model, expert):
        state = optimiser.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, device=parameter.device)
            for key in _MOMENTS:
                state[key] = torch.zeros_like(parameter)
        state["step"].fill_(max(float(state["step"]), float(step)))
        for half, key in enumerate(_MOMENTS):
            start = half * block.size + slot.start - block.start
            values = torch.from_numpy(np.ascontiguousarray(moments_2N[start : start + slot.size]))
            state[key][row].copy_(values.view(slot.shape))


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
