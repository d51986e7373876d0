"""A member that contributes nothing but noise and claims 2^47 tokens for it, against four real peers.

`scripts/attack.py` measures the same over 20 rounds, beside an honest run.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_swarm.forked_peer import ForkServer
from spes_swarm.identity import Identity
from tests import noise_peer
from tests.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm

NUM_HONEST = 4
ATTACKED_ROUNDS = 5


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """All peers of a session share one tokenised corpus, outside the user's own cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_training_goes_on_under_the_loudest_noise_and_its_source_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "noise"
    directory.mkdir()
    culprit = Identity.load_or_create(directory / "identity.key").peer_id
    with swarm(tmp_path) as running:
        founder = running.found("--wait-for-peers", NUM_HONEST + 1, "--experts", 2)
        peers = [founder, *(running.join("--wait-for-peers", NUM_HONEST + 1, "--experts", 2) for _ in range(3))]
        arguments = [founder.address(), str(directory), "--kind", "loud"]
        process = ForkServer(main=noise_peer.main)(arguments, directory / "console.log")
        try:
            founder.wait_for_round(ATTACKED_ROUNDS)
            assert process.poll() is None, (directory / "console.log").read_text()
        finally:
            process.kill()
            process.wait(60)
        attacked = [json.loads(line)["round"] for line in (directory / "rounds.jsonl").read_text().splitlines()]
        assert len(attacked) >= ATTACKED_ROUNDS - 1
        last = max(*founder.rounds(), *attacked) + 2
        for peer in peers:
            peer.wait_for_round(last)
        for number in range(1, last + 1):
            equal_digests(peers, number)
        rounds = founder.rounds()
        losses = [rounds[number]["eval_loss"] for number in range(1, last + 1)]
        # Noise of this size takes the loss beyond 30 in one round; text in bytes that nothing is known of has 5.6.
        assert max(losses) < 5.6
        assert losses[attacked[-1] - 1] < losses[attacked[0] - 1]
        assert losses[-1] < losses[attacked[0] - 1]
        honest = {peer.events("join")[0]["peer_id"] for peer in peers}
        for peer in peers:
            faults = [event for event in peer.events("fault") if event["kind"] == "clipped"]
            assert {event["peer"] for event in faults} == {culprit}
            assert len(faults) <= len(attacked) + 1, "once a round"
            assert not [e for e in peer.events("fault") if e["peer"] in honest and e["kind"] == "norm"]
