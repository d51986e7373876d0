"""A member that hands out harmful results: real peers notice it by their loss, and take the round back."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import Event, LocalPeer
from spes_swarm import join
from spes_swarm.protocol.rounds.taking_back import Previous
from tests.helpers.lying_reducer import launch_lying
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm

# Nothing bounds results, so a lie does as much harm in one round as it would in many.
UNBOUNDED = {**PATIENT, "clip": 0.0}
FIRST_LIE = 6  # the rounds before show how much losses scatter
TOGETHER = ("--wait-for-peers", 5, "--experts", 2)
SLOW = ("--upload-mbps", 0.5)  # so that the liar reduces most of what it may: a lie about a few parts may do no harm


def first_return(peer: LocalPeer) -> Event:
    """Waits for the round in which a peer has taken back another one."""
    return peer.wait_for("round", lambda event: event.get("taken_back") is not None)


def _dying_main(arguments: list[str]) -> int:
    restore = Previous.restore

    def die_half_way(self: Previous, blocks: Any, *more: Any) -> None:
        restore(self, sorted(blocks)[: len(blocks) // 2], *more)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Previous, "restore", die_half_way)  # noqa: B010 - mypy does not let a method be assigned to
    return join.main(arguments)


def test_a_harmful_round_is_taken_back_and_a_peer_killed_in_the_middle_resumes(tmp_path: Path) -> None:
    with swarm(tmp_path, round=UNBOUNDED) as running:
        launch = running.launch
        honest = [running.found(*TOGETHER, *SLOW), running.join(*TOGETHER, *SLOW), running.join(*TOGETHER, *SLOW)]
        running.launch = ForkServer(main=partial(_dying_main))
        dying = running.join(*TOGETHER, *SLOW, name="dying")
        running.launch = launch_lying("loud", FIRST_LIE)
        liar = running.join(*TOGETHER, "--seed", 9, name="liar")
        returns = [first_return(peer) for peer in honest]
        assert {event["round"] for event in returns} == {returns[0]["round"]}
        number, harmed = returns[0]["round"], returns[0]["taken_back"]
        assert harmed >= FIRST_LIE
        assert sum(event["loss_rose"] is True for event in returns) >= 2
        equal_digests(honest, number)
        losses = {n: event["eval_loss"] for n, event in honest[0].rounds().items()}
        assert losses[harmed] > losses[harmed - 1] + 1.0
        after = [peer.wait_for_round(number + 1)["train_loss"] for peer in honest]  # of the steps after the return
        assert sum(after) / len(after) < losses[harmed - 1] + 0.5
        assert dying.wait() != 0
        running.launch = launch
        back = running.join("--experts", 2, *SLOW, name="dying")
        liar.kill()
        common = back.wait_for("round", lambda event: event["round"] > number and event["peers"] >= 4)["round"]
        for peer in honest:
            peer.wait_for_round(common)
        equal_digests([*honest, back], common)
