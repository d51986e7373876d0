"""Peers in which one part fails as no part should: with an error that nobody expects."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from scripts.testing.forked_peer import ForkServer
from spes_swarm import join, publish
from spes_swarm.network import run_commands
from spes_swarm.network.round import exchange
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.publishing import background, publisher
from spes_swarm.training import saving
from spes_swarm.training.ranks import follower
from tests.helpers.torchrun import launch_forked_ranks


class PlantedError(Exception):
    """What no part of this project raises."""


def planted(*arguments: object, **more: object) -> Any:
    """Fails."""
    raise PlantedError("planted")


async def planted_command(*arguments: object, **more: object) -> Any:
    """Fails as a coroutine."""
    raise PlantedError("planted")


def _break_publisher() -> None:
    launch = background.subprocess.Popen  # type: ignore[attr-defined]

    def launch_broken(command: list[str], **more: Any) -> Any:
        replaced = [__name__ if word == "spes_swarm.publish" else word for word in command]
        return launch(replaced, **more)

    setattr(background.subprocess, "Popen", launch_broken)  # type: ignore[attr-defined]  # noqa: B010


_BREAKERS: dict[str, Callable[[], None]] = {
    "network": lambda: setattr(run_commands.RunCommandHandler, "table", planted_command),
    "checkpoint": lambda: setattr(saving, "save_checkpoint", planted),
    "publisher": _break_publisher,
    "rank": lambda: setattr(follower, "compute_share", planted),
}


def launch_broken(part: str) -> ForkServer:
    """Starts `join` in which that part fails: "network", "checkpoint" or "publisher"."""
    return ForkServer(main=partial(_broken_main, part))


def launch_broken_rank() -> ForkServer:
    """The same with two ranks, of which rank 1 fails at its first step."""
    return launch_forked_ranks(partial(_broken_main, "rank"))


def _broken_main(part: str, arguments: list[str]) -> int:
    _BREAKERS[part]()
    return join.main(arguments)


def launch_freezing(round_number: int) -> ForkServer:
    """Starts `join` whose network process stops itself in that round, as soon as another has sent it a contribution.

    It has sent none itself. Before that, the others might still form their group without it.
    """
    return ForkServer(main=partial(_freezing_main, round_number))


def _freezing_main(round_number: int, arguments: list[str]) -> int:
    push, accept = exchange.Exchange._push, Reduction.accept

    async def push_nothing(self: exchange.Exchange, state: RoundState, *more: Any) -> None:
        if state.group.round == round_number:
            await asyncio.Event().wait()
        await push(self, state, *more)

    def freeze(self: Reduction, *more: Any) -> None:
        if self.plan.round == round_number:
            os.kill(os.getpid(), signal.SIGSTOP)  # before anything that was sent can become a result
        accept(self, *more)

    setattr(exchange.Exchange, "_push", push_nothing)  # noqa: B010 - mypy does not let a method be assigned to
    setattr(Reduction, "accept", freeze)  # noqa: B010
    return join.main(arguments)


if __name__ == "__main__":
    setattr(publisher, "publish", planted)  # noqa: B010
    sys.exit(publish.main(sys.argv[1:]))
