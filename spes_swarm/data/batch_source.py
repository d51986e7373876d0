"""What the trainer needs from a peer's data, wherever the data come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Cursor = dict[str, Any]  # plain JSON values; checkpoints store it as it is


class BatchSource(ABC):
    """Endless training batches for one peer, and the evaluation batches that all peers share.

    Shapes: B sequences, S tokens.
    """

    @abstractmethod
    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """Returns the next windows of this peer, int64 (B, S); negative: `~id`, a token that is no target.

        Raises:
            DataError: the data cannot be read; the cursor has not moved.
            DataStoppedError: the peer is to leave, and data would have to be waited for; the cursor has not moved.
        """

    @abstractmethod
    def state(self) -> Cursor:
        """Returns the cursor, from which `restore` continues exactly here."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Moves the cursor to a saved one.

        Returns:
            True if training continues there. False if the cursor was saved with other data: the order restarts.

        Raises:
            DataError: the cursor was saved with other settings, or is damaged; it has not moved.
        """

    @abstractmethod
    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yields held-out windows, int64 (B, S); the same ones in the same order on every peer with the same data.

        Raises:
            DataError: nothing is held out, or the data cannot be read.
        """

    # Data that the peers of a run divide among themselves; see streaming/pieces.py. Other data need nothing of this.

    def follow(self, members: Collection[str]) -> None:  # noqa: B027 - nothing to do for data that is not divided
        """Divides the data among these peers from the next piece on; this peer is one of them in any case."""

    def positions(self) -> tuple[int, ...]:
        """How far this peer has come in each data set that is divided; see `Deal.position`."""
        return ()

    def advance(self, positions: Sequence[int]) -> None:  # noqa: B027
        """Continues beyond these positions of other peers, wherever this peer is not there yet."""

    def close(self) -> None:  # noqa: B027
        """Ends threads and connections, if there are any."""


def short_digest(text: str) -> int:
    """Returns 63 bits of a digest, which fit every integer encoding."""
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little") >> 1
