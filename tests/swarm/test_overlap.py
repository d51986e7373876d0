"""Training that goes on during the exchange: the same consensus, and no work lost. Real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm


def test_peers_train_on_while_they_exchange_and_agree_all_the_same(tmp_path: Path) -> None:
    with swarm(tmp_path, round={"overlap": True, "inner_steps": 10}, experts_per_peer=4) as running:
        peers = running.start_all(3, "--max-rounds", 10)
        for peer in peers:
            assert peer.wait() == 0
        for number in range(1, 11):
            equal_digests(peers, number)
        during = 0
        for peer in peers:
            events = peer.events()
            groups = {event["round"]: event["time"] for event in events if event["event"] == "group"}
            commits = {number: groups[number] + event["exchange_seconds"] for number, event in peer.rounds().items()}
            steps = [event["time"] for event in events if event["event"] == "step"]
            during += sum(groups[n] < time < commits[n] for n in commits for time in steps)
        assert during > 0  # or this would be a test of training without overlap
        losses = [peers[0].rounds()[number]["eval_loss"] for number in (1, 10)]
        assert losses[1] < losses[0] - 0.3
