"""Others' experts divided among the ranks of a peer: each stores some rows of every matrix.

A layer's matrices are gathered, in their stored form, on all ranks at once for each of its passes. Every rank must
therefore run the same passes in the same order; the routing of tokens does not matter. Rows are divided rather than
experts: when the held experts change, the shares stay equal and no rows move between ranks.

Tensor suffixes: W ranks, G experts, R rows of a matrix, r rows of a share, X stored values of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from spes_swarm.model.foreign.storage import ForeignStorage


class Gathering(Protocol):
    """The connection between the ranks."""

    rank: int
    world_size: int

    def gather(self, own: Tensor) -> Tensor:
        """Returns the tensors of all ranks (W, ...), which have the same shape; all ranks must call it.

        Raises:
            RankError: another rank has ended.
        """


class SharedStorage(ForeignStorage):
    """Stores a share of each matrix on the device of the model."""

    def __init__(self, ranks: Gathering) -> None:
        """Takes the connection to the other ranks."""
        self._ranks = ranks
        # Set on rank 0: `publish` passes a written matrix on to the other ranks, `flush` sends all that are pending.
        self.publish: Callable[[nn.Module, int, tuple[Tensor, Tensor]], None] | None = None
        self.flush: Callable[[], None] | None = None

    def own_rows(self, num_rows: int) -> slice:
        """See ForeignStorage. The last ranks may have fewer rows than space for them."""
        each = -(-num_rows // self._ranks.world_size)
        return slice(self._ranks.rank * each, (self._ranks.rank + 1) * each)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """See ForeignStorage. Matrices may have extra rows at the end, which are meaningless."""
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
        """See ForeignStorage. Pending matrices refer to the current stacks."""
        if self.flush is not None:
            self.flush()
