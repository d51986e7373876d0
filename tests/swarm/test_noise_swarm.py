"""A member that contributes nothing but noise and claims 2^47 tokens for it, against three real peers.

`scripts/attack.py` measures the same over 20 rounds, beside an honest run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S
from spes_swarm.protocol.members.identity import Identity
from tests.helpers import noise_peer
from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm

NUM_HONEST = 3
ATTACKED_ROUNDS = 3


def attacked_rounds(directory: Path) -> list[int]:
    """The rounds in which the attacker has sent noise so far."""
    journal = directory / "rounds.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line)["round"] for line in lines if line.endswith("\n")]


def test_training_goes_on_under_the_loudest_noise_and_its_source_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "noise"
    directory.mkdir()
    culprit = Identity.load_or_create(directory / "identity.key").peer_id
    with swarm(tmp_path) as running:
        founder = running.found("--wait-for-peers", NUM_HONEST + 1, "--experts", 3)
        peers = [founder, *(running.join("--wait-for-peers", NUM_HONEST + 1, "--experts", 3) for _ in range(2))]
        arguments = [founder.address(), str(directory), "--kind", "loud"]
        process = ForkServer(main=noise_peer.main)(arguments, directory / "console.log")
        try:
            while len(attacked_rounds(directory)) < ATTACKED_ROUNDS:
                assert process.poll() is None, (directory / "console.log").read_text()
                founder.wait_for_round(max(founder.rounds(), default=0) + 1)
        finally:
            process.kill()
            process.wait(PATIENCE_S)
        attacked = attacked_rounds(directory)
        last = max(*founder.rounds(), *attacked) + 2
        for peer in peers:
            peer.wait_for_round(last)
        for number in range(1, last + 1):
            equal_digests([peer for peer in peers if number in peer.rounds()], number)
        losses = {number: event["eval_loss"] for number, event in founder.rounds().items()}
        # Noise of this size takes the loss beyond 30 in one round; text in bytes that nothing is known of has 5.6.
        assert max(losses.values()) < 5.6
        seen = [losses[number] for number in attacked if number in losses]
        assert seen[-1] < seen[0]
        assert losses[last] < seen[0]
        honest = {peer.events("join")[0]["peer_id"] for peer in peers}
        for peer in peers:
            faults = [event for event in peer.events("fault") if event["kind"] == "clipped"]
            assert {event["peer"] for event in faults} == {culprit}
            assert len(faults) <= len(attacked) + 1, "once a round"
            assert not [e for e in peer.events("fault") if e["peer"] in honest and e["kind"] == "norm"]
