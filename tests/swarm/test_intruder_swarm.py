"""Strangers that submit statements with the largest bandwidth, and do nothing else, among four real peers.

`scripts/attack.py --kinds silent lying --rounds 30` measures the loss beside that of an honest run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.testing.forked_peer import ForkedPeer, ForkServer
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.protocol.rounds.track_record import RECENT_ROUNDS
from tests.helpers import intruder
from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm

NUM_HONEST = 4
ROUNDS = RECENT_ROUNDS + 4  # what it failed to deliver at first is forgotten by then
# Of text in bytes that nothing is known of.
UNTRAINED_LOSS = 5.6


@contextmanager
def intruding(directory: Path, peers: list[LocalPeer], kind: str) -> Iterator[ForkedPeer]:
    """A stranger in every group of these peers."""
    arguments = [*(peer.address() for peer in peers), "--directory", str(directory), "--kind", kind]
    directory.mkdir()
    process = ForkServer(main=intruder.main)(arguments, directory / "console.log")
    try:
        yield process
        assert process.poll() is None, (directory / "console.log").read_text()
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def groups(directory: Path) -> dict[int, int]:
    """The rounds that the stranger was in, ascending, with the number of parts that it should have reduced."""
    journal = directory / "groups.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    return {entry["round"]: entry["parts"] for entry in (json.loads(line) for line in lines if line.endswith("\n"))}


def wait_for_groups(directory: Path, peer: LocalPeer, count: int) -> list[int]:
    """Lets rounds be held until the stranger was in so many; returns these."""
    while len(present := groups(directory)) < count:
        peer.wait_for_round(max(peer.rounds(), default=0) + 1)
    return list(present)


def test_strangers_neither_stop_nor_steer_the_shared_layers(tmp_path: Path) -> None:
    """One that claims work is waited for twice, and then left out."""
    silent, lying, owing = (tmp_path / kind for kind in ("silent", "lying", "owing"))
    with swarm(tmp_path) as running, ExitStack() as strangers:
        peers = running.start_all(NUM_HONEST, "--experts", 2)
        processes = [strangers.enter_context(intruding(each, peers, each.name)) for each in (silent, lying, owing)]
        first = max(wait_for_groups(directory, peers[0], 1)[0] for directory in (silent, lying, owing))
        second = wait_for_groups(owing, peers[0], 2)[1]
        while min(max(groups(silent)), max(groups(lying))) < max(first + ROUNDS, second + 8):
            assert all(process.poll() is None for process in processes)
            peers[0].wait_for_round(max(peers[0].rounds()) + 1)
        assert not [number for number in groups(owing) if second < number <= second + 8]
        last = max(max(peer.rounds()) for peer in peers)
        for peer in peers:
            peer.wait_for_round(last)
        for present in (groups(silent), groups(lying)):
            assert not any(parts for number, parts in present.items() if number > min(present) + 1)
        for number in range(first + 2, last + 1):
            equal_digests(peers, number)
            assert [peer.rounds()[number]["parts_missing"] for peer in peers] == [0] * NUM_HONEST
        losses = {number: event["eval_loss"] for number, event in peers[0].rounds().items()}
        assert losses[last] < losses[first + 2] < UNTRAINED_LOSS
        assert not [fault for peer in peers for fault in peer.events("fault") if fault["kind"] == "standstill"]


def test_a_founder_that_is_still_alone_is_not_stopped_by_a_stranger(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        founder = running.found("--experts", 8)
        with intruding(tmp_path / "stranger", [founder], "silent"):
            founder.wait_for("fault", lambda fault: fault["kind"] == "pull")
            founder.wait_for_round(max(founder.rounds(), default=0) + 4)
