"""The loss on held-out text: when it is measured, on which sequences, and how precise it is.

All peers with the same data measure the same sequences (`Sampler.evaluation_batches`), a sample spread over the whole
held-out split. The standard error estimates how far the loss on the whole split may be from that on the sample; it does
not cover text of another kind.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from spes_swarm.model.losses import cross_entropy_of_sequences
from spes_swarm.training.gradients import num_targets


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """A measured loss, in nats per target."""

    mean: float  # over all targets; NaN if there are none
    stderr: float | None  # standard error of the mean; None for a single sequence


def held_out_loss(losses: Sequence[float], targets: Sequence[int] | None = None) -> HeldOutLoss:
    """Returns the mean loss over all targets, and its standard error as if the sequences were drawn independently.

    One sequence is drawn from each of several equal parts of the split, which can only make the true error smaller.
    With unequal numbers of targets the mean is a ratio of sums, and its standard error that of the linearised ratio.

    Args:
        losses: mean of each sequence.
        targets: number of targets of each; None: all have the same.
    """
    counted = [(loss, 1 if targets is None else targets[i]) for i, loss in enumerate(losses)]
    counted = [(loss, count) for loss, count in counted if count]
    if not counted:
        return HeldOutLoss(mean=math.nan, stderr=None)
    total = sum(count for _, count in counted)
    mean = math.fsum(loss * count for loss, count in counted) / total
    if len(counted) < 2:
        return HeldOutLoss(mean=mean, stderr=None)
    residuals = math.fsum(((loss - mean) * count * len(counted) / total) ** 2 for loss, count in counted)
    return HeldOutLoss(mean=mean, stderr=math.sqrt(residuals / (len(counted) - 1) / len(counted)))


@dataclass(frozen=True)
class HeldOutText:
    """Measures a model on the run's held-out sequences."""

    batches: Sequence[npt.NDArray[np.int64]]  # each (B, S); if empty, nothing is measured
    every_rounds: int  # between measurements; 0: never
    device: torch.device  # of the model
    autocast: Callable[[], AbstractContextManager[None]]  # the precision in which the model is trained

    def due(self, round_number: int, *, first: bool, last: bool) -> bool:
        """Returns True if the model is to be measured after this commit: the `first` of this peer's session (a
        baseline), the `last` one (the result), and those of the same rounds on all peers.
        """
        if not self.every_rounds or not self.batches:
            return False
        return first or last or round_number % self.every_rounds == 0

    def measure(self, module: torch.nn.Module) -> HeldOutLoss:
        """Measures the model in its current state; its training mode is restored."""
        losses: list[float] = []
        targets: list[int] = []
        with self.autocast():
            for batch_BS in self.batches:
                samples_BS = torch.from_numpy(batch_BS).to(self.device)
                losses += cross_entropy_of_sequences(module, samples_BS).tolist()
                targets += num_targets(batch_BS).tolist()
        return held_out_loss(losses, targets)
