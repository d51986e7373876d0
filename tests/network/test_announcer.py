"""A peer's last records, whenever it leaves. The DHT is a stand-in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import found_run
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.run_state import RunState
from spes_swarm.port.messages import Presence, RoundLosses
from spes_swarm.protocol.members.records import RecentFaults, Record, Rounds
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity
from tests.helpers.run_settings import settings_without_trainer
from tests.helpers.tiny_model import tiny_layout


@dataclass
class SlowDht:
    """Keeps what is published. Storing a `slow` kind never completes."""

    slow: set[str] = field(default_factory=set)
    stored: list[Record] = field(default_factory=list)
    waits: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, kind: str, record: Record) -> bool:
        if kind in self.slow:
            self.waits.set()
            await asyncio.Event().wait()
        self.stored.append(record)
        return True


def unexpected(peer_id: str, error: ProtocolError) -> None:
    raise AssertionError(error)


def presence(number: int) -> Presence:
    return Presence(
        name="",
        state="training",
        step=number,
        tokens=0,
        tokens_per_step=128,
        tokens_per_second=100.0,
        loss=5.0,
        experts=(0,),
        losses=RoundLosses(round=number, peers=2, train_loss=5.0),
    )


def test_a_peer_that_leaves_while_it_reports_its_rounds_reports_them_again() -> None:
    layout, me = tiny_layout(), identity(0)
    settings, *vectors = settings_without_trainer(found_run(run_config(), layout.digest, me), layout)
    run_state = RunState.of(me, settings)
    for vector in vectors:
        vector.close()

    async def leave_meanwhile() -> list[Record]:
        announcer = Announcer(run_state, RecentFaults(time.time), time.time, lambda: True, unexpected)
        dht: Any = SlowDht(slow={"rounds"})
        announcer.open(dht)
        announcer.set_presence(presence(7))
        reporting = asyncio.create_task(announcer.announce())
        await dht.waits.wait()
        reporting.cancel()
        dht.slow.clear()
        await announcer.say_goodbye()
        stored: list[Record] = dht.stored
        return stored

    told = [record for record in asyncio.run(leave_meanwhile()) if isinstance(record, Rounds)]
    assert [record.rounds for record in told] == [[7]]
