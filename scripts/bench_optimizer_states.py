"""Compares forms of an optimiser's moments: the loss after training, and the time of a step.

    .venv/bin/python scripts/bench_optimizer_states.py
    .venv/bin/python scripts/bench_optimizer_states.py --optimiser muon

The model of quickstart-paper.yaml is trained alone on the standard library's source, once per form and seed, with half
of the experts held and a schedule as long as the training. The floor is what a change of every initial weight by one
unit in the last place does to the loss. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from scripts.testing.paper_config import paper_config_path
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.config.schedule import learning_rate
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.model.losses import cross_entropy_of_sequences
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.gradients import Gradients, loss_weights
from spes_swarm.training.optimiser.moment_storage import FORMS
from spes_swarm.training.optimiser.registry import make_optimiser

FLOOR = "device, one ulp"  # of each initial weight
EVALUATION_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one training leads to."""

    variant: str
    seed: int
    loss: float  # on held-out text, nats per token
    moment_bytes: int
    optimiser_ms: float  # median over the steps
    step_ms: float  # median, optimiser included


class Training:
    """One training with its own model."""

    def __init__(self, run: RunConfig, sampler: Sampler, variant: str, seed: int) -> None:
        training = run.training
        model = build_model(run.model.type, run.model.settings, seed, "cpu")
        if variant == FLOOR:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.nextafter(parameter, torch.tensor(torch.inf)))
        self._run, self._sampler, self._variant, self._seed = run, sampler, variant, seed
        self._sparse = SparseModel(model, range(run.model.num_experts // 2))
        self._optimiser = make_optimiser(self._sparse, training, form=variant if variant in FORMS else "device")
        self._gradients = Gradients(
            self._sparse,
            loss_weights(training),
            training.batch_size,
            device=torch.device("cpu"),
            autocast=nullcontext,
            warn=lambda kind, text: None,
        )

    def train(self, num_steps: int) -> Outcome:
        """Trains and measures."""
        optimiser_s: list[float] = []
        step_s: list[float] = []
        for step in range(num_steps):
            begun = time.perf_counter()
            self._gradients.compute(self._sampler.next_batch(self._run.training.batch_size), progress=1.0)
            parameters = [parameter for _, parameter in self._sparse.trainable_parameters()]
            torch.nn.utils.clip_grad_norm_(parameters, self._run.training.max_grad_norm)
            self._optimiser.set_learning_rate(learning_rate(step, self._run.training))
            before = time.perf_counter()
            self._optimiser.step()
            ended = time.perf_counter()
            optimiser_s.append(ended - before)
            step_s.append(ended - begun)
        return Outcome(
            variant=self._variant,
            seed=self._seed,
            loss=self._held_out_loss(),
            moment_bytes=sum(
                value.nbytes
                for state in self._optimiser.state.values()
                for key, value in state.items()
                if key != "step"
            ),
            optimiser_ms=1e3 * statistics.median(optimiser_s),
            step_ms=1e3 * statistics.median(step_s),
        )

    def _held_out_loss(self) -> float:
        losses: list[float] = []
        for batch_BS in self._sampler.evaluation_batches(self._run.evaluation.sequences, EVALUATION_BATCH):
            with torch.no_grad():
                losses += cross_entropy_of_sequences(self._sparse.module, torch.from_numpy(batch_BS)).tolist()
        return statistics.fmean(losses)


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints a line per variant."""
    exact = [outcome for outcome in outcomes if outcome.variant == "device"]
    print(f"{'moments':>16} {'loss':>7} {'against device, %':>24} {'bytes':>7} {'optimiser, ms':>14} {'step':>6}")
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.variant == variant]
        changes = [100 * (a.loss / b.loss - 1) for a, b in zip(own, exact, strict=True)]
        apart = " ".join(f"{change:+.3f}" for change in changes)
        optimiser_ms = statistics.fmean(outcome.optimiser_ms for outcome in own)
        step = statistics.fmean(a.step_ms / b.step_ms for a, b in zip(own, exact, strict=True))
        print(
            f"{variant:>16} {statistics.fmean(outcome.loss for outcome in own):>7.4f} {apart:>24} "
            f"{own[0].moment_bytes / exact[0].moment_bytes:>7.3f} {optimiser_ms:>14.2f} {step:>6.2f}"
        )


def main() -> int:
    """Trains every variant with every seed."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimiser", default="adamw", help="the run's training.optimiser (default: adamw)")
    parser.add_argument("--json", type=Path, default=Path("runs/optimizer_states.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_config(paper_config_path()).run
    assert run is not None
    # At the end of a schedule the loss depends least on the last few batches.
    training = dataclasses.replace(run.training, total_steps=options.steps, optimiser=options.optimiser)
    run = dataclasses.replace(run, training=training)
    files = open_corpus(STDLIB, load_tokenizer(run.tokenizer.name))
    outcomes: list[Outcome] = []
    for variant in (*FORMS, FLOOR):
        for seed in range(options.seeds):
            sampler = Sampler(
                TokenStream(files),
                sequence_length=run.training.sequence_length,
                run_seed=run.training.seed,
                peer_seed=seed,
                holdout_fraction=run.evaluation.holdout_fraction,
            )
            outcomes.append(Training(run, sampler, variant, seed).train(options.steps))
            print(outcomes[-1], flush=True)
    show(outcomes)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
