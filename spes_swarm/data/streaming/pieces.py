"""Pure rules that assign each piece of a streamed data set to one peer, and hold examples out.

A data set consists of *units*: its files or their row groups. In every epoch all peers go through the units in the same
pseudo-random order, keyed by run and epoch. A *piece* is a whole unit if there are many units, otherwise a block of
consecutive examples of one unit. Each piece belongs to one member, by rendezvous hash: if a member joins or leaves,
only its pieces move. A peer trains on its own pieces and skips the others.

Nothing is negotiated. The rule gives each piece to exactly one peer as long as all agree on the members, which are
those of the last commit. It has these limits:

- A piece is finished by the peer that began it. If that peer dies, no other peer finishes it.
- Peers are at different places in the order. A piece that changes owners is left out of the epoch if the old owner has
  not reached it and the new owner has passed it; in the opposite case it is trained on twice.
- A member that trains on other data owns pieces, too, which no peer trains on in that epoch.
- A newcomer is not a member until its first commit, so its first round may repeat work of the others.

A newcomer begins beyond the furthest position that a member has announced (`position`), so it does not repeat what the
others have done in that epoch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from blake3 import blake3

from spes_swarm.data.partition import MAX_POSITION, Permutation, owner_of

BLOCK_EXAMPLES = 32
MANY_UNITS = 64  # with fewer, pieces are blocks: rendezvous hashing divides a small number of pieces unevenly

# A position is one integer below 2**62: place in the order of all epochs, and block.
_BLOCK_BITS = 20


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """The part of an epoch that one peer trains on; pieces compare in training order."""

    epoch: int
    place: int  # of its unit in the epoch's order
    block: int  # in the unit; 0 if the unit is one piece


@dataclass(eq=False)
class Deal:
    """The pieces of a data set, their order and their owners."""

    run_seed: int  # the same for all peers of a run
    num_units: int
    holdout_fraction: float  # share of the examples that no peer trains on
    alone: str = ""  # the peer whose order this is, if it divides the data with no other
    _orders: dict[int, Permutation] = field(default_factory=dict, init=False)  # of the latest epoch

    @property
    def in_blocks(self) -> bool:
        """True if a unit has several pieces."""
        return self.num_units < MANY_UNITS

    def unit(self, epoch: int, place: int) -> int:
        """Returns the unit at a place in an epoch's order."""
        if epoch not in self._orders:
            key = f"spes-swarm units {self.run_seed} {epoch} {self.alone}".rstrip()
            self._orders = {epoch: Permutation(self.num_units, key.encode())}
        return int(self._orders[epoch](np.array([place]))[0])

    def piece(self, epoch: int, place: int, example: int) -> Piece:
        """Returns the piece that contains an example, which is given by its number in the unit."""
        return Piece(epoch, place, example // BLOCK_EXAMPLES if self.in_blocks else 0)

    def owner(self, piece: Piece, members: Collection[str]) -> str:
        """Returns the member that trains on a piece; all members are equally likely."""
        unit = self.unit(piece.epoch, piece.place)
        key = f"spes-swarm piece {self.run_seed} {piece.epoch} {unit} {piece.block} ".encode()
        return owner_of(key, members)

    def is_held_out(self, unit: int, part: int, example: int) -> bool:
        """Returns True if no peer trains on an example in any epoch, so that all can evaluate on it."""
        key = f"spes-swarm held out {self.run_seed} {unit} {part} {example}".encode()
        return int.from_bytes(blake3(key).digest()[:8], "little") < self.holdout_fraction * 2**64

    def position(self, piece: Piece, *, begun: bool) -> int:
        """Returns the position of a peer that has reached or begun a piece: an increasing integer, 0 at the start."""
        place = piece.epoch * self.num_units + piece.place
        block = min(piece.block + begun, (1 << _BLOCK_BITS) - 1)
        return min(place << _BLOCK_BITS | block, MAX_POSITION)

    def place_of(self, position: int) -> tuple[int, int, int]:
        """Returns the first (epoch, place, example) that a peer at a position has not begun."""
        place, block = divmod(position, 1 << _BLOCK_BITS)
        if self.in_blocks:
            return *divmod(place, self.num_units), block * BLOCK_EXAMPLES
        return *divmod(place + (block > 0), self.num_units), 0
