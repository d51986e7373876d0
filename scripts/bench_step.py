"""Measures a peer's training step against training the whole model with plain transformers.

    .venv/bin/python scripts/bench_step.py --sizes 30M 300M

Three arms take turns in one process, step by step, on the same model, batch and threads:

- `full`: transformers' untouched model, all logits, library losses, gradient clipping and AdamW over all weights.
- `frozen`: the same forward and backward, but no expert's matrices have gradients.
- `sparse`: a peer that holds a quarter of the experts: `training/gradients.py`, clipping and AdamW as in its trainer.

From the parts of the first two follows the limit: the time of a step that leaves out nothing but the gradients of the
others' experts and their share of clipping and optimiser:

    forward(full) + backward(frozen) + h * (backward(full) - backward(frozen)) + t * update(full)

where h is the held experts' share of the routed tokens, and t the trained share of the weights. `--clock cpu` counts
CPU time of the only thread, for machines that are busy with other work. Peak memory is that of a process with one arm
alone, beyond what it had after a step of a tiny model, with glibc told to return freed memory at once. Prints a table;
`--json` writes all.

`--torch-norms` adds the time of the peer's step with torch's `rms_norm`, as a ratio to the step before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from scripts.testing.benchmark import SIZES, TINY, quickstart_run, status_bytes, torch_norms
from spes_swarm.model.foreign.frozen_stack import FORMS
from spes_swarm.model.losses import LossWeights, load_balance_loss, router_z_loss
from spes_swarm.model.sparse_model import SparseModel, build_model, find_experts
from spes_swarm.training.gradients import Gradients

TOP_K, NUM_HELD = 2, 2
MAX_NORM = 1.0
WEIGHTS = LossWeights()
WARM_UP_STEPS = 2
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
# glibc keeps freed memory for later, which differs from run to run; told to return it, it shows what was in use.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}

now = CLOCKS["wall"]  # `--clock` selects another


@dataclass(frozen=True)
class Parts:
    """Seconds of one step."""

    forward: float
    backward: float
    update: float  # clipping, optimiser

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


@dataclass(frozen=True)
class Result:
    """The measurement of one size; seconds are medians, ratios are to `full`."""

    size: str
    parameters: int
    trained_share: float
    held_row_share: float
    tokens: int
    full: Parts
    frozen_backward: float
    sparse_s: float
    limit_s: float
    spread: dict[str, tuple[float, float]]  # quartiles of the seconds of `full` and `sparse`
    tokens_per_second: dict[str, float]
    time_ratio: float
    of_limit: float  # the sparse step's time by the limit
    memory_bytes: dict[str, int]
    memory_ratio: float
    torch_norms_ratio: float | None  # of the sparse step's time with torch's norms, to that of the step before; median


class Arm(Protocol):
    """One way of training."""

    def step(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> Parts:
        """Takes one step and returns its parts."""


def new_model(size: str, sequence_length: int) -> nn.Module:
    """Builds the model of this size."""
    section = quickstart_run(*SIZES[size], sequence_length).model
    model: nn.Module = build_model(section.type, section.settings, seed=0, device="cpu")
    return model


class Full:
    """Plain transformers; the arms `full` and `frozen`."""

    def __init__(self, size: str, sequence_length: int) -> None:
        self._model: Any = new_model(size, sequence_length).train()
        self._stacks = [parameter for module in find_experts(self._model).values() for parameter in module.parameters()]
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    @property
    def num_parameters(self) -> int:
        """Weights of the model."""
        return sum(parameter.numel() for parameter in self._model.parameters())

    def _loss(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        ids_BS = torch.from_numpy(batch_BS)
        # Not `model(...)`, which would compute a load-balance loss of its own as well.
        output = self._model.model(input_ids=ids_BS, use_cache=False, output_router_logits=True)
        logits_NV = self._model.lm_head(output.last_hidden_state)[:, :-1].flatten(0, 1)
        cross_entropy = nn.functional.cross_entropy(logits_NV, ids_BS[:, 1:].flatten())
        total: torch.Tensor = (
            cross_entropy
            + WEIGHTS.logit_z * logits_NV.logsumexp(dim=-1).square().mean()
            + WEIGHTS.load_balance * load_balance_loss(output.router_logits, TOP_K)
            + WEIGHTS.router_z * router_z_loss(output.router_logits)
        )
        return total

    def step(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> Parts:
        """Takes one step over all weights."""
        forward_s, backward_s = self._differentiate(batch_BS)
        started = now()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimiser.step()
        return Parts(forward_s, backward_s, now() - started)

    def frozen_backward(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> float:
        """Returns the seconds of a backward without any gradients of experts' matrices."""
        for stack in self._stacks:
            stack.requires_grad_(False)
        _, backward_s = self._differentiate(batch_BS)
        for stack in self._stacks:
            stack.requires_grad_(True)
        return backward_s

    def _differentiate(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[float, float]:
        self._optimiser.zero_grad(set_to_none=True)
        started = now()
        loss = self._loss(batch_BS)
        between = now()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return between - started, now() - between


class Sparse:
    """A peer's step."""

    def __init__(self, size: str, sequence_length: int, batch_size: int, foreign_experts: str) -> None:
        self.model = SparseModel(new_model(size, sequence_length), range(NUM_HELD), foreign_form=foreign_experts)
        self._gradients = Gradients(
            self.model, WEIGHTS, batch_size, device=torch.device("cpu"), autocast=nullcontext, warn=lambda *_: None
        )
        self._optimiser = torch.optim.AdamW(self.model.param_groups(0.1), lr=1e-4, fused=True)

    @property
    def num_trained(self) -> int:
        """Weights that it trains."""
        return sum(parameter.numel() for _, parameter in self.model.trainable_parameters())

    def step(self, batch_BS: np.ndarray[Any, np.dtype[np.int64]]) -> Parts:
        """Takes one step; forward and backward are not told apart."""
        started = now()
        self._gradients.compute(batch_BS, progress=0.0)
        between = now()
        nn.utils.clip_grad_norm_([parameter for _, parameter in self.model.trainable_parameters()], MAX_NORM)
        self._optimiser.step()
        return Parts(between - started, 0.0, now() - between)


def batches(count: int, batch_size: int, sequence_length: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Draws batches of random bytes."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (batch_size, sequence_length)) for _ in range(count)]


def measure_memory(arm: str, size: str, options: argparse.Namespace) -> int:
    """Returns the largest resident bytes of this process in these steps, beyond those after a tiny model's step."""
    batch_size, sequence_length = options.batch_size, options.sequence_length

    def new_arm(of: str) -> Arm:
        if arm == "full":
            return Full(of, sequence_length)
        return Sparse(of, sequence_length, batch_size, options.foreign_experts)

    data = batches(options.steps, batch_size, sequence_length)
    new_arm(TINY).step(data[0])
    baseline = status_bytes("VmRSS")
    measured = new_arm(size)
    for batch_BS in data:
        measured.step(batch_BS)
    return status_bytes("VmHWM") - baseline


def memory_of_process(arm: str, size: str, options: argparse.Namespace) -> int:
    """Measures the memory of an arm in a process of its own."""
    command = [sys.executable, __file__, "--memory-of", arm, "--sizes", size, "--steps", "3"]
    for name in ("batch_size", "sequence_length", "num_threads", "foreign_experts"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    environment = os.environ | RETURN_FREED_MEMORY
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise SystemExit(f"the process of the arm {arm} failed:\n{done.stderr[-2000:]}")
    return int(done.stdout)


def median_parts(steps: list[Parts]) -> Parts:
    """Returns the median of each part."""
    return Parts(
        *(statistics.median(getattr(step, name) for step in steps) for name in ("forward", "backward", "update"))
    )


def measure(size: str, options: argparse.Namespace) -> Result:
    """Measures one size."""
    memory = {arm: memory_of_process(arm, size, options) for arm in ("full", "sparse")}
    data = batches(WARM_UP_STEPS + options.steps, options.batch_size, options.sequence_length)
    plain = Full(size, options.sequence_length)
    peer = Sparse(size, options.sequence_length, options.batch_size, options.foreign_experts)
    full: list[Parts] = []
    frozen: list[float] = []
    sparse: list[float] = []
    torch_norms_ratios: list[float] = []
    for number, batch_BS in enumerate(data):
        if number == WARM_UP_STEPS:
            full, frozen, sparse, torch_norms_ratios = [], [], [], []
            peer.model.pop_routed_tokens()
        full.append(plain.step(batch_BS))
        frozen.append(plain.frozen_backward(batch_BS))
        sparse.append(peer.step(batch_BS).total)
        if options.torch_norms:
            with torch_norms():
                torch_norms_ratios.append(peer.step(batch_BS).total / sparse[-1])
    routed_E = peer.model.pop_routed_tokens().sum(axis=0)
    held_row_share = float(routed_E[:NUM_HELD].sum() / routed_E.sum())
    trained_share = peer.num_trained / plain.num_parameters
    parts, frozen_backward = median_parts(full), statistics.median(frozen)
    limit_s = (
        parts.forward
        + frozen_backward
        + held_row_share * (parts.backward - frozen_backward)
        + trained_share * parts.update
    )
    totals = {"full": [step.total for step in full], "sparse": sparse}
    medians = {arm: statistics.median(seconds) for arm, seconds in totals.items()}
    tokens = options.batch_size * options.sequence_length
    return Result(
        size=size,
        parameters=plain.num_parameters,
        trained_share=trained_share,
        held_row_share=held_row_share,
        tokens=tokens,
        full=parts,
        frozen_backward=frozen_backward,
        sparse_s=medians["sparse"],
        limit_s=limit_s,
        spread={arm: quartiles(seconds) for arm, seconds in totals.items()},
        tokens_per_second={arm: tokens / seconds for arm, seconds in medians.items()},
        time_ratio=medians["sparse"] / medians["full"],
        of_limit=medians["sparse"] / limit_s,
        memory_bytes=memory,
        memory_ratio=memory["sparse"] / memory["full"],
        torch_norms_ratio=statistics.median(torch_norms_ratios) if torch_norms_ratios else None,
    )


def quartiles(values: list[float]) -> tuple[float, float]:
    """Returns the first and the third quartile."""
    first, _, third = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return first, third


def table(results: list[Result]) -> str:
    """Returns the results as lines of text."""
    lines = [
        f"{'size':>5} {'weights':>8} {'arm':>6} {'ms':>8} {'quartiles':>15} {'of full':>7} {'of limit':>8} "
        f"{'tokens/s':>8} {'peak MB':>8} {'of full':>7}"
    ]
    for result in results:
        full_s = result.full.total
        for arm, seconds in (("full", full_s), ("limit", result.limit_s), ("sparse", result.sparse_s)):
            spread = "{:.0f}-{:.0f}".format(*(1e3 * s for s in result.spread[arm])) if arm in result.spread else ""
            memory = result.memory_bytes.get(arm)
            lines.append(
                f"{result.size:>5} {result.parameters / 1e6:>6.1f} M {arm:>6} {1e3 * seconds:>8.1f} {spread:>15} "
                f"{seconds / full_s:>7.2f} {seconds / result.limit_s:>8.2f} {result.tokens / seconds:>8.0f} "
                + (f"{memory / 1e6:>8.0f} {memory / result.memory_bytes['full']:>7.2f}" if memory else "").rstrip()
            )
        parts, frozen = result.full, result.frozen_backward
        lines.append(
            f"      full: forward {1e3 * parts.forward:.1f}, backward {1e3 * parts.backward:.1f} (frozen experts "
            f"{1e3 * frozen:.1f}), clipping and AdamW {1e3 * parts.update:.1f} ms; held rows "
            f"{result.held_row_share:.1%}, trained weights {result.trained_share:.1%}"
        )
        if result.torch_norms_ratio is not None:
            lines.append(f"      sparse with torch's norms: {result.torch_norms_ratio:.3f} of its time")
    return "\n".join(lines)


def main() -> int:
    """Measures each size."""
    global now
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["30M", "300M"], choices=[size for size in SIZES if size != TINY])
    parser.add_argument("--steps", type=int, default=9, help=f"measured steps, after {WARM_UP_STEPS} others")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences")
    parser.add_argument("--sequence-length", type=int, default=128, help="tokens")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--foreign-experts", choices=FORMS, default="fp32", help="how the peer stores others' experts")
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--torch-norms", action="store_true", help="also time the peer's step with torch's norms")
    parser.add_argument("--json", type=Path, default=Path("runs/step.json"))
    parser.add_argument("--memory-of", choices=["full", "sparse"], help="print the memory of one arm in this process")
    options = parser.parse_args()
    torch.set_num_threads(options.num_threads)
    now = CLOCKS[options.clock]
    if options.memory_of:
        (size,) = options.sizes
        print(measure_memory(options.memory_of, size, options))
        return 0
    results: list[Result] = []
    for size in options.sizes:
        results.append(measure(size, options))
        print(table(results[-1:]), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
