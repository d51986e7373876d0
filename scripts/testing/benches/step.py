"""A peer's training step against training the whole model with plain transformers.

Three arms take turns in one process, step by step, on the same model, batch and thread:

full     transformers' untouched model, all logits, library losses, gradient clipping and AdamW over all weights
frozen   the same forward and backward, but no expert's matrices have gradients
sparse   a peer that holds a quarter of the experts: `training/gradients.py`, clipping and AdamW as in its trainer

From the parts of the first two follows the limit: the time of a step that leaves out nothing but the gradients of the
others' experts and their share of clipping and optimiser:

    forward(full) + backward(frozen) + h * (backward(full) - backward(frozen)) + t * update(full)

where h is the held experts' share of the routed tokens, and t the trained share of the weights. Times are medians of
CPU time of the only thread, so that the machine may be busy with other work. Peak memory is that of a process with one
arm alone, beyond what it had after a step of a tiny model, with glibc told to return freed memory at once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from scripts.testing.benchmark import SIZES, TINY, Row, quickstart_run
from spes_swarm.model.foreign.frozen_stack import FORMS
from spes_swarm.model.losses import LossWeights, load_balance_loss, router_z_loss
from spes_swarm.model.sparse_model import SparseModel, build_model, find_experts
from spes_swarm.training.gradients import Gradients

BATCH_SIZE, SEQUENCE_LENGTH = 8, 128
TOP_K, NUM_HELD = 2, 2
MAX_NORM = 1.0
WEIGHTS = LossWeights()
WARM_UP_STEPS, MEMORY_STEPS = 2, 3
# glibc keeps freed memory for later, which differs from run to run; told to return it, it shows what was in use.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
Batch = np.ndarray[Any, np.dtype[np.int64]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--sizes", nargs="+", default=["30M", "300M"], choices=[size for size in SIZES if size != TINY])
    parser.add_argument("--steps", type=int, default=9, help=f"measured steps, after {WARM_UP_STEPS} others")
    parser.add_argument("--foreign-experts", choices=FORMS, default="fp32", help="how the peer stores others' experts")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each size: plain transformers, the limit, and a peer."""
    torch.set_num_threads(1)
    for size in options.sizes:
        memory = {arm: _memory_in_a_process(arm, size, options.foreign_experts) for arm in ("full", "sparse")}
        seconds, num_weights = _seconds(size, options.steps, options.foreign_experts)
        for arm, of_arm in seconds.items():
            peak = memory.get(arm)
            yield {
                "size": size,
                "weights_m": num_weights / 1e6,
                "arm": arm,
                "ms": 1e3 * of_arm,
                "of_full": of_arm / seconds["full"],
                "of_limit": of_arm / seconds["limit"],
                "tokens_per_s": round(BATCH_SIZE * SEQUENCE_LENGTH / of_arm),
                "peak_mb": None if peak is None else peak / 1e6,
                "peak_of_full": None if peak is None else peak / memory["full"],
            }


@dataclass(frozen=True)
class Parts:
    """Seconds of one step."""

    forward: float
    backward: float
    update: float  # clipping, optimiser

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.update


class Arm(Protocol):
    """One way of training."""

    def step(self, batch_BS: Batch) -> Parts:
        """Takes one step and returns its parts."""


def _new_model(size: str) -> nn.Module:
    section = quickstart_run(*SIZES[size], SEQUENCE_LENGTH).model
    model: nn.Module = build_model(section.type, section.settings, seed=0, device="cpu")
    return model


class Full:
    """Plain transformers; the arms `full` and `frozen`."""

    def __init__(self, size: str) -> None:
        self._model: Any = _new_model(size).train()
        self._stacks = [parameter for module in find_experts(self._model).values() for parameter in module.parameters()]
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self.num_weights = sum(parameter.numel() for parameter in self._model.parameters())

    def _loss(self, batch_BS: Batch) -> torch.Tensor:
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

    def step(self, batch_BS: Batch) -> Parts:
        """Takes one step over all weights."""
        forward_s, backward_s = self._differentiate(batch_BS)
        started = process_time()
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimiser.step()
        return Parts(forward_s, backward_s, process_time() - started)

    def frozen_backward(self, batch_BS: Batch) -> float:
        """Returns the seconds of a backward without any gradients of experts' matrices."""
        for stack in self._stacks:
            stack.requires_grad_(False)
        _, backward_s = self._differentiate(batch_BS)
        for stack in self._stacks:
            stack.requires_grad_(True)
        return backward_s

    def _differentiate(self, batch_BS: Batch) -> tuple[float, float]:
        self._optimiser.zero_grad(set_to_none=True)
        started = process_time()
        loss = self._loss(batch_BS)
        between = process_time()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return between - started, process_time() - between


