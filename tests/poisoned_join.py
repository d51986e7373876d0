"""`python -m tests.poisoned_join STEP ...`: join on a machine whose memory turns a weight into NaN at that step."""

from __future__ import annotations

import math
import sys

import torch

from spes_swarm import trainer
from spes_swarm.join import main


def poison(step: int) -> None:
    """Spoils one weight, once, before a training step."""
    take_step = trainer.Trainer._train_step
    done = False

    def poisoned(self: trainer.Trainer) -> None:
        nonlocal done
        if self.step == step and not done:
            done = True
            with torch.no_grad():
                next(iter(self._parameters.values())).fill_(math.nan)
        take_step(self)

    setattr(trainer.Trainer, "_train_step", poisoned)  # noqa: B010 - mypy does not let a method be assigned to


if __name__ == "__main__":
    poison(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
