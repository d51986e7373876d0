"""What one member contributes to an exchange: its differences, encoded and signed in batches.

A batch is made when its first part is asked for. A member that still has the weights from before a commit can make the
same messages again, bit for bit; that is how it answers audits. It keeps the leaves that it has signed, so it encodes
again only what it is asked for.

Shape: N elements of one part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from spes_swarm.base.arrays import FloatArray, scratch
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    Commitment,
    Exchange,
    Opening,
    SigningKey,
    batches,
    in_place_of,
)
from spes_swarm.protocol.averaging.signed_result import contribution_leaf
from spes_swarm.protocol.consensus.codec import EXACT, Codec
from spes_swarm.protocol.rounds.error_feedback import ErrorFeedback
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Contribution, Form, Part, Plan

_GOLDEN_RATIO = (1 + 5**0.5) / 2  # its multiples spread evenly between whole numbers

Values = Callable[[Part], tuple[FloatArray, FloatArray]]
"""Returns live weights and reference (N,) of a part."""


def contribution_of(plan: Plan, part: Part, member: int) -> Contribution | None:
    """What a member is to contribute to a part; None: nothing."""
    return next((c for c in plan.block_of(part).contributions if c.member == member), None)


@dataclass(eq=False)
class Contributions:
    """The contributions of one member in one exchange."""

    plan: Plan
    me: int
    codec: Codec
    key: SigningKey
    exchange: Exchange
    values: Values
    feedback: ErrorFeedback
    commitments: dict[int, Commitment] = field(default_factory=dict)  # signed roots, by part
    _leaves: dict[int, bytes] = field(default_factory=dict)  # that have been signed, by part
    _batches: dict[int, list[tuple[Part, Contribution]]] = field(default_factory=dict)  # by part; filled by reducer
    _known: set[int] = field(default_factory=set)  # reducers
    _ready: dict[int, dict[int, Frame]] = field(default_factory=dict)  # of the batch under way, by reducer and part

    def to(self, reducer: int) -> list[tuple[Part, Contribution]]:
        """The parts that go to a reducer, in order.

        Each round begins with another part, the same at all members: if time is short, it is not always the same parts
        that come too late.
        """
        owed = self.plan.contributed(self.me, reducer)
        first = int(self.plan.round * _GOLDEN_RATIO % 1 * len(owed))
        return owed[first:] + owed[:first]

    def num_to_encode(self, part: Part) -> int:
        """How many values `push_frame` will encode: those of a whole batch, or none if it is ready."""
        is_ready = part.index in self._ready.get(part.reducer, {})
        return 0 if is_ready else sum(p.size for p, _ in self._batch_of(part))

    def push_frame(self, part: Part) -> Frame:
        """The message that carries this member's contribution to a part."""
        frames = self._ready.get(part.reducer, {})
        if part.index not in frames:
            frames = self._ready[part.reducer] = self.batch(part, self.values)
        frame = frames.pop(part.index)
        own = contribution_of(self.plan, part, self.me)
        if own is not None and own.form is Form.DELTA and own.scale == 1:
            self.feedback.note_sent(part.index, self.codec, frame.payload)
        return frame

    def batch(self, part: Part, values: Values) -> dict[int, Frame]:
        """The messages with a part and with those that are signed together with it, by part."""
        batch = self._batch_of(part)
        payloads = [self._encode(p, c, values) for p, c in batch]
        leaves = [contribution_leaf(p.index, payload) for (p, _), payload in zip(batch, payloads, strict=True)]
        openings = self.key.commit(CONTRIBUTION, self.exchange, leaves)
        commitment = Commitment(openings[0].root(leaves[0]), openings[0].signature)
        self.commitments |= dict.fromkeys((p.index for p, _ in batch), commitment)
        self._leaves |= {p.index: leaf for (p, _), leaf in zip(batch, leaves, strict=True)}
        return {
            p.index: Frame(FrameKind.DATA, c.form, p.index, c.weight, opening.wire, payload)
            for (p, c), opening, payload in zip(batch, openings, payloads, strict=True)
        }

    def _batch_of(self, part: Part) -> list[tuple[Part, Contribution]]:
        """The parts that are signed together with a part, and that part."""
        if part.reducer not in self._known:
            self._known.add(part.reducer)
            owed = self.to(part.reducer)
            for indices in batches([p.size for p, _ in owed]):
                batch = [owed[i] for i in indices]
                self._batches |= {p.index: batch for p, _ in batch}
        return self._batches[part.index]

    def again(self, part: Part, values: Values) -> Frame:
        """The message with a part, which may have been sent before; the values are the same."""
        if part.index not in self._leaves:
            return self.batch(part, values)[part.index]
        contribution = next(c for p, c in self._batches[part.index] if p.index == part.index)
        opening = self._openings(part.index)[self._leaves[part.index]]
        payload = self._encode(part, contribution, values)
        return Frame(FrameKind.DATA, contribution.form, part.index, contribution.weight, opening.wire, payload)

    def absence(self, part: Part, root: Commitment) -> tuple[bytes, Opening] | None:
        """What shows that there is no contribution to a part under a root of this member's: a leaf and its opening.

        None if the root is not one of its own, or is that of the part.
        """
        if self.commitments.get(part.index) == root:
            return None
        for index, known in list(self.commitments.items()):
            if known == root:
                openings = self._openings(index)
                leaf = in_place_of(part.index, list(openings))
                return leaf, openings[leaf]
        return None

    def _openings(self, index: int) -> dict[bytes, Opening]:
        """The leaves that were signed together with that of a part, and the opening of each."""
        leaves = [self._leaves[part.index] for part, _ in self._batches[index]]
        return dict(zip(leaves, self.key.commit(CONTRIBUTION, self.exchange, leaves), strict=True))

    def _encode(self, part: Part, contribution: Contribution, values: Values) -> bytes:
        live_N, base_N = values(part)
        if contribution.form is Form.FULL:
            return EXACT.encode(live_N)
        return self.codec.encode(np.subtract(live_N, base_N, out=scratch("own difference", part.size)))
