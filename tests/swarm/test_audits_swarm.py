"""Members that lie about results: real peers prove it, with a file that anybody can verify."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.testing.local_peer import Event, LocalPeer
from tests.helpers.lying_reducer import launch_lying
from tests.helpers.swarm import PATIENT, swarm

pytestmark = pytest.mark.swarm

TOGETHER = ("--wait-for-peers", 4, "--experts", 4)
FIRST_LIE = 3


def proven(peer: LocalPeer, culprit: str) -> Event:
    """Waits until a peer reports a proof."""
    event = peer.wait_for("fault", lambda event: event["kind"] == "proven")
    assert event["peer"] == culprit
    return event


@pytest.mark.parametrize("kind", ["flipped", "forged", "two-faced"])
def test_a_lie_is_proven_by_all_honest_members(kind: str, tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        honest = [running.found(*TOGETHER), running.join(*TOGETHER), running.join(*TOGETHER)]
        running.launch = launch_lying(kind, FIRST_LIE)
        liar = running.join(*TOGETHER, "--seed", 9, name="liar")
        culprit = liar.wait_for("join")["peer_id"]
        for peer in honest:
            proven(peer, culprit)
            assert not [
                event for event in peer.events("fault") if event["kind"] == "proven" and event["peer"] != culprit
            ]
            files = sorted((peer.output_dir / "proofs").glob("*.proof"))
            command = [sys.executable, "-m", "spes_swarm.proof", *map(str, files)]
            verified = subprocess.run(command, capture_output=True, text=True, check=True)
            assert culprit in verified.stdout
