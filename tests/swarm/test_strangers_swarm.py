"""Real peers among strangers: neither wrong clocks nor records without work behind them hold rounds up."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import LocalPeer
from spes_swarm.network.link import clock
from tests.helpers.rounds import identity
from tests.helpers.slow_join import sleeping_main
from tests.helpers.strangers import CLAIMS, connected_strangers, haunt
from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm

CHECK_EVERY_S = 2.0
NUM_HONEST = 3  # fewer than the strangers whose clocks are wrong
GHOSTS = 12


def _main(arguments: list[str]) -> int:
    clock.CHECK_EVERY_S = CHECK_EVERY_S  # once a minute would make this test last for minutes
    return sleeping_main(0.4, arguments)  # strangers should get some of the processors' time, too


async def rounds_go_on(peers: list[LocalPeer], for_s: float) -> None:
    """Waits until so much time has passed and everybody has committed another round."""
    until = time.monotonic() + for_s
    last = max(max(peer.rounds()) for peer in peers)
    while time.monotonic() < until:
        last += 1
        await asyncio.gather(*(asyncio.to_thread(peer.wait_for_round, last) for peer in peers))
    await asyncio.gather(*(asyncio.to_thread(peer.wait_for_round, last + 1) for peer in peers))


def test_strangers_neither_set_the_clock_nor_hold_up_rounds(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        running.launch = ForkServer(main=_main)
        peers = running.start_all(NUM_HONEST, "--experts", 2)
        first = max(peer.wait_for("round", lambda e: e["peers"] == NUM_HONEST)["round"] for peer in peers)
        maddrs = [peer.address() for peer in peers]

        async def attack() -> None:
            async with connected_strangers(maddrs, [identity(60 + i) for i in range(4)]) as strangers:
                for ahead_s in (1e6, -1e6, 0.0):
                    strangers.ahead_s = ahead_s
                    await rounds_go_on(peers, 1.5 * CHECK_EVERY_S)
            ghosts = [identity(70 + i) for i in range(GHOSTS)]
            async with aclosing(haunt(maddrs[0], identity(64), ghosts, CLAIMS)) as haunting:
                assert await anext(haunting) == GHOSTS
                await rounds_go_on(peers, 0.0)

        asyncio.run(attack())
        last = min(max(peer.rounds()) for peer in peers)
        for number in range(first, last + 1):
            equal_digests(peers, number)
            for peer in peers:
                assert peer.rounds()[number]["peers"] == NUM_HONEST
        for peer in peers:
            assert not peer.events("sync")[1:], "nobody followed a ghost to another round"
            assert not [fault for fault in peer.events("fault") if fault["kind"] in ("clock", "dht")]
