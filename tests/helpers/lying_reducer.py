"""A member that trains honestly and lies about the results that it reduces.

`python -m tests.helpers.lying_reducer KIND ...` takes the arguments of `join` after the kind. Everybody gets the same
lie: `flipped`, the opposite of the honest mean; `noisy`, noise as long as it; `stale`, no change at all; `loud`, noise
that ruins a model in one round, where no bounds keep it out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from scripts.testing.forked_peer import ForkServer
from spes_swarm import join
from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.round_state import RoundState

_LOUD_RMS = 0.9


def _noise(mean_N: FloatArray, rms: float | None = None) -> FloatArray:
    if rms is None:
        rms = float(np.sqrt(np.mean(np.square(mean_N, dtype=np.float64))))
    return np.random.default_rng(mean_N.size).normal(0, rms, mean_N.size).astype(np.float32)


LIES: dict[str, Callable[[FloatArray], FloatArray]] = {
    "flipped": np.negative,
    "noisy": _noise,
    "stale": np.zeros_like,
    "loud": partial(_noise, rms=_LOUD_RMS),
}


def launch_lying(kind: str, first_round: int) -> ForkServer:
    """Starts `join` that lies from a round on."""
    return ForkServer(main=partial(_lying_main, kind, first_round))


def _lying_main(kind: str, first_round: int, arguments: list[str]) -> int:
    honest = RoundState._mean

    def lie(self: RoundState, part: Part, accumulator: Any) -> FloatArray:
        mean_N = honest(self, part, accumulator)
        return mean_N if self.plan.round < first_round else LIES[kind](mean_N)

    setattr(RoundState, "_mean", lie)  # noqa: B010 - mypy does not let a method be assigned to
    return join.main(arguments)


if __name__ == "__main__":
    sys.exit(_lying_main(sys.argv[1], 0, sys.argv[2:]))
