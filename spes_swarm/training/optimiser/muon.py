"""Muon for matrices, AdamW for everything else (Keller Jordan's Muon, with the scale of arXiv 2502.16982).

Muon keeps one moving average of the gradients of a matrix, and replaces the singular values of the update by numbers
near 1. Each expert's matrices are treated on their own, and so are the gate and up matrices that are stored as one.

Tensor suffixes: N elements of a parameter, or of a range of it, flat; M matrices of A rows and B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.moment_storage import MOMENTS, MOMENTUM, batch_elements, pieces

_STEPS = 5
_QUINTIC = 3.4445, -4.7750, 2.0315  # a x + b x^3 + c x^5: steep at 0, near 1 for singular values from 0 to 1
_TINY = 1e-7  # smallest norm that a matrix is divided by
# Per element of a batch: the look-aheads, a copy of them, and the iteration's matrices, of which four exist at once.
_BYTES_OF_STEP = 24
_RMS = 0.2  # of an update, before the learning rate: close to that of AdamW's updates


def orthogonalise(matrices_MAB: Tensor) -> Tensor:
    """Returns the matrices (M, A, B) with singular values near 1: all within 0.7 to 1.2, except the smallest ones.

    Newton-Schulz iteration, in fp32 on a CPU and in bf16 elsewhere. The result has the dtype of the argument.
    """
    tall = matrices_MAB.shape[-2] > matrices_MAB.shape[-1]
    wide = matrices_MAB.mT if tall else matrices_MAB
    norms = torch.linalg.matrix_norm(wide, dtype=torch.float32, keepdim=True).clamp_min(_TINY)
    x = (wide / norms).to(torch.float32 if wide.device.type == "cpu" else torch.bfloat16)
    a, b, c = _QUINTIC
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    result_MAB: Tensor = (x.mT if tall else x).to(matrices_MAB.dtype)
    return result_MAB


@dataclass(frozen=True)
class _Range:
    """Whole matrices of a parameter: a range of its elements, and how it is cut into matrices."""

    parameter: nn.Parameter
    group: dict[str, Any]
    pieces: tuple[slice, ...]  # consecutive, so many elements of the parameter at a time
    shape: tuple[int, int]  # of each matrix, (A, B)

    @property
    def wide(self) -> tuple[torch.device, int, int]:
        """Ranges with equal values are orthogonalised together, once tall matrices are transposed."""
        return self.parameter.device, min(self.shape), max(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(piece.stop - piece.start for piece in self.pieces)


def step_bytes(matrices: Sequence[int], device: torch.device) -> int:
    """Returns the bytes that a step takes at most in addition to weights, gradients and moments.

    `matrices` has the elements of each hidden matrix, and of each matrix of an expert (gate and up count as one).
    """
    return _BYTES_OF_STEP * max(*matrices, min(sum(matrices), batch_elements(device)), 0)


class PeerMuon(PeerAdamW):
    """Muon for the groups that have `matrices`, AdamW for the others; see `registry.make_optimiser` for the groups.

    `matrices` is how many matrices are stacked, row by row, in each 2-D slice of the group's parameters; such a group
    also has `momentum`. For the memory of a step see `step_bytes`.

    The momentum is a moving average, m = momentum * m + (1 - momentum) * gradient.
    """

    expert_moments = MOMENTUM

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See PeerOptimiser."""
        return MOMENTUM if "matrices" in group else MOMENTS

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        """Updates every parameter that has a gradient."""
        self._step_adamw(group for group in self.param_groups if "matrices" not in group)
        self._step_muon(group for group in self.param_groups if "matrices" in group)
        self._synchronise()

    def _step_muon(self, groups: Iterable[dict[str, Any]]) -> None:
        waiting: defaultdict[tuple[torch.device, int, int], list[_Range]] = defaultdict(list)
        stepped = []
        for group in groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.numel() == 0:
                    continue
                stepped.append(self._state_of(parameter))
                for each in self._ranges(parameter, group):
                    batch = waiting[each.wide]
                    if batch and sum(other.size for other in batch) + each.size > batch_elements(parameter.device):
                        self._update_batch(batch)
                        batch.clear()
                    batch.append(each)
        for batch in waiting.values():
            self._update_batch(batch)
        for state in stepped:
            state["step"] += 1

    def _ranges(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[_Range]:
        """Yields ranges that together are the parameter, each of at most `batch_elements` or of one expert."""
        rows, columns = parameter.shape[-2:]
        shape = (rows // group["matrices"], columns)
        one, everything = rows * columns, parameter.numel()
        size = one if self._on_host else max(one, batch_elements(parameter.device) // one * one)
        for start in range(0, everything, size):
            stop = min(start + size, everything)
            cut = pieces(start, stop, parameter.device) if self._on_host else (slice(start, stop),)
            yield _Range(parameter, group, tuple(cut), shape)

    def _update_batch(self, batch: list[_Range]) -> None:
        """Takes the step of ranges whose matrices have the same shape, once tall ones are transposed."""
        updates = []
        for each in batch:
            update_MAB = self._next_update(each).view(-1, *each.shape)
            updates.append(update_MAB.mT if each.shape[0] > each.shape[1] else update_MAB)
        wide_MAB = orthogonalise(torch.cat(updates))
        counts = [len(update) for update in updates]
        for each, update in zip(batch, torch.split(wide_MAB, counts), strict=True):
            tall = each.shape[0] > each.shape[1]
            self._apply(each, (update.mT if tall else update).reshape(-1))

    def _next_update(self, each: _Range) -> Tensor:
        """Updates the momentum of a range; returns Nesterov's look-ahead (N,), on the device of the parameter."""
        parameter, decay = each.parameter, each.group["momentum"]
        assert parameter.grad is not None
        (name,) = MOMENTUM
        gradient_N = parameter.grad.reshape(-1)
        ahead = []
        for piece in each.pieces:
            stored_N = self.state[parameter][name].view(-1)[piece]
            momentum_N = stored_N.to(parameter.device, non_blocking=True)
            momentum_N.lerp_(gradient_N[piece], 1 - decay)
            stored_N.copy_(momentum_N, non_blocking=True)  # nothing where they are the same tensor
            ahead.append(gradient_N[piece].lerp(momentum_N, decay))
        return ahead[0] if len(ahead) == 1 else torch.cat(ahead)

    def _apply(self, each: _Range, update_N: Tensor) -> None:
        rate = each.group["lr"]
        start = each.pieces[0].start
        for piece in each.pieces:
            weights_N = each.parameter.detach().view(-1)[piece]
            weights_N.mul_(1 - rate * each.group["weight_decay"])
            weights_N.add_(update_N[piece.start - start : piece.stop - start], alpha=-rate * _scale(*each.shape))


def _scale(rows: int, columns: int) -> float:
    """Returns the factor that gives an orthogonal update the root mean square `_RMS`."""
    return _RMS * math.sqrt(max(rows, columns))
