"""`python -m tests.slow_join SECONDS ...`: join on a machine that needs so much longer for every step."""

from __future__ import annotations

import sys
import time

from spes_swarm import trainer
from spes_swarm.join import main


def slow_down(seconds: float) -> None:
    """Makes every training step take longer."""
    take_step = trainer.Trainer._train_step

    def slowly(self: trainer.Trainer) -> None:
        time.sleep(seconds)
        take_step(self)

    setattr(trainer.Trainer, "_train_step", slowly)  # noqa: B010 - mypy does not let a method be assigned to


if __name__ == "__main__":
    slow_down(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
