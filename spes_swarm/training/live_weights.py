"""The weights that a peer trains, and two flat vectors: the swarm's reference and the peer's contribution.

Only trained blocks are contributed; all others follow the reference. With overlap the peer keeps training during a
round, and its progress in that time is added to the outcome.

Shape: N elements of the flat vector, or of one block of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.model.merge import merge_alpha, merge_due, merged_slots
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.profiling import span


class LiveWeights:
    """Moves values between a model and the flat vectors; only reads the reference.

    The contribution receives the trained blocks for a round, and holds the outcome for them afterwards.
    """

    def __init__(self, model: SparseModel, reference_N: FloatArray, contribution_N: FloatArray, run: RunConfig) -> None:
        self._model = model
        self.reference_N = reference_N
        self.contribution_N = contribution_N
        self._merge = run.merge
        self._clock = RoundClock.of(run)
        self._overlap = run.round.overlap
        self._contributed: dict[int, FloatArray] = {}  # with overlap: what was contributed, block by block

    @property
    def trained_blocks(self) -> list[int]:
        """Indices of the blocks of the shared layers and the held experts."""
        return [block.index for block in self._model.layout.trained_blocks(self._model.held)]

    def read_trained(self, out_N: FloatArray) -> None:
        """Copies the trained blocks to their places in a vector of the whole model."""
        for index in self.trained_blocks:
            self._model.read_block(index, out_N[self._where(index)])

    def beyond_reference(self) -> dict[int, FloatArray]:
        """Copies those trained blocks that differ from the reference in any bit. Memory: these, and one block more.

        After a commit without a merge or overlap, blocks with missing parts do, experts that did not take part, and
        blocks in which a codec has left a rounding error: with fp16 the experts that this peer alone holds, with int8
        and int4 all.
        """
        found: dict[int, FloatArray] = {}
        for index in self.trained_blocks:
            values_N = self._read(index)
            if not np.array_equal(values_N.view(np.uint32), self.reference_N[self._where(index)].view(np.uint32)):
                found[index] = values_N
        return found

    @span("contribution")
    def contribute(self) -> bool:
        """Copies the trained blocks into the contribution. Returns True if all values are finite."""
        self.read_trained(self.contribution_N)
        finite = True
        for index in self.trained_blocks:
            values_N = self.contribution_N[self._where(index)]
            if self._overlap:
                self._contributed[index] = values_N.copy()
            # The fp64 sum is finite exactly if all values are, and needs no temporary array.
            finite = finite and math.isfinite(float(values_N.sum(dtype=np.float64)))
        return finite

    def follow(self, blocks: Iterable[int], *, entirely: bool = False) -> None:
        """Applies the outcome of a round to these blocks: the contribution where trained, else the reference.

        With `entirely`, progress made during the round is dropped.
        """
        trained = frozenset(self.trained_blocks)
        for index in blocks:
            where = self._where(index)
            if index not in trained:
                self._model.write_block(index, self.reference_N[where])
            elif entirely or not self._overlap:
                self._model.write_block(index, self.contribution_N[where])
            else:
                live_N = self._read(index)
                live_N += self.contribution_N[where] - self._contributed[index]
                self._model.write_block(index, live_N)
        self._contributed.clear()

    def follow_all(self) -> None:
        """Like `follow`, for all blocks."""
        self.follow(range(len(self._model.layout.blocks)))

    def reset_to_reference(self, blocks: Iterable[int] | None = None) -> None:
        """Resets blocks (default: all) to the reference; local progress is lost."""
        for index in range(len(self._model.layout.blocks)) if blocks is None else blocks:
            self._model.write_block(index, self.reference_N[self._where(index)])

    def merge_if_due(self, round_number: int, previous: int | None = None) -> float | None:
        """Applies the expert merge if the last commit made it due; returns its alpha, or None if nothing was merged.

        The commit before it was of the round `previous`, by default one round earlier.
        """
        # Between two synchronisations the experts of the reference stand still: merged again, they would move twice.
        current = self._clock.last_expert_round(round_number)
        previous = self._clock.last_expert_round(previous if previous is not None else max(0, current - 1))
        step = self._clock.step_of(current)
        if not merge_due(self._clock.step_of(previous), step, self._merge.interval):
            return None
        alpha = merge_alpha(step, self._merge.alpha, self._merge.steps)
        if alpha == 0:
            return None
        layout = self._model.layout
        held = {expert: layout.expert_block(expert) for expert in self._model.held}
        moved = {expert: self._read(block.index) for expert, block in held.items()}
        for slot, merged in merged_slots(self.reference_N, layout, alpha, self._merge.neighbours):
            if slot.expert in held:
                # A held expert moves by the change that the merge makes to the reference: its local progress is kept.
                start = slot.start - held[slot.expert].start
                change_N = merged.reshape(-1) - self.reference_N[slot.start : slot.start + slot.size]
                moved[slot.expert][start : start + slot.size] += change_N
            else:
                self._model.write_slot(slot, merged)
        for expert, block in held.items():
            self._model.write_block(block.index, moved[expert])
        return alpha

    def _where(self, index: int) -> slice:
        return self._model.layout.blocks[index].where

    def _read(self, index: int) -> FloatArray:
        values_N = np.empty(self._model.layout.blocks[index].size, dtype=np.float32)
        self._model.read_block(index, values_N)
        return values_N
