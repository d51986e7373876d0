"""A member that contributes noise instead of work and claims 2^47 tokens for it, as loud as it can be without refusal.

`python -m tests.helpers.noise_peer MADDR DIRECTORY --kind KIND` writes DIRECTORY/rounds.jsonl, a line {"round"} for
each commit that it was part of. Killing it ends the attack. In all but its weights it does what an honest peer does.

Kinds: `loud`, just below the absolute bound `max_update_rms`. `measured`, `--size` times as long as what the last round
moved, which is about what an honest peer moves: at 2 the longest that counts of one that claims twice the tokens.
`understated`, the same, stated as a tenth of it. `reducer`, `measured`, and noise as long as the honest mean in place
of the results of all parts that it reduces.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import RoundError, TransferError
from spes_swarm.network.round import sync_round
from spes_swarm.network.round.exchange import Exchange
from spes_swarm.port.messages import CaughtUp
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.rounds.own_statement import difference_rms
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.round_state import RoundState
from tests.helpers.hostile_peer import membership

KINDS = ("loud", "measured", "understated", "reducer")
TOKENS = 1 << 47
LOUD_RMS = 0.9
FIRST_RMS = 0.01  # while no round has shown how far honest peers move


class NoisyReduction(Reduction):
    """Reduces to noise as long as the honest mean, the same for everybody."""

    def _mean(self, part: Part, accumulator: Any) -> FloatArray:
        mean_N = super()._mean(part, accumulator)
        rms = np.sqrt(np.mean(np.square(mean_N, dtype=np.float64)))
        return np.random.default_rng(part.index).normal(0, rms, part.size).astype(np.float32)


def moved_rms(layout: Layout, before_N: FloatArray, after_N: FloatArray) -> tuple[float, float]:
    """How far a commit has moved the shared layers, and the expert that it moved furthest."""
    rms = [
        float(np.sqrt(np.mean(np.square(after_N[b.start : b.stop] - before_N[b.start : b.stop], dtype=np.float64))))
        for b in layout.blocks
    ]
    return rms[0], max(rms[1:])


async def attack(maddr: str, directory: Path, kind: str, size: float) -> None:
    """Takes part with noise until it is killed."""
    rng = np.random.default_rng(0)
    lies: dict[str, Any] = {}
    if kind == "understated":
        lies["difference_rms"] = lambda *arguments: [rms / 10 for rms in difference_rms(*arguments)]
    with ExitStack() as stack:
        if kind == "reducer":
            stack.enter_context(mock.patch.object(RoundState, "reduce_by", NoisyReduction))
        for name, lie in lies.items():
            stack.enter_context(mock.patch.object(sync_round, name, lie))
        await _take_part(maddr, directory, rng, LOUD_RMS if kind == "loud" else None, size)


async def _take_part(
    maddr: str, directory: Path, rng: np.random.Generator, fixed_rms: float | None, size: float
) -> None:
    async with membership(maddr, directory, Exchange, num_experts=4, tokens_per_step=1) as member:
        services = member.services
        layout = services.state.reference.layout
        held = member.presence.experts
        shared_rms = expert_rms = FIRST_RMS if fixed_rms is None else fixed_rms
        with (directory / "rounds.jsonl").open("a", buffering=1) as log:
            while True:
                await member.listener.called.wait()
                member.listener.called.clear()
                before_N = member.reference_N.copy()
                for block in (layout.blocks[0], *(layout.expert_block(expert) for expert in held)):
                    where = slice(block.start, block.stop)
                    noise_N = rng.normal(0, shared_rms if block.expert is None else expert_rms, block.size)
                    member.contribution_N[where] = before_N[where] + noise_N.astype(np.float32)
                try:
                    report = await services.commands.run_round(TOKENS, (TOKENS,) * len(held), leaving=False)
                except (RoundError, TransferError) as exc:
                    print("round", exc, flush=True)
                    continue
                if isinstance(report, CaughtUp):
                    continue
                held = report.experts.held
                log.write(json.dumps({"round": report.commit.round, "rms": [shared_rms, expert_rms]}) + "\n")
                if fixed_rms is None:
                    shared_rms, expert_rms = (size * rms for rms in moved_rms(layout, before_N, member.reference_N))


def main(arguments: Sequence[str]) -> int:
    """Attacks until it is killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("maddr")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="measured")
    parser.add_argument("--size", type=float, default=3.0)
    options = parser.parse_args(arguments)
    asyncio.run(attack(options.maddr, options.directory, options.kind, options.size))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
