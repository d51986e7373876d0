"""A member that trains honestly and lies about the results that it reduces.

`python -m tests.helpers.lying_reducer KIND ...` takes the arguments of `join` after the kind. Of most kinds everybody
gets the same lie: `flipped`, the opposite of the honest mean; `noisy`, noise as long as it; `scaled`, ten times its
length; `stale`, no change at all; `loud`, noise that ruins a model in one round, where no bounds keep it out; `some`,
the opposite in a tenth of the parts. `two-faced` gives the opposite to every other member. `forged` names roots that
nobody has signed as those of the contributions to the opposite, and `dropping` leaves out one honest member's work.
`hiding` gives the opposite to everybody, and shows its own contributions to no auditor; an `accomplice` only does the
latter, which protects whoever else lies.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import numpy as np

from scripts.testing.forked_peer import ForkServer, Main
from spes_swarm import join
from spes_swarm.base.arrays import FloatArray
from spes_swarm.network.link.wire import Channel
from spes_swarm.network.round.audits import Audits
from spes_swarm.protocol.averaging.commitments import Commitment
from spes_swarm.protocol.averaging.signed_result import encode
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Contribution, Form, Part, Plan
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.results import Results
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.rounds import complete_all
from tests.helpers.slow_join import PAUSE_S, sleeping_main

_LOUD_RMS = 0.9


def _noise(mean_N: FloatArray, rms: float | None = None) -> FloatArray:
    if rms is None:
        rms = float(np.sqrt(np.mean(np.square(mean_N, dtype=np.float64))))
    return np.random.default_rng(mean_N.size).normal(0, rms, mean_N.size).astype(np.float32)


LIES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "flipped": np.negative,
    "noisy": _noise,
    "scaled": lambda mean_N: 10 * mean_N,
    "stale": np.zeros_like,
    "loud": partial(_noise, rms=_LOUD_RMS),
}
KINDS = (*LIES, "some", "two-faced", "forged", "dropping", "hiding", "accomplice")
_FORGED = Commitment(bytes(32), bytes(64))


def launch_lying(kind: str, first_round: int = 0, pause_s: float = PAUSE_S) -> ForkServer:
    """Starts `join`, with a pause before each step, that lies from a round on."""
    return ForkServer(main=partial(_lying_main, kind, first_round, main=partial(sleeping_main, pause_s)))


def lying_state(kind: str, first_round: int = 0) -> type[RoundState]:
    """Returns the rounds of a member that lies from a round on about the results that it reduces."""
    values = LIES.get(kind, np.negative if kind in ("some", "forged", "hiding") else np.copy)

    def lies(plan: Plan) -> bool:
        """In every round from the first one on that it is told."""
        return plan.round >= first_round

    class LyingReduction(Reduction):
        def _mean(self, part: Part, accumulator: Any) -> FloatArray:
            mean_N = super()._mean(part, accumulator)
            # By round, too: a member may reduce the same parts in each, and none of those that an index picks.
            chosen = kind != "some" or (part.index + self.plan.round) % 10 == 0
            return values(mean_N) if lies(self.plan) and chosen else mean_N

        def _is_result(self, part: Part, contribution: Contribution) -> bool:
            return not lies(self.plan) and super()._is_result(part, contribution)

        def accept(self, member: int, frame: Frame) -> None:
            victim = next(i for i in range(self.plan.num_members) if i != self.me)
            if kind == "dropping" and lies(self.plan) and member == victim:
                self.give_up(member)
                complete_all(self)
            else:
                super().accept(member, frame)

    class LyingResults(Results):
        def sign(self) -> None:
            if kind == "forged" and lies(self.plan):
                self._unsigned = [(p, data, dict.fromkeys(roots, _FORGED)) for p, data, roots in self._unsigned]
            super().sign()

        def frame(self, index: int, member: int, sent: dict[Commitment, int] | None = None) -> Frame | None:
            part = self.plan.parts[index]
            is_difference = self.plan.block_of(part).result_form(member) is Form.DELTA
            if kind != "two-faced" or not lies(self.plan) or member % 2 or part.reducer != self.me or not is_difference:
                return super().frame(index, member, sent)
            self.sign()
            result = self.known[index]
            assert result.signed is not None
            codec = self._averaging.codec_of_result(part)
            opposite = codec.encode(-codec.decode(result.data, part.size))
            roots = dict(zip(sorted(result.included), result.signed.commitments, strict=True))
            reducer = self._inputs
            (signed,) = self._averaging.sign(reducer.key, reducer.group.exchange, [(part, opposite, roots)])
            extra = encode(result.included, self.plan.num_members, signed, {} if sent is None else sent)
            return Frame(FrameKind.DATA, Form.DELTA, index, 0.0, extra, opposite)

    class LyingState(RoundState):
        reduce_by = LyingReduction
        results_by = LyingResults

    return LyingState


def _lying_main(kind: str, first_round: int, arguments: list[str], main: Main = join.main) -> int:
    async def show_nothing(audits: Audits, state: RoundState, channel: Channel, indices: list[int]) -> None:
        del audits, state, channel, indices

    with ExitStack() as stack:
        lying = lying_state(kind, first_round)
        stack.enter_context(mock.patch.multiple(RoundState, reduce_by=lying.reduce_by, results_by=lying.results_by))
        if kind in ("hiding", "accomplice"):
            stack.enter_context(mock.patch.object(Audits, "_show", show_nothing))
        return main(arguments)


if __name__ == "__main__":
    sys.exit(_lying_main(sys.argv[1], 0, sys.argv[2:]))
