"""The warm-up of adopted experts, which start without moments."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.profiling import span


class WarmUp:
    """Shortens the first steps of experts that were adopted.

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
        """Ends the warm-up of these experts, which are no longer held."""
        for expert in experts:
            self._done.pop(expert, None)

    @torch.no_grad()
    @span("optimiser")
    def step(self, model: SparseModel, take: Callable[[], object]) -> None:
        """Takes an optimiser step, of which experts in warm-up keep a fraction that grows linearly to 1."""
        parameters = dict(model.trainable_parameters())
        before: list[tuple[Tensor, Tensor, float]] = []
        for expert, done in self._done.items():
            row = model.held.index(expert)
            for slot in model.layout.expert_block(expert).slots:
                live = parameters[slot.name].detach()[row]
                before.append((live, live.clone(), (done + 1) / (self._num_steps + 1)))
        with torch.enable_grad():
            take()
        for live, old, share in before:
            live.sub_(old).mul_(share).add_(old)
        self._done = {expert: done + 1 for expert, done in self._done.items() if done + 1 < self._num_steps}
