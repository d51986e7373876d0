"""Members that lie about results: real peers prove it with files that anybody can verify, and exclude them."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.testing.local_peer import Event, LocalPeer
from spes_swarm import proof
from tests.helpers.commands import output_of
from tests.helpers.lying_reducer import launch_lying
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm

TOGETHER = ("--wait-for-peers", 4, "--experts", 4)
FIRST_LIE = 3
STEP_S = 0.8  # a round has five steps
EXCLUDED = r"this peer may no longer take part: \w+ is excluded: a proof shows a lie in round \d+"


def proven(peer: LocalPeer, culprit: str) -> Event:
    """Waits until a peer reports a proof."""
    event = peer.wait_for("fault", lambda event: event["kind"] == "proven")
    assert event["peer"] == culprit
    return event


def proofs_of(peer: LocalPeer) -> list[Path]:
    return sorted((peer.output_dir / "proofs").glob("*.proof"))


def test_the_work_of_a_member_that_shows_it_to_nobody_does_not_count(tmp_path: Path) -> None:
    """Rounds are longer than an auditor's second attempt; the member loses its experts, and stays in the groups."""
    with swarm(tmp_path, round={**PATIENT, "stall_timeout_s": 4.0}) as running:
        running.launch = launch_slow(STEP_S)
        honest = [running.found(*TOGETHER), running.join(*TOGETHER), running.join(*TOGETHER)]
        running.launch = launch_lying("accomplice", pause_s=STEP_S)
        accomplice = running.join(*TOGETHER, "--seed", 9, name="accomplice")
        peer_id = accomplice.wait_for("join")["peer_id"]
        for peer in honest:
            peer.wait_for(
                "fault", lambda event: event["kind"] == "duty" and "its work does not count" in event["detail"]
            )
            assert {event["peer"] for event in peer.events("fault") if event["kind"] == "duty"} == {peer_id}
        lease = accomplice.wait_for("lease", lambda event: len(event["lost"]) == 4)  # before it, members exchange some
        assert lease["gained"] == []
        later = accomplice.wait_for("round", lambda event: event["round"] > lease["round"])
        assert later["peers"] == 4
        for peer in honest:
            peer.wait_for_round(later["round"])
        equal_digests([*honest, accomplice], later["round"])


def test_a_lie_is_proven_by_all_honest_members_and_excludes_until_the_founder_pardons_it(tmp_path: Path) -> None:
    """Those who come later fetch the proof. tests/network/test_audits.py has the other kinds of lies."""
    with swarm(tmp_path, round=PATIENT) as running:
        honest = [running.found(*TOGETHER), running.join(*TOGETHER), running.join(*TOGETHER)]
        running.launch = launch_lying("two-faced", FIRST_LIE)
        liar = running.join(*TOGETHER, "--seed", 9, name="liar")
        culprit = liar.wait_for("join")["peer_id"]
        for peer in honest:
            proven(peer, culprit)
            assert {event["peer"] for event in peer.events("fault") if event["kind"] == "proven"} == {culprit}
            assert culprit in output_of(proof.main, *proofs_of(peer))
        liar.wait_for_text(EXCLUDED)
        assert liar.wait() == 2
        last = [max(number for number, event in peer.rounds().items() if event["peers"] == 4) for peer in honest]
        assert max(last) - min(last) <= 1
        end = max(last) + 2
        for peer in honest:
            peer.wait_for_round(end)
            assert {event["peers"] for number, event in peer.rounds().items() if number > max(last)} == {3}

        running.launch = launch_slow()
        newcomer = running.join("--experts", 4, "--seed", 10, name="newcomer")
        assert proven(newcomer, culprit)["detail"].startswith("it lied in round ")
        first = newcomer.wait_for("round")
        assert newcomer.events().index(first) > newcomer.events().index(proven(newcomer, culprit))
        again = ("--experts", 4, "--seed", 9)
        refused = running.join(*again, name="liar", via=newcomer)
        assert refused.wait() == 2
        assert f"{culprit} is excluded: a proof shows a lie in round" in refused.text()
        said = output_of(proof.main, "--pardon", "--output-dir", honest[0].output_dir, *proofs_of(honest[0]))
        assert f"pardoned {culprit} for its lies up to round " in said
        assert "the running peer passes it on now" in said
        pardoned = running.join(*again, name="liar", via=honest[1])
        for peer in (*honest, newcomer, pardoned):
            peer.wait_for("round", lambda event: event["peers"] == 5)
