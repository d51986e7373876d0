"""The interface between the trainer and a peer's data, whatever their source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Cursor = dict[str, Any]  # plain JSON values, which checkpoints store unchanged


class BatchSource(ABC):
    """Endless training batches for one peer, and the evaluation batches that all peers share.

    Shapes: B sequences, S tokens.
    """

    @abstractmethod
    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """Returns the next windows of this peer, int64 (B, S); negative: `~id`, a token that is not a target.

        Raises:
            DataError: the data cannot be read; the cursor has not moved.
            DataStoppedError: the peer was told to leave while it waited for data; the cursor has not moved.
        """

    @abstractmethod
    def state(self) -> Cursor:
        """Returns the cursor, from which `restore` continues exactly here."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> bool:
        """Moves the cursor to a saved one.

        Returns:
            True if training continues there. False if the cursor was saved with other data; the order then restarts.

        Raises:
            DataError: the cursor was saved with other settings, or is damaged; it has not moved.
        """

    @abstractmethod
    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yields held-out windows, int64 (B, S); the same ones in the same order on every peer with the same data.

        Raises:
            DataError: nothing is held out, or the data cannot be read.
        """

    # For data that the peers of a run divide among themselves; see partition.py. Other sources ignore these.

    def follow(self, members: Iterable[str]) -> None:  # noqa: B027 - data that is not divided needs nothing
        """Divides the data among these peers and this one, from the next piece on."""

    def positions(self) -> tuple[int, ...]:
        """This peer's position in each data set that is divided; newcomers begin beyond it."""
        return ()

    def advance(self, positions: Sequence[int]) -> None:  # noqa: B027
        """Moves forward to these positions of other peers; a source that is already further stays where it is."""

    def close(self) -> None:  # noqa: B027
        """Ends any threads and connections."""


def short_digest(text: str) -> int:
    """Returns 63 bits of a digest, which fit every integer encoding."""
    return int.from_bytes(blake3(text.encode()).digest()[:8], "little") >> 1
