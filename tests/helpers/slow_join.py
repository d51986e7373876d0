"""Peers that train more slowly than this machine would.

`python -m tests.helpers.slow_join` takes join's arguments, and sleeps before each step; with `slowly` before them it
trains at a tenth of the speed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from scripts.testing.forked_peer import ForkServer
from spes_swarm.base.arguments import end_program
from spes_swarm.join import main
from spes_swarm.training import trainer

# Without a pause before each step, peers would keep all processors busy while a test waits for something else.
PAUSE_S = 0.1
_POLL_S = 0.01


def launch_slow(seconds: float = PAUSE_S, environment: Mapping[str, str] | None = None) -> ForkServer:
    """Starts `join` with so many seconds of sleep before every training step."""
    return ForkServer(main=partial(sleeping_main, seconds), environment=environment)


def launch_slower_than(metrics: Path, steps: int) -> ForkServer:
    """Starts `join` with a training step only after so many steps of the peer that writes these metrics.

    It is so many times slower however busy the machine is, which no fixed pause could ensure.
    """
    return ForkServer(main=partial(_following_main, metrics, steps))


def sleeping_main(seconds: float, arguments: list[str]) -> int:
    """See launch_slow; for processes that change more than that."""
    _before_each_step(lambda trainer: time.sleep(seconds))
    return main(arguments)


def _following_main(metrics: Path, steps: int, arguments: list[str]) -> int:
    def steps_done() -> int:
        return metrics.read_bytes().count(b'"event": "step"')

    seen = steps_done()

    def follow(follower: trainer.Trainer) -> None:
        nonlocal seen
        # During a round nobody makes steps, and a step that ends only after it would hold the others up.
        while steps_done() < seen + steps and follower._rounds.network.called_round <= follower.round:
            time.sleep(_POLL_S)
        seen = steps_done()

    _before_each_step(follow)
    return main(arguments)


def _slow_main(arguments: list[str]) -> int:
    """A peer at a tenth of the speed of this machine: each step is followed by a pause nine times as long."""
    take_step = trainer.Trainer._train_step

    def slowly(self: trainer.Trainer) -> None:
        begun = time.monotonic()
        take_step(self)
        until = time.monotonic() + 9 * (time.monotonic() - begun)
        while time.monotonic() < until and self._rounds.network.called_round <= self.round:
            time.sleep(_POLL_S)

    setattr(trainer.Trainer, "_train_step", slowly)  # noqa: B010 - mypy does not let a method be assigned to
    return main(arguments)


def _before_each_step(wait: Callable[[trainer.Trainer], None]) -> None:
    take_step = trainer.Trainer._train_step

    def waiting(self: trainer.Trainer) -> None:
        wait(self)
        take_step(self)

    setattr(trainer.Trainer, "_train_step", waiting)  # noqa: B010 - mypy does not let a method be assigned to


if __name__ == "__main__":
    end_program(_slow_main(sys.argv[2:]) if sys.argv[1:2] == ["slowly"] else sleeping_main(PAUSE_S, sys.argv[1:]))
