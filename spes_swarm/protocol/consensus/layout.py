"""The flat layout of a model: where each parameter lies in the reference.

The reference is one fp32 vector. It is cut into blocks: block 0 is `shared` (all parameters outside the experts),
block 1 + e is expert e (the e-th expert of every layer, the unit of ownership). The layout is a pure function of the
parameters' names and shapes, so all peers of a run derive the same one; its digest is part of the run's manifest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

SHARED_BLOCK = 0


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One tensor (or one expert's row of a stacked tensor) inside the flat vector."""

    name: str  # parameter name in the plain transformers layout
    expert: int | None  # row of the stacked parameter; None for a shared tensor
    shape: tuple[int, ...]  # shape of this piece, without the expert dimension
    start: int  # first element in the flat vector

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Block:
    """A contiguous range of the flat vector with its own version and digest."""

    index: int
    name: str  # "shared" or "expert 3"
    expert: int | None
    start: int
    size: int
    slots: tuple[TensorSlot, ...]

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + self.size

    @property
    def where(self) -> slice:
        """Its elements in the flat vector."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class Layout:
    """All blocks of a model, in order, without gaps."""

    blocks: tuple[Block, ...]

    @classmethod
    def build(cls, shared: Mapping[str, tuple[int, ...]], stacked: Mapping[str, tuple[int, ...]]) -> Layout:
        """Lays out `shared` parameters and `stacked` expert parameters whose first dimension is the expert.

        Names are sorted, so the result does not depend on the order in which a model registers its parameters.

        Raises:
            ValueError: the stacked parameters disagree on the number of experts, or there are none.
        """
        counts = {shape[0] for shape in stacked.values()}
        if len(counts) != 1:
            raise ValueError(f"all stacked parameters must have the same number of experts, got {sorted(counts)}")
        (num_experts,) = counts
        blocks: list[Block] = []
        start = 0
        for expert in (None, *range(num_experts)):
            pieces = shared if expert is None else {name: shape[1:] for name, shape in stacked.items()}
            slots: list[TensorSlot] = []
            block_start = start
            for name in sorted(pieces):
                slots.append(TensorSlot(name=name, expert=expert, shape=tuple(pieces[name]), start=start))
                start += slots[-1].size
            blocks.append(
                Block(
                    index=len(blocks),
                    name="shared" if expert is None else f"expert {expert}",
                    expert=expert,
                    start=block_start,
                    size=start - block_start,
                    slots=tuple(slots),
                )
            )
        return cls(tuple(blocks))

    @property
    def num_experts(self) -> int:
        """Number of experts E; there are E + 1 blocks."""
        return len(self.blocks) - 1

    @property
    def num_elements(self) -> int:
        """Length of the flat vector."""
        return self.blocks[-1].stop

    def expert_block(self, expert: int) -> Block:
        """The block of one expert."""
        return self.blocks[1 + expert]

    def trained_blocks(self, held: Iterable[int]) -> list[Block]:
        """The blocks that a holder of these experts trains: the shared block, then the experts' in the given order."""
        return [self.blocks[SHARED_BLOCK], *map(self.expert_block, held)]

    @cached_property
    def digest(self) -> str:
        """Hex BLAKE3 over every slot's name, expert, shape and start."""
        hasher = blake3()
        for block in self.blocks:
            for slot in block.slots:
                hasher.update(f"{slot.name}|{slot.expert}|{slot.shape}|{slot.start}\n".encode())
        return hasher.hexdigest()
