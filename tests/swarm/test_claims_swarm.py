"""Real peers and one that claims every expert by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.swarm import equal_digests, swarm

pytestmark = pytest.mark.swarm


def test_whoever_claims_all_experts_displaces_nobody(tmp_path: Path) -> None:
    # With one holder for each expert, every claim that counts would cost a holder its place.
    with swarm(tmp_path, ownership={"replicas": 1}) as running:
        honest = running.start_all(2, "--experts", 4)[:]
        for peer in honest:
            peer.wait_for_round(2)
        held = {peer.output_dir.name: peer.rounds()[2]["experts_held"] for peer in honest}
        assert sorted(expert for experts in held.values() for expert in experts) == list(range(8))

        claimant = running.join("--experts", "0,1,2,3,4,5,6,7", name="claimant")
        claimant.wait_for("round", lambda event: event["peers"] == 3 and len(event["experts_held"]) == 4)
        assert "a peer keeps at most 4 while others can hold the rest" in claimant.text()
        last = max(claimant.rounds())
        for peer in honest:
            peer.wait_for_round(last + 1)
        tree = claimant.kill()
        assert tree
        last = max(honest[0].rounds())
        for peer in honest:
            peer.wait_for_round(last + 1)
            assert not [event for event in peer.events("lease") if event["lost"] and event.get("round", 0) >= 2]
            after = {number: event for number, event in peer.rounds().items() if number >= 2}
            assert all(event["experts_held"] == held[peer.output_dir.name] for event in after.values())
            assert all(event["experts_covered"] == 8 for event in after.values() if event["peers"] >= 2)
        equal_digests(honest, last + 1)
