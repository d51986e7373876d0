"""Claiming experts while others change their leases; the DHT is the test's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.config.manifest import found_run
from spes_swarm.network import run_commands
from spes_swarm.network.run_services import RunServices
from spes_swarm.protocol.members.records import Lease, Record
from spes_swarm.protocol.ownership.reassignment import choose_experts, priority, resolve
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity
from tests.helpers.run_settings import settings_without_trainer
from tests.helpers.tiny_model import tiny_layout

ME = identity(0).peer_id
EXPERTS = range(8)
MAX_LOOKS = 30  # one takes a second, and the trainer waits for the claim for two minutes
Leases = dict[str, Sequence[int]]
Others = Callable[[tuple[int, ...]], Leases]  # from this peer's experts, as it last published them


class LeasesOfOthers:
    """Stands in for the records in the DHT. All leases of the others are renewed before each look."""

    def __init__(self, others: Others) -> None:
        self._others = others
        self._held: tuple[int, ...] = ()
        self._leases: dict[str, Lease] = {}
        self.looks = -1  # after the first choice

    async def publish(self, kind: str, record: Record) -> bool:
        assert isinstance(record, Lease)
        self._held = tuple(record.experts)
        return True

    async def refresh(self) -> None:
        await self.search("leases")

    async def search(self, kind: str) -> None:
        assert kind == "leases"
        self.looks += 1
        assert self.looks <= MAX_LOOKS, "the claim does not end"
        expires = time.time() + 60.0 + self.looks
        self._leases = {
            peer: Lease(expires=expires, experts=list(experts), since_round=0)
            for peer, experts in self._others(self._held).items()
        }

    def of(self, kind: str, schema: type[Record]) -> dict[str, Lease]:
        return self._leases if kind == "leases" else {}


def claim(others: Others, want: int, monkeypatch: pytest.MonkeyPatch) -> tuple[tuple[int, ...], int]:
    """Returns what this peer holds at the end, and how often it has looked at the leases of the others."""
    monkeypatch.setattr(run_commands, "REFRESH_S", 0.0)
    layout = tiny_layout()
    settings, *_vectors = settings_without_trainer(found_run(run_config(), layout.digest, identity(0)), layout)
    stub: Any = SimpleNamespace(transport=None, peer_id=ME, connections=None)
    services = RunServices(stub, stub, stub, identity(0), settings)
    records: Any = LeasesOfOthers(others)
    services._discovery.open(records)
    services.announcer.open(records)
    for peer in others(()):
        services.state.roster.reputation.note_answer(peer)
    held = asyncio.run(services.commands.claim(want, room=want, fixed=False))
    return held, records.looks


def rivals(suits: Callable[[str], bool]) -> Iterator[str]:
    """Names of peers that suit."""
    return (name for name in map("rival{}".format, itertools.count()) if suits(name))


def has_better_claim(name: str, experts: Collection[int]) -> bool:
    return all(priority(name, expert) < priority(ME, expert) for expert in experts)


def test_a_peer_that_changes_its_lease_all_the_time_delays_nobody_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """It always holds what this peer has just chosen, and one expert is free."""
    rival = next(rivals(lambda name: has_better_claim(name, EXPERTS)))
    held, _ = claim(lambda mine: {"steady": EXPERTS[:6], rival: mine}, 1, monkeypatch)
    assert len(held) == 1


@pytest.mark.parametrize("num_others", [1, 3, 7])
def test_peers_that_start_together_cover_all_experts(num_others: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All make the same choice first, and this peer has to give up all of it."""
    want = len(EXPERTS) // (num_others + 1)
    first = choose_experts({}, ME, len(EXPERTS), want)
    names = rivals(lambda name: choose_experts({}, name, len(EXPERTS), want) == first and has_better_claim(name, first))
    leases: Leases = dict.fromkeys(itertools.islice(names, num_others), first)

    def others(mine: tuple[int, ...]) -> Leases:
        if not mine:
            return dict.fromkeys(leases, ())
        seen = dict(leases)
        leases.update({peer: resolve({**seen, ME: mine}, peer, len(EXPERTS)) for peer in seen})
        return seen

    held, _ = claim(others, want, monkeypatch)
    assert not set(held) & set(first)
    for _ in EXPERTS:
        others(held)
    assert {*held, *itertools.chain(*leases.values())} == set(EXPERTS)
