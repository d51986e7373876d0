"""How peers that are started together wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.base.errors import InvitationError
from spes_swarm.peer.joining.barrier import await_training, wait_for_peers
from spes_swarm.port.messages import SwarmView


class Clock(threading.Event):
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += timeout
        return self.is_set()


def view(ready: int, training: int) -> SwarmView:
    return SwarmView(
        num_peers=ready,
        num_ready=ready,
        num_training=training,
        tokens_per_step=0,
        tokens=0.0,
        tokens_per_second=0.0,
        at=0.0,
        swarm_round=0,
        experts_covered=0,
    )


@pytest.mark.parametrize(
    ("seen", "seconds"),
    [
        (lambda t: view(2, 2), 0.0),
        (lambda t: view(2, 2 if t >= 60 else 0), 60.0),  # the others see each other late
        (lambda t: view(2 if t < 10 else 1, 1), 30.0),  # one of them has gone
        (lambda t: view(2, 1), 120.0),  # one of them waits for more peers
        (lambda t: view(1 if t < 15 else 2, 1 if t < 15 else 2), 15.0),  # a record came late
    ],
)
def test_it_begins_when_all_train_or_will_not(seen: Callable[[float], SwarmView], seconds: float) -> None:
    clock = Clock()
    await_training(lambda: seen(clock.now - 1000.0), 2, clock, lambda: clock.now)
    assert clock.now - 1000.0 == pytest.approx(seconds, abs=0.2)


def test_it_leaves_when_told_to() -> None:
    clock = Clock()
    clock.set()
    await_training(lambda: view(2, 0), 2, clock, lambda: clock.now)
    assert clock.now == 1000.0


def test_who_is_out_of_the_run_does_not_wait_for_more_peers() -> None:
    said: list[str] = []
    peer, console = SimpleNamespace(wait_for_peers=3), SimpleNamespace(say=said.append)
    views = [view(0, 0), view(1, 0), view(1, 0), replace(view(1, 0), out="the invitation has been revoked")]
    context: Any = SimpleNamespace(peer=peer, console=console, stop=Clock(), ask=lambda *command: views.pop(0))
    absent: Any = None
    with pytest.raises(InvitationError, match="the invitation has been revoked"):
        wait_for_peers(context, absent, absent, lambda state: None)
    assert said == ["waiting for peers: 1 of 3", "waiting for peers: 2 of 3"]
