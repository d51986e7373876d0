"""Sends what rank 0 writes into shared experts to the other ranks."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor, nn

from spes_swarm.base.errors import RankError
from spes_swarm.model.foreign.frozen_stack import FrozenStack
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Matrices

_FULL_BYTES = 64 << 20


class Outbox:
    """Collects rounded matrices in host memory and sends them in batches.

    If another rank has ended, they are dropped: the next step, which needs all ranks, reports it.
    """

    def __init__(self, group: RankGroup, model: SparseModel) -> None:
        self._group = group
        self._model = model
        self._stacks: list[nn.Module] = []
        self._indices: list[int] = []
        self._tensors: list[Tensor] = []
        self._num_bytes = 0

    def add(self, stack: nn.Module, index: int, stored: tuple[Tensor, Tensor]) -> None:
        """Adds the values and scales of a matrix that has been written into a stack of this model."""
        copies = [tensor.to("cpu", copy=True) for tensor in stored]
        self._stacks.append(stack)
        self._indices.append(index)
        self._tensors += copies
        self._num_bytes += sum(tensor.nbytes for tensor in copies)
        if self._num_bytes >= _FULL_BYTES:
            self.flush()

    def flush(self) -> None:
        """Sends what has been collected; called before the held experts, and thus all stacks, change."""
        if not self._stacks:
            return
        number: dict[nn.Module, int] = {stack: number for number, stack in enumerate(stacks_of(self._model))}
        places = tuple((number[stack], index) for stack, index in zip(self._stacks, self._indices, strict=True))
        tensors, self._tensors = self._tensors, []
        self._stacks, self._indices, self._num_bytes = [], [], 0
        try:
            with suppress(RankError):
                self._group.send_order(Matrices(held=self._model.held, places=places))
                self._group.broadcast(tensors)
        except BaseException:
            self._group.abandon()  # the others may wait for the matrices
            raise


def receive_matrices(group: RankGroup, model: SparseModel, order: Matrices) -> None:
    """Receives the matrices that rank 0 sends with an order, and keeps this rank's rows.

    Raises:
        RankError: another rank of this peer has ended.
    """
    model.hold(order.held)
    stacks = stacks_of(model)
    received = [stacks[number].empty_matrix() for number, _ in order.places]
    group.broadcast(tensor for pair in received for tensor in pair)
    for (number, index), pair in zip(order.places, received, strict=True):
        stacks[number].put(index, *pair)


def stacks_of(model: SparseModel) -> list[FrozenStack]:
    """Returns all stacks of a model, in an order that is the same on all ranks."""
    return [module for module in model.module.modules() if isinstance(module, FrozenStack)]
