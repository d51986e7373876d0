"""`python -m tests.helpers.starved_join STEP ...`: join on a machine that has no memory left from that step on."""

from __future__ import annotations

import sys

import torch

from spes_swarm.join import main
from spes_swarm.training import gradients


def starve(step: int) -> None:
    """Fails an allocation within every training step from this one on, as torch does."""
    loss_of = getattr(gradients, "language_model_loss")  # noqa: B009 - it is imported there, not exported
    steps = 0

    def starved(*arguments: object, **more: object) -> object:
        nonlocal steps
        steps += 1
        if steps >= step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has no more")
        result: object = loss_of(*arguments, **more)
        return result

    setattr(gradients, "language_model_loss", starved)  # noqa: B010


if __name__ == "__main__":
    starve(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
