"""Measures the cost of the bounds of a round for an honest swarm: the same training with and without them.

    .venv/bin/python scripts/bench_bounds.py --rounds 60 --seeds 3

Four peers train in turn in one process, with the model, schedule and data of quickstart-paper.yaml, and hold their
rounds with the real statements, plan and bookkeeping (scripts/testing/sequential_swarm.py). The seed determines how
many steps each peer does before a round: about the inner steps; in every tenth round, as in one that is called early,
three peers have only begun and one has done three times its share. Both runs of a seed have the same steps on the same
data. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from scripts.testing.paper_config import paper_config_path
from scripts.testing.sequential_swarm import SequentialSwarm, own_orders
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.tokenizer import load_tokenizer

NUM_PEERS = 4
EARLY_EVERY = 10  # rounds


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    seed: int
    bounded: bool
    eval_loss: float
    shortened: int  # contributions of a member to a round scaled below 0.99, by length or direction
    named: int  # faults that name a member


def holdings(num_experts: int) -> list[list[int]]:
    """Shares the experts out; neighbours share one."""
    starts = [number * num_experts // NUM_PEERS for number in range(NUM_PEERS + 1)]
    return [
        sorted({expert % num_experts for expert in range(starts[number], starts[number + 1] + 1)})
        for number in range(NUM_PEERS)
    ]


def steps_of_round(number: int, inner_steps: int, rng: np.random.Generator) -> list[int]:
    """Draws how many steps each peer does before a round."""
    if number % EARLY_EVERY == 0:
        steps = rng.integers(1, 4, NUM_PEERS)
        steps[rng.integers(NUM_PEERS)] = 3 * inner_steps
    else:
        steps = rng.integers(round(0.7 * inner_steps), round(1.7 * inner_steps), NUM_PEERS)
    return [int(count) for count in steps]


def train(run: RunConfig, rounds: int, stream: TokenStream) -> Outcome:
    """Trains one run and returns its result."""
    rng = np.random.default_rng(run.training.seed)
    first = NUM_PEERS * run.training.seed
    samplers = own_orders(run, stream, range(first, first + NUM_PEERS))
    swarm = SequentialSwarm(run, samplers, holdings(run.model.num_experts))
    shortened = named = 0
    for number in range(1, rounds + 1):
        swarm.train(steps_of_round(number, run.round.inner_steps, rng))
        bounds = swarm.hold_round()
        shortened, named = shortened + bounds.shortened, named + bounds.faults
    return Outcome(run.training.seed, run.round.clip > 0, swarm.peers[0].eval_loss(), shortened, named)


def main() -> int:
    """Runs each seed with the bounds and without."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("runs/bounds.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_config(paper_config_path()).run
    assert run is not None
    stream = TokenStream(open_corpus(STDLIB, load_tokenizer(run.tokenizer.name)))
    outcomes: list[Outcome] = []
    print(f"{'seed':>4} {'without':>8} {'with':>8} {'change':>8} {'shortened':>10} {'named':>6}")
    steps = options.rounds * run.round.inner_steps
    for seed in range(options.seeds):
        training = replace(run.training, seed=seed, total_steps=steps)
        pair = [
            train(replace(run, training=training, round=replace(run.round, clip=clip)), options.rounds, stream)
            for clip in (0.0, run.round.clip)
        ]
        outcomes += pair
        without, bounded = pair
        change = bounded.eval_loss / without.eval_loss - 1
        print(
            f"{seed:>4} {without.eval_loss:>8.4f} {bounded.eval_loss:>8.4f} {change:>+8.2%} "
            f"{bounded.shortened:>10} {bounded.named:>6}",
            flush=True,
        )
    without_mean, bounded_mean = (
        statistics.fmean(o.eval_loss for o in outcomes if o.bounded is bounded) for bounded in (False, True)
    )
    print(f"mean {without_mean:>8.4f} {bounded_mean:>8.4f} {bounded_mean / without_mean - 1:>+8.2%}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"rounds": options.rounds, "outcomes": [asdict(outcome) for outcome in outcomes]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
