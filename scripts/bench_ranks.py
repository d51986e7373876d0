"""Measures how much of a step several ranks spend on exchanging weights and gradients.

    .venv/bin/torchrun --standalone --nproc-per-node 2 scripts/bench_ranks.py --hidden 512 --device cpu

Prints medians in milliseconds as JSON: of the gradients of a batch on one rank, and of the same batch on all ranks,
where `waiting` is the time for which rank 0 waits until the last rank has computed its share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from scripts.testing.benchmark import quickstart_run
from spes_swarm.model.losses import LossWeights
from spes_swarm.model.sparse_model import build_model
from spes_swarm.training.gradients import Gradients, GradientSource, autocast
from spes_swarm.training.ranks.follower import follow
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Replica
from spes_swarm.training.ranks.placement import Placement
from spes_swarm.training.ranks.shared_gradients import SharedGradients

NUM_EXPERTS, HELD, VOCABULARY, SEQUENCE_LENGTH, STEPS, WARM_UP = 16, 4, 4096, 256, 12, 2


class TimedGroup(RankGroup):
    """Adds up the seconds of each kind of exchange."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        self.seconds = {"exchange": 0.0, "waiting": 0.0}

    @contextmanager
    def _timed(self, kind: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[kind] += time.monotonic() - started

    def broadcast(self, tensors: Any) -> None:
        """See RankGroup; so are those that follow."""
        with self._timed("exchange"):
            super().broadcast(tensors)

    def reduce(self, tensors: Any) -> None:
        with self._timed("exchange"):
            super().reduce(tensors)

    def all_reduce(self, values: Tensor) -> None:
        with self._timed("waiting"):
            super().all_reduce(values)


def replica_of_size(hidden: int, batch_size: int, device_type: str) -> Replica:
    """Returns a model of this width with a quarter of its experts held."""
    experts = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 4}
    size = (hidden, hidden, 6, hidden // 32)
    model = quickstart_run(*size, SEQUENCE_LENGTH, vocab_size=VOCABULARY, **experts).model
    return Replica(
        model_type=model.type,
        settings=model.settings,
        held=tuple(range(HELD)),
        kernel="torch",
        foreign_experts="bf16" if device_type == "cuda" else "fp32",
        activation_checkpointing="none",
        compile=False,
        precision="bf16" if device_type == "cuda" else "fp32",
        micro_batch_size=batch_size,
        num_threads=1,
        losses=LossWeights(),
        device_type=device_type,
    )


def main() -> int:
    """Measures on rank 0; the other ranks follow."""
    placement = Placement.from_environment(os.environ)
    if placement is None:
        sys.exit("bench_ranks: start it with torchrun and at least two ranks")
    if placement.rank > 0:
        return follow(placement)
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    placement.check_batch(options.batch_size)
    with TimedGroup(placement) as group:
        device = group.own_device(torch.device(options.device))
        group.connect(print)
        print(json.dumps(measure(group, replica_of_size(options.hidden, options.batch_size, device.type), device)))
    return 0


def measure(group: TimedGroup, replica: Replica, device: torch.device) -> dict[str, float]:
    """Returns medians in milliseconds, and the exchange's share of a step."""
    group.send_order(replica)
    model = replica.build(device)
    drawn = build_model(replica.model_type, replica.settings, seed=0, device="cpu").state_dict()
    parameters = dict(model.trainable_parameters())
    for name, weights in drawn.items():
        if name in parameters:
            parameters[name].detach().copy_(weights[list(replica.held)] if ".experts." in name else weights)
    own = Gradients(
        model,
        replica.losses,
        replica.micro_batch_size,
        device=device,
        autocast=partial(autocast, device, replica.precision),
        warn=lambda kind, text: print(text, file=sys.stderr),
    )
    alone = median_ms(own, group, replica.micro_batch_size)
    shared = median_ms(SharedGradients(group, model, own, device), group, replica.micro_batch_size)
    return {
        "trained_mb": sum(parameter.nbytes for parameter in parameters.values()) / 1e6,
        "one_rank_ms": alone["step"],
        **{f"{kind}_ms": milliseconds for kind, milliseconds in shared.items()},
        "exchange_share": shared["exchange"] / shared["step"],
    }


def median_ms(source: GradientSource, group: TimedGroup, batch_size: int) -> dict[str, float]:
    """Times steps, and how much of each is exchange and waiting."""
    generator = np.random.default_rng(0)
    rows: list[dict[str, float]] = []
    for _ in range(STEPS):
        batch_BS = generator.integers(0, VOCABULARY, (batch_size, SEQUENCE_LENGTH))
        group.seconds = dict.fromkeys(group.seconds, 0.0)
        started = time.monotonic()
        source.compute(batch_BS, 0.0)
        source.pop_routed_tokens()
        rows.append({"step": time.monotonic() - started, **group.seconds})
    return {kind: 1e3 * statistics.median(row[kind] for row in rows[WARM_UP:]) for kind in rows[0]}


if __name__ == "__main__":
    sys.exit(main())
