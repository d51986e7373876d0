"""Training that goes on during the exchange, in four bits per value: the same consensus, and no work lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.testing.local_peer import LocalPeer
from tests.helpers.swarm import equal_digests, swarm
from tests.helpers.tiny_model import tiny_layout

pytestmark = pytest.mark.swarm


INT4, INT8 = 0.5 + 2 / 64, 1 + 2 / 64  # bytes per value; parts add four for their scale


def planned_bytes(peers: list[LocalPeer], number: int) -> float:
    """What three peers send in a round, all together: two push each shared part, and two receive each result."""
    layout = tiny_layout()
    shared, expert = layout.blocks[0].size, layout.expert_block(0).size
    # Each expert goes to the two peers that do not reduce it, which only one of its holders does.
    held = sum(len(peer.rounds()[number]["experts_held"]) for peer in peers)
    replicated = held - layout.num_experts  # no expert has three holders
    sole = layout.num_experts - replicated
    return 2 * shared * (INT4 + INT8) + 2 * expert * sole * INT4 + expert * replicated * (INT4 + 2 * INT8)


def bytes_sent(peers: list[LocalPeer], number: int) -> int:
    return sum(peer.rounds()[number]["payload_bytes_sent"] for peer in peers)


def test_peers_train_on_while_they_exchange_and_agree_all_the_same(tmp_path: Path) -> None:
    settings = {"overlap": True, "inner_steps": 10, "codec": "int4", "result_codec": "int8"}
    with swarm(tmp_path, round=settings, experts_per_peer=4) as running:
        peers = running.start_all(3, "--max-rounds", 5)
        for peer in peers:
            assert peer.wait() == 0
        for number in range(1, 6):
            equal_digests(peers, number)
            assert bytes_sent(peers, number) == pytest.approx(planned_bytes(peers, number), rel=0.05)
        during = 0
        for peer in peers:
            events = peer.events()
            groups = {event["round"]: event["time"] for event in events if event["event"] == "group"}
            commits = {number: groups[number] + event["exchange_seconds"] for number, event in peer.rounds().items()}
            steps = [event["time"] for event in events if event["event"] == "step"]
            during += sum(groups[n] < time < commits[n] for n in commits for time in steps)
        assert during > 0  # or this would be a test of training without overlap
        losses = [peers[0].rounds()[number]["eval_loss"] for number in (1, 5)]
        assert losses[1] < losses[0] - 0.3
