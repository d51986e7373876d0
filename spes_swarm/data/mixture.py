"""Several data sources as one: each window comes from one of them, drawn in proportion to their weights.

The draws are pseudo-random and numbered, and the number of the next draw is part of the cursor. Each source has its own
cursor and goes through its epochs at its own pace: a small source with a large weight is repeated more often.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError
from spes_swarm.data.batch_source import BatchSource, Cursor, short_digest


class Mixture(BatchSource):
    """Draws windows from several sources.

    Args:
        sources: two or more.
        weights: of the sources, above 0; they add up to 1.
        run_seed: the same for all peers of a run.
        peer_seed: different for each peer.
    """

    def __init__(
        self, sources: Sequence[BatchSource], weights: Sequence[float], *, run_seed: int, peer_seed: int
    ) -> None:
        self.sources = tuple(sources)
        self._weights = tuple(weights)
        self._bounds = list(accumulate(weights))[:-1]
        self._key = f"spes-swarm mixture {run_seed} {peer_seed}"
        self._identity = short_digest(f"{self._key} {self._weights!r}")
        self._draws = 0  # so far

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """See `BatchSource`."""
        chosen = [self._draw(self._draws + row) for row in range(batch_size)]
        before = [source.state() for source in self.sources]
        windows: dict[int, Iterator[NDArray[np.int64]]] = {}
        try:
            for index, source in enumerate(self.sources):
                if count := chosen.count(index):
                    windows[index] = iter(source.next_batch(count))
        except BaseException:
            for source, state in zip(self.sources, before, strict=True):
                source.restore(state)
            raise
        self._draws += batch_size
        return np.stack([next(windows[index]) for index in chosen])

    def state(self) -> Cursor:
        """See `BatchSource`."""
        states = [source.state() for source in self.sources]
        return {"draws": self._draws, "identity": self._identity, "data": 0, "sources": states}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See `BatchSource`. Each source whose data differ starts its order again."""
        states = state.get("sources")
        if not isinstance(states, list) or len(states) != len(self.sources):
            return False
        if state.get("identity") != self._identity:
            raise DataError(
                "the saved data cursor belongs to other weights or another seed: use the same ones as before, or start "
                "in a new output directory"
            )
        draws = state.get("draws")
        if not isinstance(draws, int) or draws < 0 or not all(isinstance(item, Mapping) for item in states):
            raise DataError("the saved data cursor is damaged")
        same = [source.restore(item) for source, item in zip(self.sources, states, strict=True)]
        self._draws = draws
        return all(same)

    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """See `BatchSource`. Each source gives sequences in proportion to its weight, and at least one."""
        for source, count in zip(self.sources, shares(num_sequences, self._weights), strict=True):
            yield from source.evaluation_batches(count, batch_size)

    def follow(self, members: Iterable[str]) -> None:
        """See `BatchSource`."""
        members = frozenset(members)
        for source in self.sources:
            source.follow(members)

    def positions(self) -> tuple[int, ...]:
        """See `BatchSource`: those of all sources."""
        return tuple(position for source in self.sources for position in source.positions())

    def advance(self, positions: Sequence[int]) -> None:
        """See `BatchSource`."""
        if len(positions) != len(self.positions()):
            return  # they are of other sources: peers with some shards, or with an order of their own, divide fewer
        left = list(positions)
        for source in self.sources:
            count = len(source.positions())
            source.advance(left[:count])
            left = left[count:]

    def close(self) -> None:
        """See `BatchSource`."""
        for source in self.sources:
            source.close()

    def _draw(self, number: int) -> int:
        """Returns the index of the source that draw `number` selects."""
        digest = blake3(f"{self._key} {number}".encode()).digest()
        return bisect_right(self._bounds, int.from_bytes(digest[:8], "little") / 2**64)


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divides `total` in proportion to weights that add up to 1, by largest remainders; each share is at least 1."""
    exact = [total * weight for weight in weights]
    counts = [max(1, int(value)) for value in exact]
    for index in sorted(range(len(weights)), key=lambda i: counts[i] - exact[i])[: max(0, total - sum(counts))]:
        counts[index] += 1
    return counts
