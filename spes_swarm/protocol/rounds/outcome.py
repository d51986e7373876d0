"""What goes into a round and comes out of it: limits, what a member brings, and the report of a commit.

Shape: N elements of one part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from spes_swarm.base.arrays import FloatArray, scratch, sum_of_squares
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.commitments import SigningKey
from spes_swarm.protocol.consensus.codec import Codec
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.plan import Part, Plan
from spes_swarm.protocol.rounds.statement import Group
from spes_swarm.protocol.rounds.taking_back import Previous
from spes_swarm.protocol.rounds.track_record import TrackRecords


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on what is accepted from other members."""

    max_update_rms: float  # largest root mean square of a part's difference
    bounded: bool = True  # contributions and results must meet the plan's limits, too

    def check_norm(self, difference_N: FloatArray) -> float:
        """Returns the sum of squares of a difference.

        Raises:
            ProtocolError: (`norm`) it is too long, infinite or NaN.
        """
        energy = sum_of_squares(difference_N)
        self.check_energy(energy, len(difference_N))
        return energy

    def check_energy(self, energy: float, num_elements: int) -> None:
        """Raises what `check_norm` does."""
        rms = math.sqrt(energy / num_elements)
        if not rms <= self.max_update_rms:
            raise ProtocolError("norm", f"a difference of RMS {rms:.3g} exceeds {self.max_update_rms:.3g}")

    @classmethod
    def of(cls, clip: float, max_update_rms: float) -> Bounds:
        """The bounds from a run's settings `round.clip` and `round.max_update_rms`."""
        return cls(max_update_rms, bounded=clip > 0)


@dataclass(eq=False)
class RoundInputs:
    """What a member brings into a round."""

    group: Group
    plan: Plan
    me: int
    reference: Reference
    live_N: FloatArray  # this member's live weights: the shared and held blocks, which alone are read and changed
    codec: Codec
    bounds: Bounds
    key: SigningKey
    tracks: TrackRecords = field(default_factory=TrackRecords)  # this peer's record of the others
    result_codec: Codec | None = None  # of the results of parts with several contributions; None: `codec`
    previous: Previous = field(default_factory=Previous)  # what this peer keeps to take this commit back, or the last

    def values(self, part: Part) -> tuple[FloatArray, FloatArray]:
        """Live weights and reference (N,) of a part."""
        where = slice(part.start, part.start + part.size)
        return self.live_N[where], self.reference.values_N[where]

    def own_difference(self, part: Part) -> FloatArray:
        """This member's difference (N,) to its own reference, in scratch memory."""
        live_N, base_N = self.values(part)
        difference_N: FloatArray = np.subtract(live_N, base_N, out=scratch("own difference", part.size))
        return difference_N


@dataclass(frozen=True)
class CommitReport:
    """What a committed round changed."""

    round: int
    members: tuple[str, ...]
    parts_total: int
    parts_missing: int
    changed_blocks: tuple[int, ...]
    experts_covered: int
    deferred_experts: frozenset[int] = frozenset()  # see Plan.deferred
    unites: bool = False  # see Plan.unites
    taken_back: int | None = None  # the round that this one takes back
    keeps_work: bool = False  # although it takes one back: this peer had missed that one, and its work is as before
