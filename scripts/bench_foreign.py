"""Measures what it costs in loss to store other peers' experts in fewer bits.

    .venv/bin/python scripts/bench_foreign.py --steps 300 --seeds 3

Four peers, each with a quarter of the experts, train in turn in one process and hold rounds with the real statements,
plan and bookkeeping (scripts/testing/sequential_swarm.py). Model and data are those of quickstart-paper.yaml,
without expert merging and bounds. All runs of a seed have the same weights, steps and data, and differ by the form of
the others' experts (spes_swarm/model/foreign/frozen_stack.py). `ulp` shows what chance alone does: fp32, but all
initial weights are moved to the next larger number. Chance grows with the learning rate: with its 6e-3, rounding
nothing but the initial weights to bf16 moves the loss by more than 1 %, which hides what is measured here.

The loss is that of the swarm's reference, in fp32, on held-out text after all steps. `seen` is that of one peer's live
weights, others' experts as it stores them: the loss that the peer itself reports. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from scripts.testing.paper_config import paper_config_path
from scripts.testing.sequential_swarm import SequentialSwarm, initial_weights, own_orders
from spes_swarm.base.errors import UserError
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import TokenStream
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.model.foreign.frozen_stack import FORMS

NUM_PEERS = 4
YARDSTICK, CHANCE = "fp32", "ulp"
ARMS = (*FORMS, CHANCE)  # the yardstick comes first


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run; losses in nats per token."""

    seed: int
    arm: str
    loss: float
    seen: float
    digest: str  # of the reference, hex
    cpu_s: float


def settings(run: RunConfig, seed: int, options: argparse.Namespace) -> RunConfig:
    """Returns the settings of a seed's runs."""
    training = replace(
        run.training,
        seed=seed,
        warmup_steps=min(run.training.warmup_steps, options.steps // 2),
        total_steps=options.steps,
        learning_rate=options.learning_rate,
        batch_size=options.batch_size,
        sequence_length=options.sequence_length,
    )
    return replace(
        run,
        training=training,
        round=replace(run.round, inner_steps=options.inner_steps, clip=0.0),
        merge=replace(run.merge, alpha=0.0),
        evaluation=replace(run.evaluation, sequences=options.eval_sequences),
    )


def train(run: RunConfig, arm: str, stream: TokenStream) -> Outcome:
    """Trains one run and returns its result."""
    started = time.process_time()
    initial_N = initial_weights(run)
    if arm == CHANCE:
        initial_N = np.nextafter(initial_N, np.float32(np.inf))
    quarters = np.array_split(np.arange(run.model.num_experts), NUM_PEERS)
    first = NUM_PEERS * run.training.seed
    swarm = SequentialSwarm(
        run,
        own_orders(run, stream, range(first, first + NUM_PEERS)),
        [quarter.tolist() for quarter in quarters],
        initial_N=initial_N,
        foreign_form=YARDSTICK if arm == CHANCE else arm,
    )
    steps, inner_steps = run.training.total_steps, run.round.inner_steps
    for done in range(0, steps, inner_steps):
        swarm.train([min(inner_steps, steps - done)] * NUM_PEERS)
        swarm.hold_round()
    peer = swarm.peers[0]
    return Outcome(
        seed=run.training.seed,
        arm=arm,
        loss=swarm.reference_loss(),
        seen=peer.eval_loss(),
        digest=peer.reference.digest.hex(),
        cpu_s=time.process_time() - started,
    )


def change(outcome: Outcome, outcomes: Sequence[Outcome], field: str) -> float:
    """Returns the relative change of a loss against that of fp32 with the same seed."""
    (yardstick,) = [o for o in outcomes if o.seed == outcome.seed and o.arm == YARDSTICK]
    ratio: float = getattr(outcome, field) / getattr(yardstick, field)
    return ratio - 1


def row(outcome: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Returns a run as a line of the table."""
    return (
        f"{outcome.seed:>5} {outcome.arm:>6} {outcome.loss:>8.4f} {change(outcome, outcomes, 'loss'):>+9.3%} "
        f"{outcome.seen:>8.4f} {change(outcome, outcomes, 'seen'):>+9.3%} {outcome.cpu_s:>6.0f}"
    )


def summary(outcomes: Sequence[Outcome], arms: Sequence[str]) -> list[str]:
    """Returns a line for each form: mean losses, their change, and the largest change of a seed."""
    lines = []
    for arm in arms:
        of_arm = [o for o in outcomes if o.arm == arm]
        loss, seen = (statistics.fmean(getattr(o, field) for o in of_arm) for field in ("loss", "seen"))
        of_loss, of_seen = ([change(o, outcomes, field) for o in of_arm] for field in ("loss", "seen"))
        lines.append(
            f"{'mean':>5} {arm:>6} {loss:>8.4f} {statistics.fmean(of_loss):>+9.3%} {seen:>8.4f} "
            f"{statistics.fmean(of_seen):>+9.3%}   largest {max(map(abs, of_loss)):.3%} {max(map(abs, of_seen)):.3%}"
        )
    return lines


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", default=ARMS, choices=ARMS, help="besides fp32")
    parser.add_argument("--steps", type=int, default=300, help="of each peer")
    parser.add_argument("--inner-steps", type=int, default=10, help="steps between rounds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step of a peer")
    parser.add_argument("--sequence-length", type=int, default=64, help="tokens")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--eval-sequences", type=int, default=256)
    parser.add_argument("--data", default=STDLIB, help="stdlib, token files or text")
    parser.add_argument("--json", type=Path, default=Path("runs/foreign.json"))
    return parser.parse_args()


def main() -> int:
    """Runs each seed with each form."""
    options = parse_arguments()
    torch.set_num_threads(1)
    run = load_config(paper_config_path()).run
    assert run is not None
    try:
        stream = TokenStream(open_corpus(options.data, load_tokenizer(run.tokenizer.name)))
        runs = [settings(run, seed, options) for seed in range(options.seeds)]
    except UserError as exc:
        print(f"bench_foreign: {exc}", file=sys.stderr)
        return 2
    arms = [arm for arm in ARMS if arm == YARDSTICK or arm in options.forms]
    outcomes: list[Outcome] = []
    print(f"{'seed':>5} {'form':>6} {'loss':>8} {'change':>9} {'seen':>8} {'change':>9} {'CPU s':>6}")
    for of_seed in runs:
        for arm in arms:
            outcomes.append(train(of_seed, arm, stream))
            print(row(outcomes[-1], outcomes), flush=True)
    print("\n".join(summary(outcomes, arms)))
    arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"arguments": arguments, "outcomes": [asdict(outcome) for outcome in outcomes]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
