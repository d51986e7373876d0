"""A trainer of the tiny run that changes its experts on the way, alone or as rank 0 of several.

`main([DIRECTORY, ROUNDS, FORM, PRECISION])` is rank 0 of those that the environment names. It prints a line after each
round, then the outcome as JSON. FORM is that of others' experts, PRECISION that of matrix products.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spes_swarm.base.errors import RankError
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.port.messages import CaughtUp, RoundReport
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.training.gradients import loss_weights
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Replica
from spes_swarm.training.ranks.placement import Placement
from tests.helpers.lone_trainer import HELD, LoneTrainer, StubNetwork, run_config

ROUNDS = 5
INNER_STEPS = 3
MERGES = {"alpha": 0.1, "steps": 400, "interval": 6}  # in every other round
OTHERS = (2, 4)  # the experts held from the second round on


def replica(run: Any, held: tuple[int, ...] = HELD, form: str = "fp32", precision: str = "fp32") -> Replica:
    """The model of a lone trainer."""
    return Replica(
        model_type=run.model.type,
        settings=run.model.settings,
        held=held,
        kernel="torch",
        foreign_experts=form,
        activation_checkpointing="none",
        compile=False,
        precision=precision,
        micro_batch_size=1,
        num_threads=1,
        losses=loss_weights(run.training),
        device_type="cpu",
    )


def train(
    directory: Path,
    ranks: RankGroup | None = None,
    rounds: int = ROUNDS,
    on_round: Callable[[], None] = lambda: None,
    form: str = "fp32",
    precision: str = "fp32",
) -> dict[str, Any]:
    """Trains for some rounds; returns the losses, and what must not depend on the number of ranks."""
    run = run_config(
        training={"optimiser": "muon"},  # takes AdamW's steps, too
        round={"inner_steps": INNER_STEPS},
        merge=MERGES,
        evaluation={"every_rounds": 2},
    )
    if ranks is not None:
        ranks.send_order(replica(run, form=form, precision=precision))
    lone = LoneTrainer(
        directory,
        run,
        form,
        precision=precision,
        max_rounds=rounds,
        micro_batch_size=1,
        ranks=ranks,
        on_round=on_round,
        evaluation=[np.arange(128).reshape(2, 64) % 250, np.arange(64).reshape(1, 64) * 3 % 250],
    )
    lone.network.answers = [StubNetwork.commit, _change_experts]
    lone.trainer.run()
    lone.close()
    events = {kind: lone.events(kind) for kind in ("round", "step")}
    return {
        "digests": [event["digest"] for event in events["round"]],
        "merged": [event["round"] for event in events["round"] if event["merge_alpha"]],
        "held": list(lone.model.held),
        "tokens": [event["tokens"] for event in events["step"]],
        "routed": moved_tokens(lone.model),
        "losses": [event["loss"] for event in events["step"]],
        "evaluated": [event["eval_loss"] for event in events["round"]],
    }


def moved_tokens(model: SparseModel) -> list[int]:
    """Routed tokens that nobody has asked for: after a step there are none."""
    return [int(count) for count in model.pop_routed_tokens().sum(axis=0)]


def _change_experts(network: StubNetwork) -> RoundReport | CaughtUp:
    report = network.commit()
    network.held = OTHERS
    (gained,), (lost,) = set(OTHERS) - set(HELD), set(HELD) - set(OTHERS)
    return dataclasses.replace(report, experts=ExpertChange(OTHERS, (gained,), (lost,)))


def main(arguments: list[str]) -> int:
    """Trains as rank 0; returns the exit code."""
    directory, rounds, form, precision = arguments
    placement = Placement.from_environment(os.environ)
    assert placement is not None
    ranks = RankGroup(placement)
    ranks.connect(print)
    try:
        with ranks:
            outcome = train(
                Path(directory), ranks, int(rounds), lambda: print("committed", flush=True), form, precision
            )
            print(json.dumps(outcome), flush=True)
    except RankError as exc:
        print(f"rank 0: {exc}", file=sys.stderr)
        return 1
    return 0
