"""Measures how far a peer's reported eval loss is from that on all held-out text, and the cost of evaluating.

    .venv/bin/python scripts/bench_held_out.py --rounds 60

One peer of quickstart-paper.yaml trains all experts, and its export is evaluated on every held-out sequence. Then
samples are drawn repeatedly as a peer draws them: one sequence from each of as many equal parts. Prints a table and
writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from scripts.testing.local_peer import LocalPeer
from scripts.testing.paper_config import paper_config_path
from spes_swarm.config.data_source import STDLIB
from spes_swarm.config.file import load_config
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.model.losses import cross_entropy_of_sequences
from spes_swarm.training.health.held_out import held_out_loss

DRAWS = 500
BATCH_SIZE = 16


@dataclass(frozen=True)
class Row:
    """The result for one sample size."""

    sequences: int
    scatter: float  # RMS deviation of the samples' means from the mean of all, nats per token
    stderr: float  # standard error that a peer would report, on average
    cpu_seconds: float


def trained_export(directory: Path, rounds: int, config: Path) -> Path:
    """Trains a lone peer for `rounds` rounds and exports its model."""
    arguments = ["--config", str(config), "--experts", "8", "--max-rounds", str(rounds), "--num-threads", "1"]
    with LocalPeer(directory / "peer", [*arguments, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]) as peer:
        if peer.wait(3600) != 0:
            raise SystemExit(peer.tail())
    target = directory / "export"
    subprocess.run([sys.executable, "-m", "spes_swarm.export", str(directory / "peer"), str(target)], check=True)
    return target


def main() -> int:
    """Trains, exports and measures."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--samples", type=int, nargs="+", default=[32, 128], help="sample sizes in sequences")
    parser.add_argument("--json", type=Path, default=Path("runs/held_out.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_config(paper_config_path()).run
    assert run is not None
    files = open_corpus(STDLIB, load_tokenizer(run.tokenizer.name))
    sampler = Sampler(
        TokenStream(files),
        sequence_length=run.training.sequence_length,
        run_seed=run.training.seed,
        peer_seed=0,
        holdout_fraction=run.evaluation.holdout_fraction,
    )
    with tempfile.TemporaryDirectory(prefix="held-out-") as name:
        export = trained_export(Path(name), options.rounds, paper_config_path())
        model = AutoModelForCausalLM.from_pretrained(export)
    begun = time.process_time()
    losses: list[float] = []
    for batch_BS in sampler.evaluation_batches(sampler.split.num_held_out, BATCH_SIZE):
        losses += cross_entropy_of_sequences(model, torch.from_numpy(batch_BS)).tolist()
    cpu_s = (time.process_time() - begun) / len(losses)
    whole = held_out_loss(losses)
    apart = statistics.stdev(losses)
    print(f"{len(losses)} sequences: {whole.mean:.3f} +- {whole.stderr:.3f}; standard deviation {apart:.3f}")
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    print(f"{'sequences':>9} {'scatter':>8} {'stderr':>6} {'CPU-s':>6}")
    for count in options.samples:
        edges = [index * len(losses) // count for index in range(count + 1)]
        drawn = [held_out_loss([losses[rng.integers(a, b)] for a, b in pairwise(edges)]) for _ in range(DRAWS)]
        rows.append(
            Row(
                count,
                statistics.fmean((loss.mean - whole.mean) ** 2 for loss in drawn) ** 0.5,
                statistics.fmean(loss.stderr or 0.0 for loss in drawn),
                count * cpu_s,
            )
        )
        print(f"{count:>9} {rows[-1].scatter:>8.3f} {rows[-1].stderr:>6.3f} {rows[-1].cpu_seconds:>6.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"rounds": options.rounds, "all": asdict(whole), "samples": [asdict(row) for row in rows]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
