"""Error feedback: what a coarse codec rounds off returns to a member's live weights, and so to its next difference.

There is no buffer that outlives a round. A residual is part of the live weights: it is in the checkpoint, and it is
gone when the block is reset to the reference.

A contributor takes back the rounding error of its own difference. The reducer of a part takes back that of the result,
too. A sole contributor keeps its live weights, which have all of it.

Shapes: N elements of one part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from spes_swarm.base.arrays import FloatArray, scratch, sum_of_squares
from spes_swarm.protocol.consensus.codec import Codec


@dataclass(eq=False, slots=True)
class ErrorFeedback:
    """What one member takes back in one round."""

    _sent: dict[int, tuple[Codec, bytes]] = field(default_factory=dict)  # encoded differences, by part
    _of_results: dict[int, FloatArray] = field(default_factory=dict)  # (N,), by part

    def clear(self) -> None:
        """Frees the memory, once a round has been committed."""
        self._sent.clear()
        self._of_results.clear()

    def note_sent(self, part: int, codec: Codec, payload: bytes) -> None:
        """Notes this member's encoded difference, which the reducer counts in full."""
        if codec.error_feedback:
            self._sent[part] = codec, payload

    def note_result(
        self, part: int, codec: Codec, error_N: FloatArray, own_difference_N: FloatArray, share: float
    ) -> None:
        """Notes the rounding error of a result that this member has reduced with `share` of the weight.

        The next average contains the whole error if it returns divided by `share`. But it returns no longer than the
        member's own difference: a longer one would be shortened in the next round (see clipping.py), and would disturb
        training.
        """
        error, own = sum_of_squares(error_N), sum_of_squares(own_difference_N)
        if codec.error_feedback and error > 0:
            self._of_results[part] = error_N * np.float32(min(1 / share, math.sqrt(own / error)))

    def residual(self, part: int, own_difference_N: FloatArray) -> FloatArray | None:
        """What goes back into this member's live weights once its difference is in a committed result.

        It may be in scratch memory.
        """
        residual_N = self._of_results.get(part)
        if part in self._sent:
            codec, payload = self._sent[part]
            error_N = codec.decode(payload, len(own_difference_N), scratch("sent", len(own_difference_N)))
            np.subtract(own_difference_N, error_N, out=error_N)
            return error_N if residual_N is None else np.add(error_N, residual_N, out=error_N)
        return residual_N
