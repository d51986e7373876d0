"""Others' experts divided among the ranks of a peer: each stores some rows of every matrix.

A layer's matrices are gathered for each of its passes, in their stored form, on all ranks at once. So every rank must
run the same passes in the same order; how tokens are routed does not matter. Rows are divided, not experts: however the
held experts change, every rank has an equal share, and none is moved.

Tensor suffixes: W ranks, G experts, R rows of a matrix, r rows of a share, X stored values of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from spes_swarm.model.foreign.storage import ForeignStorage


class Gathering(Protocol):
    """What connects the ranks."""

    rank: int
    world_size: int

    def gather(self, own: Tensor) -> Tensor:
        """Returns the tensors of all ranks (W, ...), which have the same shape; all ranks must call it.

        Raises:
            RankError: another rank has ended.
        """


class SharedStorage(ForeignStorage):
    """A share of each matrix, on the device of the model."""

    def __init__(self, ranks: Gathering) -> None:
        """Takes the connection to the other ranks."""
        self._ranks = ranks
        # What brings a matrix that was written on rank 0 to the others, and what makes sure that it has arrived.
        self.publish: Callable[[nn.Module, int, tuple[Tensor, Tensor]], None] | None = None
        self.flush: Callable[[], None] | None = None

    def own_rows(self, num_rows: int) -> slice:
        """See ForeignStorage. The last ranks may have fewer rows than they have room for."""
        each = -(-num_rows // self._ranks.world_size)
        return slice(self._ranks.rank * each, (self._ranks.rank + 1) * each)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """See ForeignStorage. Matrices may have more rows than they should; the last ones are meaningless."""
        return [self._whole(buffer) for buffer in layer.buffers()]

    def _whole(self, share_GrX: Tensor) -> Tensor:
        if share_GrX.numel() == 0:
            return share_GrX
        # Bytes, because gloo lacks some of the dtypes.
        shares_WGrX = self._ranks.gather(share_GrX.view(torch.uint8))
        return shares_WGrX.transpose(0, 1).flatten(1, 2).view(share_GrX.dtype)

    def written(self, stack: nn.Module, index: int, stored: tuple[Tensor, Tensor]) -> None:
        """See ForeignStorage."""
        if self.publish is not None:
            self.publish(stack, index, stored)

    def before_hold(self) -> None:
        """See ForeignStorage. What was written belongs to the experts that are held now."""
        if self.flush is not None:
            self.flush()
