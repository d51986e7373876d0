"""A peer's last records, whenever it leaves. The DHT is a stand-in."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import found_run
from spes_swarm.network.announcer import Announcer
from spes_swarm.network.link.dht_records import everybody
from spes_swarm.network.run_state import RunState
from spes_swarm.port.messages import MeasuredRound, Presence
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.members.records import DutyNote, Lease, Progress, Record, Rounds
from spes_swarm.protocol.members.routing_report import RoutingReport
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
        losses=MeasuredRound(round=number, peers=2, train_loss=5.0),
    )


def lone_run_state() -> RunState:
    layout, me = tiny_layout(), identity(0)
    settings, *vectors = settings_without_trainer(found_run(run_config(), layout.digest, me), layout)
    run_state = RunState.of(me, settings, everybody, Exclusions())
    for vector in vectors:
        vector.close()
    return run_state


def test_a_peer_that_leaves_while_it_reports_its_rounds_reports_them_again() -> None:
    run_state = lone_run_state()

    async def leave_meanwhile() -> list[Record]:
        announcer = Announcer(run_state, time.time, unexpected)
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


def test_who_has_lost_all_experts_releases_its_lease_once() -> None:
    run_state = lone_run_state()

    async def announce_thrice() -> list[Record]:
        announcer = Announcer(run_state, time.time, unexpected)
        dht: Any = SlowDht()
        announcer.open(dht)
        for held in ((0, 1), (), ()):
            run_state.leases.held = held
            announcer.renew_lease_soon()
            announcer.announce_soon()
            await announcer.announce()
        stored: list[Record] = dht.stored
        return stored

    told = [record.experts for record in asyncio.run(announce_thrice()) if isinstance(record, Lease)]
    assert told == [[0, 1], []]


def test_what_peers_decide_on_is_apart_from_what_they_measure() -> None:
    run_state = lone_run_state()

    async def announce(routing: RoutingReport) -> Progress:
        announcer = Announcer(run_state, time.time, unexpected)
        dht: Any = SlowDht()
        announcer.open(dht)
        announcer.round_seconds = 1.5
        announcer.set_presence(replace(presence(7), total_tokens=896, routing=routing))
        announcer.set_traffic(1000, 2000)
        await announcer.publish_progress()
        (record,) = dht.stored
        assert isinstance(record, Progress)
        return record

    record = asyncio.run(announce(RoutingReport(dead=(3,), num_dead=1)))
    assert (record.tokens_per_step, record.tokens_per_second, record.experts, record.dead) == (128, 100.0, [0], [3])
    assert record.telemetry == {
        "step": 7,
        "loss": 5.0,
        "total_tokens": 896,
        "bytes_sent": 1000,
        "bytes_received": 2000,
        "round_seconds": 1.5,
    }
    assert asyncio.run(announce(RoutingReport(num_dead=0))).dead == []  # all are alive
    assert asyncio.run(announce(RoutingReport())).dead is None  # nobody knows yet: no vote


def test_a_record_says_who_is_excluded_and_who_is_without_duty_and_why() -> None:
    run_state = lone_run_state()
    conduct = run_state.tracks.conduct
    for n in range(10):
        conduct.exclusions.note_lie(f"liar {n}", n)
    conduct.exclusions.pardon("liar 9", 9)
    for round_number in range(2):
        conduct.note_stall("idle 1", round_number)
    run_state.roster.reputation.without_duty = {f"idle {n}": 3 + n for n in range(6)}

    async def announce() -> Record:
        announcer = Announcer(run_state, time.time, unexpected)
        dht: Any = SlowDht()
        announcer.open(dht)
        announcer.set_presence(presence(7))
        await announcer.publish_progress()
        (record,) = dht.stored
        assert isinstance(record, Record)
        return record

    record = asyncio.run(announce())
    assert isinstance(record, Progress)
    assert record.proven == [f"liar {n}" for n in range(1, 9)]  # the newest
    kinds = [conduct.doubts(f"idle {n}", 0) for n in range(3)]
    assert kinds[1]
    assert record.without_duty == [DutyNote(peer=f"idle {n}", since=3 + n, kinds=list(kinds[n])) for n in range(3)]
