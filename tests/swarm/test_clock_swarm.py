"""Real peers whose wall clocks are wrong by minutes take part."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hivemind.dht import DHTNode

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.network.link.clock import TOLERANCE_S, Timekeeper
from spes_swarm.network.link.dht_records import RunRecordValidator
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Progress
from tests.helpers.dht_clock import in_hivemind
from tests.helpers.hostile_peer import joined
from tests.helpers.record_reader import read_records
from tests.helpers.rounds import identity
from tests.helpers.skewed_join import launch_skewed
from tests.helpers.swarm import TINY_RUN, Swarm, equal_digests


class SkewedSwarm(Swarm):
    """A swarm of peers whose clocks are wrong by given seconds, in the order of their start."""

    def __init__(self, directory: Path, skews: Sequence[float]) -> None:
        super().__init__(directory)
        self._skews = iter(skews)

    def start(self, name: str, *arguments: Any) -> LocalPeer:
        self.launch = launch_skewed(next(self._skews))
        return super().start(name, *arguments)


def peer_id(peer: LocalPeer) -> str:
    return str(peer.events("join")[0]["peer_id"])


async def watch_a_record_expire(peers: Sequence[LocalPeer], victim: LocalPeer, own: Identity) -> None:
    """Looks into the DHT from outside, by the swarm's time: first all records live, then the victim is killed."""
    ttl_s = TINY_RUN["round"]["progress_ttl_s"]
    async with joined(peers[0].address(), own) as (daemon, rpc, manifest):
        timekeeper = Timekeeper(rpc, manifest.run_id, own.peer_id, lambda peer_id, error: None)
        await timekeeper.synchronise(await daemon.connections())
        now = timekeeper.clock.now
        with in_hivemind(timekeeper.clock):
            node = await DHTNode.create(
                p2p=daemon.p2p,
                initial_peers=[peers[0].address()],
                client_mode=True,
                record_validator=RunRecordValidator(manifest.run_id, now),
            )
            try:
                read = partial(read_records, node, manifest.run_id, "progress", Progress, now)
                found = await read()
                assert found.keys() == {peer_id(peer) for peer in peers}
                for record in found.values():
                    assert 0.0 < record.expires - now() < ttl_s + 2 * TOLERANCE_S
                gone = peer_id(victim)
                victim.kill()
                deadline = now() + ttl_s + 2 * TOLERANCE_S
                # The moment before the look counts: on a busy machine a look takes seconds.
                while (began := now()) and gone in await read():
                    assert began < deadline
                    await asyncio.to_thread(peers[0].wait_for_round, max(peers[0].rounds()) + 1)
            finally:
                await node.shutdown()


@pytest.mark.swarm
def test_peers_whose_clocks_are_wrong_by_minutes_take_part(tmp_path: Path) -> None:
    """The run goes by the clock of its founder, which is wrong, too; others are ahead of it and behind."""
    skews = (120.0, 420.0, -180.0)
    with SkewedSwarm(tmp_path, skews) as running:
        peers = running.start_all(3, "--experts", 3)
        first = max(peer.wait_for("round", lambda e: e["peers"] == 3)["round"] for peer in peers)
        for peer in peers:
            peer.wait_for_round(first + 1)
        for number in range(first, first + 2):
            equal_digests(peers, number)
            assert [peer.rounds()[number]["peers"] for peer in peers] == [3, 3, 3]
        for peer, skew in zip(peers, skews, strict=True):
            reports = [fault for fault in peer.events("fault") if fault["kind"] == "clock"]
            assert [fault["peer"] for fault in reports] == ([] if skew == skews[0] else [peer_id(peer)])
            for fault in reports:
                found = re.search(r"([\d.]+) s (ahead of|behind)", fault["detail"])
                assert found is not None
                assert float(found[1]) == pytest.approx(abs(skew - skews[0]), abs=TOLERANCE_S)
                assert found[2] == ("ahead of" if skew > skews[0] else "behind")
        victim, survivors = peers[1], [peers[0], peers[2]]
        asyncio.run(asyncio.wait_for(watch_a_record_expire(peers, victim, identity(92)), PATIENCE_S))
        quick = TINY_RUN["round"]["window_s"] / 2
        on = max(
            peer.wait_for("round", lambda e: e["peers"] == 2 and e["group_seconds"] < quick)["round"]
            for peer in survivors
        )
        for peer in survivors:
            peer.wait_for_round(on + 1)
        equal_digests(survivors, on + 1)
        for peer in survivors:
            assert not [fault for fault in peer.events("fault") if fault["kind"] == "dht"]
