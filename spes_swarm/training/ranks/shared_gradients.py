"""The gradients of a batch, computed by all ranks of a peer.

Each rank computes the gradients of an equal share of the batch, and their sum arrives at rank 0. Only rank 0 clips and
steps; before the next batch it sends the trained weights to the others. That is as much traffic as an all-reduce of the
gradients, which is such a sum followed by such a broadcast. In return the other ranks need no optimiser state, all
ranks compute with the same bits, and whatever changes weights or moments between two steps concerns rank 0 alone.

Shapes: B sequences, S tokens, L layers with experts, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.gradients import Gradients
from spes_swarm.training.out_of_memory import is_out_of_memory
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Step


class SharedGradients:
    """Rank 0's side: takes the place of `Gradients` in a trainer."""

    def __init__(self, group: RankGroup, model: SparseModel, own: Gradients, device: torch.device) -> None:
        """Takes rank 0's own gradients; the other ranks have built the same model."""
        self._group = group
        self._model = model
        self._own = own
        self._device = device
        self._sent_revision: int | None = None  # of the weights that the other ranks have
        shape = len(model.layer_names), model.layout.num_experts
        self._routed_LE: npt.NDArray[np.int64] = np.zeros(shape, dtype=np.int64)

    def compute(self, batch_BS: npt.NDArray[np.int64], progress: float) -> float:
        """See Gradients.

        Raises:
            MemoryError, RuntimeError: not even one sequence fits on one of the ranks; see `is_out_of_memory`.
            RankError: another rank of this peer has ended.
        """
        try:
            return self._compute(batch_BS, progress)
        except BaseException as exc:
            if not is_out_of_memory(exc):  # that ends the step for all ranks
                self._group.abandon()
            raise

    def _compute(self, batch_BS: npt.NDArray[np.int64], progress: float) -> float:
        sequences, tokens = batch_BS.shape
        step = Step(
            held=self._model.held,
            all_weights=self._model.revision != self._sent_revision,
            batch_shape=(sequences, tokens),
            progress=progress,
        )
        self._group.send_order(step)
        exchange_weights(self._group, self._model, step)
        self._sent_revision = self._model.revision
        self._group.broadcast([torch.from_numpy(batch_BS).to(self._device)])
        loss, self._routed_LE = compute_share(self._group, self._model, self._own, batch_BS, progress)
        return loss

    def pop_routed_tokens(self) -> npt.NDArray[np.int64]:
        """See Gradients."""
        routed_LE, self._routed_LE = self._routed_LE, np.zeros_like(self._routed_LE)
        return routed_LE

    def pop_router_entropy(self) -> npt.NDArray[np.float64] | None:
        """See Gradients; rank 0's share of each batch stands for the whole batch."""
        return self._own.pop_router_entropy()


def exchange_weights(group: RankGroup, model: SparseModel, step: Step) -> None:
    """Brings the weights of all ranks to those of rank 0: all of them, or only the trained ones.

    Raises:
        RankError: another rank of this peer has ended.
    """
    if step.all_weights:
        model.foreign_storage.before_write()
    group.broadcast(_all_weights(model) if step.all_weights else _trained_weights(model))


def _trained_weights(model: SparseModel) -> Iterator[Tensor]:
    return (parameter.detach() for _, parameter in model.trainable_parameters())


def _all_weights(model: SparseModel) -> Iterator[Tensor]:
    yield from _trained_weights(model)
    for module in model.module.modules():
        # Others' experts in their stored form: all ranks get the same bits.
        yield from module.buffers(recurse=False)


def compute_share(
    group: RankGroup, model: SparseModel, own: Gradients, batch_BS: npt.NDArray[np.int64], progress: float
) -> tuple[float, npt.NDArray[np.int64]]:
    """Computes the gradients of this rank's share of a batch, and adds up those of all ranks on rank 0.

    Returns the mean cross-entropy of the batch in nats, and the routed copies of its tokens (L, E).

    Raises:
        MemoryError, RuntimeError: not even one sequence fits on one of the ranks; the others have not been waiting.
        RankError: another rank of this peer has ended.
    """
    failure: BaseException | None = None
    shape = len(model.layer_names), model.layout.num_experts
    summary = torch.zeros(2 + math.prod(shape), dtype=torch.float64)  # failures, loss, routed tokens
    try:
        summary[1] = own.compute(batch_BS, progress, group.placement.share(len(batch_BS)))
        summary[2:] = torch.from_numpy(model.pop_routed_tokens()).flatten()
    except (MemoryError, RuntimeError) as exc:
        if not is_out_of_memory(exc):
            raise
        failure = exc
        summary[0] = 1
    group.all_reduce(summary)
    if failure is not None:
        raise failure
    if summary[0] > 0:
        raise MemoryError("on another rank of this peer")
    gradients: list[Tensor] = []
    for _, parameter in model.trainable_parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    group.reduce(gradients)
    return float(summary[1]), summary[2:].to(torch.int64).view(shape).numpy()
