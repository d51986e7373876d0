"""A peer on a machine whose memory turns a weight into NaN at some step."""

from __future__ import annotations

import math
from functools import partial

import torch

from scripts.testing.forked_peer import ForkServer
from spes_swarm.join import main
from spes_swarm.training import trainer


def launch_poisoned(step: int) -> ForkServer:
    """Starts `join` with one weight that is spoilt, once, before that training step."""
    return ForkServer(main=partial(_poisoned_main, step))


def _poisoned_main(step: int, arguments: list[str]) -> int:
    take_step = trainer.Trainer._train_step
    done = False

    def poisoned(self: trainer.Trainer) -> None:
        nonlocal done
        if self._learner.step == step and not done:
            done = True
            with torch.no_grad():
                next(self._learner.model.trainable_parameters())[1].fill_(math.nan)
        take_step(self)

    setattr(trainer.Trainer, "_train_step", poisoned)  # noqa: B010 - mypy does not let a method be assigned to
    return main(arguments)
