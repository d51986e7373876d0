"""Measures what a peer's step takes beside forward, backward, clipping and AdamW.

    .venv/bin/python scripts/bench_overhead.py --size 300M

A real peer founds a run of its own, with its network process, data, metrics and status, and is stopped between two
rounds. A step lasts from one entry into the trainer's step to the next, so all that the training loop does in between
counts: data, counts of routed tokens, metrics, the status for panel and swarm, the question whether a round is due, and
looking after checkpoints. Times are CPU seconds of all threads of the trainer's process, which other programs on the
machine hardly change; the network process is a process of its own, and its time is shown beside them. The batch is
small, because the larger it is the less the rest matters. Prints a table of medians; `--json` writes every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from scripts.testing.benchmark import SIZES, quickstart_run
from spes_swarm.base.errors import UserError
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.data.sampler import Sampler
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.peer.session import Session
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.training import gradients
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.saving import CheckpointSaver
from spes_swarm.training.trainer import Trainer

NUM_HELD = 2
WARM_UP_STEPS = 2
STEP = ("forward", "backward", "clipping", "AdamW")
DETAILS = ("data", "routed tokens", "metrics", "status", "is a round due", "checkpoints")
REST = "rest"


class Stopped(BaseException):
    """Enough steps are measured. Not an Exception, so that nothing on the way handles it."""


class StepClock:
    """The CPU seconds of each part of each step."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps = num_steps
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._started: tuple[float, float] | None = None  # CPU seconds of this process and of its children
        self.steps: list[dict[str, float]] = []
        self.network_s: list[float] = []
        self.parameters = self.trained = 0

    def begin_step(self) -> None:
        """Ends the step before; raises `Stopped` after the last."""
        now = time.process_time(), children_cpu_s()
        if self._started is not None:
            total, network = now[0] - self._started[0], now[1] - self._started[1]
            parts = {name: self._parts[name] for name in (*STEP, *DETAILS)}
            self.steps.append(parts | {REST: total - sum(parts.values()), "total": total})
            self.network_s.append(network)
        if len(self.steps) == WARM_UP_STEPS + self._num_steps:
            raise Stopped
        self._parts.clear()
        self._started = time.process_time(), children_cpu_s()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with its time added to a part. Parts do not contain each other."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self._parts[part] += time.process_time() - started

        return call

    def measure(self, stack: ExitStack) -> None:
        """Measures the trainers of this process until the stack is left."""
        step = Trainer._train_step

        def one_step(of: Trainer) -> None:
            self.parameters = of._model.layout.num_elements
            self.trained = sum(parameter.numel() for _, parameter in of._model.trainable_parameters())
            self.begin_step()
            step(of)

        stack.enter_context(patch.object(Trainer, "_train_step", one_step))
        for part, owner, name in (
            ("forward", gradients, "language_model_loss"),
            ("backward", torch.Tensor, "backward"),
            ("clipping", torch.nn.utils, "clip_grad_norm_"),
            ("AdamW", PeerAdamW, "step"),
            ("data", Sampler, "next_batch"),
            ("routed tokens", SparseModel, "pop_routed_tokens"),
            ("metrics", Metrics, "write"),
            ("status", Trainer, "_announce"),
            ("is a round due", Trainer, "_due"),
            ("checkpoints", CheckpointSaver, "before_step"),
            ("checkpoints", CheckpointSaver, "look"),
        ):
            stack.enter_context(patch.object(owner, name, self.timed(part, getattr(owner, name))))


def children_cpu_s() -> float:
    """Returns the CPU seconds that all living descendants of this process have used."""
    ticks, pending = 0, [os.getpid()]
    while pending:
        parent = pending.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            for child in task.read_text(encoding="ascii").split():
                fields = Path(f"/proc/{child}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])  # in user and kernel mode
                pending.append(int(child))
    return ticks / os.sysconf("SC_CLK_TCK")


def run_of(size: str, options: argparse.Namespace) -> RunConfig:
    """Returns the run of quickstart-paper.yaml with a model of this size, and no round in sight."""
    run = quickstart_run(*SIZES[size], options.sequence_length)
    return replace(
        run,
        training=replace(run.training, batch_size=options.batch_size),
        round=replace(run.round, inner_steps=1000),
        experts_per_peer=NUM_HELD,
    )


def measure(options: argparse.Namespace) -> StepClock:
    """Runs the peer."""
    clock = StepClock(options.steps)
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory, ExitStack() as stack:
        peer = PeerConfig(
            output_dir=str(Path(directory) / "peer"),
            data=options.data,
            data_differs=options.data is not None,
            device="cpu",
            num_threads=1,
            host_maddrs=("/ip4/127.0.0.1/tcp/0",),
            assume_reachable=True,
        )
        session = Session(peer, run_of(options.size, options), quiet=True)
        clock.measure(stack)
        try:
            session.run()
        except Stopped:
            return clock
    raise SystemExit("bench_overhead: the peer stopped before it had done its steps")


def medians(clock: StepClock) -> dict[str, float]:
    """Returns the median seconds of each part, and of all that is outside forward, backward, clipping and AdamW."""
    measured = clock.steps[WARM_UP_STEPS:]
    result = {name: statistics.median(step[name] for step in measured) for name in (*STEP, *DETAILS, REST, "total")}
    result["outside"] = statistics.median(sum(step[name] for name in (*DETAILS, REST)) for step in measured)
    result["network process"] = statistics.median(clock.network_s[WARM_UP_STEPS:])
    return result


def table(seconds: dict[str, float]) -> str:
    """Returns the parts as lines of text."""
    names = [*STEP, "outside", *(f"  {name}" for name in (*DETAILS, REST)), "total", "network process"]
    lines = [f"{'part':<18} {'CPU ms':>10} {'of the step':>12}"]
    for name in names:
        value = seconds[name.strip()]
        lines.append(f"{name:<18} {1e3 * value:>10.2f} {value / seconds['total']:>12.3%}")
    return "\n".join(lines)


def main() -> int:
    """Measures one size."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="300M", choices=SIZES)
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps, after {WARM_UP_STEPS} others")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens")
    parser.add_argument("--data", default=None, help="training data; default: stdlib")
    parser.add_argument("--json", type=Path, default=Path("runs/overhead.json"))
    options = parser.parse_args()
    try:
        clock = measure(options)
    except UserError as exc:
        print(f"bench_overhead: {exc}", file=sys.stderr)
        return 2
    result = medians(clock)
    print(
        f"{clock.parameters / 1e6:.1f} M weights, {clock.trained / 1e6:.1f} M trained; batches of "
        f"{options.batch_size} x {options.sequence_length} tokens, one thread, {options.steps} steps"
    )
    print(table(result))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"size": options.size, "parameters": clock.parameters, "medians": result, "steps": clock.steps}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
