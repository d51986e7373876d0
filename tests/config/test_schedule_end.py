"""A run whose schedule is over."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from spes_swarm.base.errors import ConfigError
from spes_swarm.config.schedule import ScheduleEnd
from spes_swarm.network.transfer.catching_up import CatchingUp
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.port.messages import TransferReport
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.members.roster import Roster
from spes_swarm.protocol.ownership.lease_table import Leases
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.publishing.publisher import open_target
from tests.helpers.lone_trainer import run_config
from tests.helpers.monitoring import progress
from tests.helpers.swarm import PATIENT, equal_digests, swarm


def end_of(total_steps: int, at_end: str) -> ScheduleEnd:
    return ScheduleEnd(run_config(training={"total_steps": total_steps, "at_end": at_end}))


@pytest.mark.parametrize(("total_steps", "last"), [(11, 2), (19, 2), (20, 2), (21, 3), (2000, 200)])
def test_the_last_round_is_the_first_that_completes_the_steps(total_steps: int, last: int) -> None:
    """Rounds of the tests' run have ten steps."""
    stops, goes_on = end_of(total_steps, "stop"), end_of(total_steps, "continue")
    assert stops.last_round == last
    assert [stops.ends_run(number) for number in (last - 1, last, last + 1)] == [False, True, True]
    assert goes_on.last_round is None
    assert not goes_on.ends_run(last + 1)


def test_at_end_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"training\.at_end: found 'pause', expected continue or stop"):
        end_of(20, "pause")


def peer_at(number: int, state: str) -> Progress:
    return progress(round=number, state=state)


@pytest.mark.parametrize(
    ("others", "fetches"),
    [
        ([], False),
        ([(1, "training"), (1, "training")], False),
        ([(2, "waiting"), (1, "training"), (1, "training")], False),  # one of four may lie
        ([(2, "waiting"), (2, "waiting"), (1, "training")], True),
        ([(2, "waiting")], True),
        ([(2, "leaving")], False),  # it cannot be asked for anything any more
    ],
)
def test_whose_last_round_failed_fetches_it_from_those_who_wait(others: list[tuple[int, str]], fetches: bool) -> None:
    """Alone it would end with a reference of its own."""
    layout = Layout.build({"w": (4,)}, {"0.gate_up_proj": (2, 2, 2), "0.down_proj": (2, 2, 1)})
    reference = Reference(layout, np.zeros(layout.num_elements, dtype=np.float32))
    reference.finish(1, [(block.index, 1) for block in layout.blocks])
    contribution_N = np.full(layout.num_elements, 0.5, dtype=np.float32)
    roster, leases = Roster("me"), Leases("me", 2, Rules())
    roster.update({f"peer{i}": peer_at(*other) for i, other in enumerate(others)})
    for peer in roster.peers:
        roster.reputation.note_answer(peer)
    leases.held = (1,)

    class Donors:
        async def download(self, donors: object) -> TransferReport:
            reference.values_N += 2.0
            reference.finish(2, [(block.index, 2) for block in layout.blocks])
            return TransferReport(round=2, payload_bytes=7)

    async def refresh() -> None:
        """The records are as they are."""

    run = run_config(training={"total_steps": 20, "at_end": "stop"})
    state: Any = SimpleNamespace(
        reference=reference, contribution_N=contribution_N, leases=leases, roster=roster, run=run
    )
    catching_up = CatchingUp(state, cast(Transfer, Donors()), refresh)
    caught_up = asyncio.run(catching_up.resync_if_diverged())
    assert (caught_up is not None) == fetches
    if caught_up is not None:
        assert (caught_up.round, caught_up.payload_bytes) == (2, 7)
        assert "the run has ended with round 2" in caught_up.why
        block = layout.expert_block(1)
        assert (contribution_N[block.start : block.stop] == 2.5).all()  # its work stays on top


@pytest.mark.swarm
def test_a_run_ends_with_its_schedule(tmp_path: Path) -> None:
    """All end by themselves with the same round, it is published, and who comes later is told in one line."""
    place = tmp_path / "published"
    training = {"total_steps": 25, "warmup_steps": 5, "at_end": "stop"}
    with swarm(tmp_path, training=training, evaluation={"every_rounds": 4}, round=PATIENT) as running:
        running.found("--wait-for-peers", "2", "--publish-to", f"file:{place}", "--publish-every", "100")
        running.join("--wait-for-peers", "2")
        assert [peer.wait() for peer in running.peers] == [0, 0]
        for peer in running.peers:
            assert max(peer.rounds()) == 5
            assert [event["steps"] for event in peer.events("schedule_end")] == [25]
            assert peer.rounds()[5]["eval_loss_stderr"] > 0  # the last round is measured whenever it comes
            assert peer.events("leave")[0]["round"] == 5
            assert "is over: it ended with round 5" in peer.text()
        equal_digests(running.peers, 5)
        newest = open_target(f"file:{place}").newest()
        assert newest is not None
        assert (newest.round, newest.digest) == (5, running.peers[0].rounds()[5]["digest"])

        again = running.start("peer0", "--config", running.config)
        fresh = running.start("fresh", "--from-hub", f"file:{place}")
        for peer in (again, fresh):
            assert peer.wait() == 0, peer.tail()
            lines = [line for line in peer.text().splitlines() if " is over: all 25 steps" in line]
            assert len(lines) == 1
            assert not peer.events("step")