class Sparse:
    """A peer's step."""

    def __init__(self, size: str, foreign_experts: str) -> None:
        self.model = SparseModel(_new_model(size), range(NUM_HELD), foreign_form=foreign_experts)
        self._gradients = Gradients(
            self.model, WEIGHTS, BATCH_SIZE, device=torch.device("cpu"), autocast=nullcontext, warn=lambda *_: None
        )
        self._optimiser = torch.optim.AdamW(self.model.param_groups(0.1), lr=1e-4, fused=True)
        self.num_trained = sum(parameter.numel() for _, parameter in self.model.trainable_parameters())

    def step(self, batch_BS: Batch) -> Parts:
        """Takes one step; forward and backward are not told apart."""
        started = process_time()
        self._gradients.compute(batch_BS, progress=0.0)
        between = process_time()
        nn.utils.clip_grad_norm_([parameter for _, parameter in self.model.trainable_parameters()], MAX_NORM)
        self._optimiser.step()
        return Parts(between - started, 0.0, process_time() - between)


def _batches(count: int) -> list[Batch]:
    """Draws batches of random bytes."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (BATCH_SIZE, SEQUENCE_LENGTH)) for _ in range(count)]


def _memory_in_a_process(arm: str, size: str, foreign_experts: str) -> int:
    os.environ.update(RETURN_FREED_MEMORY)  # read when a process starts, so it does not matter to this one
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_memory, arm, size, foreign_experts).result()


def _memory(arm: str, size: str, foreign_experts: str) -> int:
    """Returns the largest resident bytes of this process in some steps, beyond those after a tiny model's step."""

    def new_arm(of: str) -> Arm:
        return Full(of) if arm == "full" else Sparse(of, foreign_experts)

    torch.set_num_threads(1)
    data = _batches(MEMORY_STEPS)
    new_arm(TINY).step(data[0])
    baseline = _status_bytes("VmRSS")
    measured = new_arm(size)
    for batch_BS in data:
        measured.step(batch_BS)
    return _status_bytes("VmHWM") - baseline


def _status_bytes(key: str) -> int:
    """Returns a size in /proc/self/status, e.g. VmRSS, or VmHWM, its peak."""
    match = re.search(rf"^{key}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def _seconds(size: str, steps: int, foreign_experts: str) -> tuple[dict[str, float], int]:
    """Returns the seconds of a step by arm, and the number of weights."""
    plain, peer = Full(size), Sparse(size, foreign_experts)
    full: list[Parts] = []
    frozen: list[float] = []
    sparse: list[float] = []
    for number, batch_BS in enumerate(_batches(WARM_UP_STEPS + steps)):
        if number == WARM_UP_STEPS:
            full, frozen, sparse = [], [], []
            peer.model.pop_routed_tokens()
        full.append(plain.step(batch_BS))
        frozen.append(plain.frozen_backward(batch_BS))
        sparse.append(peer.step(batch_BS).total)
    routed_E = peer.model.pop_routed_tokens().sum(axis=0)
    forward, backward, update = (
        statistics.median(getattr(step, name) for step in full) for name in ("forward", "backward", "update")
    )
    frozen_backward = statistics.median(frozen)
    held_share = float(routed_E[:NUM_HELD].sum() / routed_E.sum())
    trained_share = peer.num_trained / plain.num_weights
    limit = forward + frozen_backward + held_share * (backward - frozen_backward) + trained_share * update
    full_s = statistics.median(step.total for step in full)
    return {"full": full_s, "limit": limit, "sparse": statistics.median(sparse)}, plain.num_weights
