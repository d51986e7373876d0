"""The gradients of one optimiser step, from as many sequences at a time as fit into memory.

The run sets the batch of a step, and each peer has its own memory: the batch is split into micro-batches whose
gradients add up to those of the whole. Every mean over targets is weighted by how many of the batch's targets a
micro-batch has, and every mean over tokens by how many of its tokens, so cross-entropy and both z-losses do not depend
on the split. The load balance is a product of two means and does: it is that of each micro-batch, averaged, as in the
code of SPES and of megablocks.

Shapes: B sequences, S tokens, L layers with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from spes_swarm.config.run import TrainingConfig
from spes_swarm.model.losses import BatchShare, LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.out_of_memory import is_out_of_memory
from spes_swarm.training.profiling import span


def loss_weights(training: TrainingConfig) -> LossWeights:
    """Returns the factors of the losses that a run's settings ask for."""
    return LossWeights(
        load_balance=training.load_balance_weight,
        router_z=training.router_z_weight,
        logit_z=training.logit_z_weight,
        decayed_balance=training.local_balance_start is not None,
        decayed_balance_start=training.local_balance_start or 1.0,
        decayed_balance_fraction=training.local_balance_fraction,
    )


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Returns the context in which losses are computed; matrix products are in `precision`, "fp32" or "bf16"."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


class GradientSource(Protocol):
    """Where a trainer's gradients come from: this process alone, or all ranks of the peer."""

    def compute(self, batch_BS: npt.NDArray[np.int64], progress: float) -> float:
        """See Gradients."""

    def pop_routed_tokens(self) -> npt.NDArray[np.int64]:
        """See Gradients."""

    def pop_router_entropy(self) -> npt.NDArray[np.float64] | None:
        """See Gradients."""


class Gradients:
    """Computes the gradients of batches; halves its micro-batches for good whenever one does not fit."""

    def __init__(
        self,
        model: SparseModel,
        weights: LossWeights,
        micro_batch_size: int,
        *,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[None]],
        warn: Callable[[str, str], None],
    ) -> None:
        """Takes the largest size to try; `warn` is told (kind, text) when it shrinks."""
        self._model = model
        self._weights = weights
        self._device = device
        self._autocast = autocast
        self._warn = warn
        self.micro_batch_size = micro_batch_size
        # Summed over steps, on the device, with the sum of their weights.
        self._entropy_L: torch.Tensor | None = None
        self._entropy_weight = 0.0

    def compute(self, batch_BS: npt.NDArray[np.int64], progress: float, share: slice = slice(None)) -> float:
        """Sets the gradients of all trained parameters; returns the mean cross-entropy in nats.

        Args:
            batch_BS: token ids; the complement `~id` of a token that is not a target. Without targets the result is 0.
            progress: fraction of the whole training that is done, 0 to 1.
            share: which sequences to compute. Gradients and cross-entropy are the part of these in those of the batch:
                over all shares, they add up.

        Raises:
            MemoryError, RuntimeError: not even one sequence fits; see `is_out_of_memory`.
        """
        self._model.module.train()
        while True:
            size = min(self.micro_batch_size, len(batch_BS[share]))
            try:
                return self._add_up(batch_BS, share, size, progress)
            except (MemoryError, RuntimeError) as exc:
                if size == 1 or not is_out_of_memory(exc):
                    raise
            # Outside the handler: the exception's traceback keeps the activations alive.
            self._forget()
            self.micro_batch_size = size // 2
            self._warn("memory", f"{size} sequences at a time do not fit into memory: trying {size // 2}")

    def _add_up(self, batch_BS: npt.NDArray[np.int64], computed: slice, size: int, progress: float) -> float:
        self._model.module.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        entropies: list[tuple[torch.Tensor, float]] = []
        of_batch = max(1, int(num_targets(batch_BS).sum()))
        computed_BS = batch_BS[computed]
        for start in range(0, len(computed_BS), size):
            part_BS = computed_BS[start : start + size]
            targets = int(num_targets(part_BS).sum())
            share = BatchShare(targets=targets / of_batch, tokens=len(part_BS) / len(batch_BS))
            micro_BS = torch.from_numpy(part_BS).to(self._device)
            with span("forward"), self._autocast():
                losses = language_model_loss(
                    self._model.module, micro_BS, self._weights, self._model.held, progress, share
                )
            with span("backward"):
                losses.total.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            total += losses.cross_entropy * share.targets
            if losses.router_entropy is not None:
                entropies.append((losses.router_entropy, share.tokens))
        for entropy_L, weight in entropies:  # of the whole step: one that runs out of memory adds nothing
            added_L = entropy_L * weight
            self._entropy_L = added_L if self._entropy_L is None else self._entropy_L.add_(added_L)
            self._entropy_weight += weight
        return float(total)

    def pop_routed_tokens(self) -> npt.NDArray[np.int64]:
        """Returns and clears the routed copies of tokens per layer and expert (L, E) since the last call."""
        return self._model.pop_routed_tokens()

    def pop_router_entropy(self) -> npt.NDArray[np.float64] | None:
        """Returns and clears the mean entropy (L,) of the routers in nats, over the tokens since the last call.

        None if there were none, or if no auxiliary loss needs the router logits. Waits for the device.
        """
        sum_L, weight = self._entropy_L, self._entropy_weight
        self._entropy_L, self._entropy_weight = None, 0.0
        return None if sum_L is None else (sum_L.double() / weight).cpu().numpy()

    def _forget(self) -> None:
        """Drops what the failed attempt has left: gradients, counts, and the allocator's pieces of the wrong size."""
        self._model.module.zero_grad(set_to_none=True)
        self._model.pop_routed_tokens()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def num_targets(samples_BS: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how many tokens of each sequence (B,) are predicted: those that are targets, except the first."""
    counts_B: npt.NDArray[np.int64] = (samples_BS[:, 1:] >= 0).sum(axis=1)
    return counts_B
