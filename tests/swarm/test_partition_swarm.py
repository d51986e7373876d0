"""A swarm that is cut in two and heals: both sides train on, and both sides' work counts. Real processes and cables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_network import LocalNetwork, unavailable_reason
from scripts.testing.local_peer import LocalPeer
from tests.helpers.slow_join import sleeping_main
from tests.helpers.swarm import PATIENT, SWARM_RUN, equal_digests, merged

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.skipif(unavailable_reason() is not None, reason=unavailable_reason() or ""),
]
FAST = {"progress_ttl_s": 6.0, "lease_s": 8.0, "window_s": 4.0, "stall_timeout_s": 2.0}


def start(network: LocalNetwork, host: int, directory: Path, *arguments: object) -> LocalPeer:
    common = ["--host-maddrs", f"/ip4/{network.address(host)}/tcp/31000", "--num-threads", "1", "--wait-for-peers", "4"]
    # Slow, since the test mostly waits for leases to expire.
    launch = ForkServer(network.namespace(host), main=partial(sleeping_main, 0.1))
    return LocalPeer(directory / f"peer{host}", [*common, *map(str, arguments)], launch)


@contextmanager
def four_hosts(directory: Path, changes: dict[str, Any]) -> Iterator[tuple[LocalNetwork, list[LocalPeer]]]:
    """A network with a peer on each host, which have committed a round together."""
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({"run": merged(SWARM_RUN, changes)}), "utf-8")
    peers: list[LocalPeer] = []
    with LocalNetwork(4) as network:
        try:
            peers.append(start(network, 0, directory, "--config", config))
            address = peers[0].address(host=network.address(0))
            peers += [start(network, host, directory, "--initial-peers", address) for host in (1, 2, 3)]
            for peer in peers:
                peer.wait_for("round", lambda event: event["peers"] == 4)
            yield network, peers
        finally:
            for peer in peers:
                peer.__exit__()


def newest(peers: Sequence[LocalPeer]) -> int:
    return max(max(peer.rounds(), default=0) for peer in peers)


def wait_for_common_round(peers: Sequence[LocalPeer], first: int) -> int:
    """The first round from `first` on that all have committed with all others."""
    number = first
    while True:
        for peer in peers:
            peer.wait_for_round(number)
        if all(peer.rounds().get(number, {"peers": 0})["peers"] == len(peers) for peer in peers):
            equal_digests(peers, number)
            return number
        number += 1
        assert number < first + 10, "no round with all peers"


def test_two_halves_train_on_and_become_one_again(tmp_path: Path) -> None:
    with four_hosts(tmp_path, {"round": FAST, "experts_per_peer": 4}) as (network, peers):
        halves = peers[:2], peers[2:]
        cut_at = newest(peers)
        network.cut((0, 1), (2, 3))
        # Both sides go on, each by itself, and cover all experts when the others' leases have expired.
        for half in halves:
            alone = [
                peer.wait_for("round", lambda e: e["peers"] == 2 and e["experts_covered"] == 8)["round"]
                for peer in half
            ]
            for peer in half:
                peer.wait_for_round(max(alone) + 1)
            equal_digests(half, max(alone) + 1)
        one, other = (half[0].rounds() for half in halves)
        common = max(set(one) & set(other))
        assert common > cut_at
        assert one[common]["digest"] != other[common]["digest"]
        network.heal()
        meeting = [
            peer.wait_for("round", lambda event: event["peers"] == 4 and event["round"] > common)["round"]
            for peer in peers
        ]
        healed = max(meeting)
        for peer in peers:
            peer.wait_for_round(healed + 2)
        # One consensus within two rounds of meeting.
        digests = [
            [peer.rounds()[number]["digest"] for peer in peers if number in peer.rounds()]
            for number in range(min(meeting), healed + 2)
        ]
        assert any(len(same) >= 3 and len(set(same)) == 1 for same in digests)
        # Doubled holders give way at the first commit that all four have: on a busy machine one may miss a round.
        together = wait_for_common_round(peers, healed + 1)
        held = [peer.rounds()[together]["experts_held"] for peer in peers]
        counts = [sum(expert in experts for experts in held) for expert in range(8)]
        assert counts == [2] * 8


def test_a_peer_with_a_slow_line_keeps_its_duties(tmp_path: Path) -> None:
    """Its work takes more than a second where that of the others takes a tenth."""
    with four_hosts(tmp_path, {"round": PATIENT}) as (network, peers):
        network.limit(3, 1.0)
        limited_at = newest(peers)
        for peer in peers:
            peer.wait_for_round(limited_at + 8)
        together = [number for number, event in peers[3].rounds().items() if event["peers"] == 4]
        assert len([number for number in together if number > limited_at]) > 3
        network.limit(3, None)
        wait_for_common_round(peers, newest(peers) + 1)
        for peer in peers:
            assert not [fault for fault in peer.events("fault") if fault["kind"] in ("duty", "lost", "missing")]
