"""State transfer between real peers that are killed with SIGKILL in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import Swarm, equal_digests, swarm

pytestmark = pytest.mark.swarm

# 66 MB: in the order of a minute of training on two cores for a round, so that only tests that want rounds see any.
LARGE = {
    "model": {"settings": {"hidden_size": 256, "intermediate_size": 1280}},
    "round": {"inner_steps": 100_000, "stall_timeout_s": 10.0},
}
NUM_BYTES = 4 * (2 * (8 * 3 * 256 * 1280 + 4 * 256**2) + 2 * 272 * 256)  # less the norms and routers


def start_donors(running: Swarm, count: int, upload_mbps: float, *arguments: Any) -> list[LocalPeer]:
    """Peers that limit what they give newcomers, so that there is time to kill somebody."""
    peer = {"upload_mbps": upload_mbps}
    founder, others = running.directory / "founder.yaml", running.directory / "others.yaml"
    founder.write_text(yaml.safe_dump({**yaml.safe_load(running.config.read_text()), "peer": peer}))
    others.write_text(yaml.safe_dump({"peer": peer}))
    running.start("peer0", "--config", founder, *arguments)
    for _ in range(count - 1):
        running.join("--config", others, *arguments)
    return running.peers[:count]


@pytest.fixture(scope="module")
def waiting_donors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, list[LocalPeer]]]:
    """Three peers with the initial weights that wait for others, and leave the processor to the transfer.

    They serve two tests: it takes longer until they have the weights than to fetch them from all three.
    """
    with swarm(tmp_path_factory.mktemp("donors"), **LARGE) as running:
        donors = start_donors(running, 3, 32.0, "--wait-for-peers", 9)
        for donor in donors[1:]:
            donor.wait_for("sync", timeout_s=PATIENCE_S)
        yield running, donors


def at_half(joiner: LocalPeer, donors: int = 1) -> dict[str, Any]:
    """Waits until half of the bytes have come, from at least so many donors."""
    return joiner.wait_for(
        "sync_progress",
        lambda e: 2 * e["done_bytes"] >= e["total_bytes"] and len(e["chunks_by_donor"]) >= donors,
        PATIENCE_S,
    )


def identity_of(peer: LocalPeer) -> str:
    return str(peer.events()[0]["peer_id"])


def test_a_joiner_killed_at_half_fetches_only_the_rest(waiting_donors: tuple[Swarm, list[LocalPeer]]) -> None:
    running, donors = waiting_donors
    with running.join(name="joiner") as joiner:
        total = at_half(joiner)["total_bytes"]
        joiner.kill()
        done = joiner.events("sync_progress")[-1]["done_bytes"]
        assert not joiner.events("sync"), "it was killed too late"
    with running.join(name="joiner") as again:
        sync = again.wait_for("sync", timeout_s=PATIENCE_S)
        # What had come in the last moment may not have been on disk.
        assert sync["resumed_bytes"] >= done - 0.1 * total
        assert sync["payload_bytes"] - sync["refetched_bytes"] == total - sync["resumed_bytes"]
        assert sync["refetched_bytes"] < 0.1 * total
        assert not list(again.output_dir.glob("*partial*"))
        again.wait_for("join", timeout_s=PATIENCE_S)
        assert "on disk" in again.text()
        assert sync["digest"] == donors[1].events("sync")[0]["digest"]
        assert again.terminate(PATIENCE_S) == 0


def test_a_donor_killed_at_half_costs_less_than_a_tenth(waiting_donors: tuple[Swarm, list[LocalPeer]]) -> None:
    """The last to use these donors."""
    running, donors = waiting_donors
    with running.join() as joiner:
        progress = at_half(joiner, donors=3)
        victim = next(peer for peer in donors if peer.output_dir.name == "peer1")
        victim.kill()
        sync = joiner.wait_for("sync", timeout_s=PATIENCE_S)
        assert progress["done_bytes"] < 0.8 * progress["total_bytes"], "it was killed too late to matter"
        assert NUM_BYTES <= progress["total_bytes"] < 1.01 * NUM_BYTES
        assert sync["refetched_bytes"] < 0.1 * progress["total_bytes"]
        assert sync["payload_bytes"] == progress["total_bytes"] + sync["refetched_bytes"]
        assert len(sync["donors"]) == 3
        assert sync["resumed_bytes"] == sync["superseded_bytes"] == 0
        joiner.wait_for("join", timeout_s=PATIENCE_S)
        assert "%: " in joiner.text()
        assert "verified" in joiner.text()
        assert not list(joiner.output_dir.glob("*partial*"))
        faults = {(e["peer"], e["kind"]) for e in joiner.events("fault")}
        assert faults <= {(identity_of(victim), kind) for kind in ("donor", "truncated", "stalled")}
        assert sync["digest"] == donors[1].events("sync")[0]["digest"]


def test_a_joiner_gets_in_although_rounds_are_committed_during_its_download(tmp_path: Path) -> None:
    quick = {
        "model": {"settings": {"hidden_size": 64, "intermediate_size": 512}},
        "round": {"inner_steps": 2, "stall_timeout_s": 10.0},
    }
    with swarm(tmp_path, **quick) as running:
        running.launch = launch_slow(0.5)  # a few rounds during the download, not dozens
        donors = start_donors(running, 3, 4.0, "--wait-for-peers", 3, "--experts", 3)
        for donor in donors:
            donor.wait_for("round", lambda e: e["peers"] == 3, PATIENCE_S)
        begun = max(donors[0].rounds())
        joiner = running.join("--experts", 2)
        sync = joiner.wait_for("sync", timeout_s=PATIENCE_S)
        assert max(donors[0].rounds()) > begun, "no round was committed meanwhile"
        assert sync["round"] >= begun
        first = joiner.wait_for("round", lambda e: e["peers"] == 4, PATIENCE_S)["round"]
        for peer in running.peers:
            peer.wait_for_round(first + 1, PATIENCE_S)
        equal_digests(running.peers, first + 1)
        for number in range(1, first + 1):  # and nobody was held up
            equal_digests(donors, number)
