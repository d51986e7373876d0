"""A peer on a machine that has no memory left from some step on."""

from __future__ import annotations

from functools import partial

import torch

from scripts.testing.forked_peer import ForkServer
from spes_swarm.join import main
from spes_swarm.training import gradients


def launch_starved(step: int) -> ForkServer:
    """Starts `join`, of which an allocation fails within every training step from this one on, as torch does."""
    return ForkServer(main=partial(_starved_main, step))


def _starved_main(step: int, arguments: list[str]) -> int:
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
    return main(arguments)
