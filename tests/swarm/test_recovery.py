"""A swarm that comes back, and peers that come back to it, from checkpoints that are not the same. Real processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from scripts.testing.local_peer import LocalPeer
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm


def newest_checkpoint(peer: LocalPeer) -> int:
    return max(int(path.name.split("-")[1]) for path in (peer.output_dir / "checkpoints").glob("round-*"))


def forget_since(peer: LocalPeer, number: int) -> None:
    """Removes the checkpoints after a round: what a peer has that saves seldom."""
    for path in (peer.output_dir / "checkpoints").glob("round-*"):
        if int(path.name.split("-")[1]) > number:
            shutil.rmtree(path)


def test_some_of_the_killed_peers_go_on_from_the_newest_of_their_checkpoints(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        # Without the founder: nobody's return is needed.
        _, *rest = running.start_all(4)
        for peer in rest:
            peer.wait_for_round(4)
        for peer in running.peers:
            peer.kill()
        oldest, middle, newest = rest
        best = newest_checkpoint(newest)
        digests = {event["digest"] for number, event in newest.rounds().items() if number == best}
        for peer in (oldest, middle):
            forget_since(peer, best - 1)
        back = [running.start(peer.output_dir.name, "--wait-for-peers", 3) for peer in (oldest, middle, newest)]
        together = [peer.wait_for("round", lambda event: event["peers"] == 3)["round"] for peer in back]
        for peer in back:
            peer.wait_for_round(max(together) + 2)
        # On a busy machine one of them may miss the first round, but none goes on from an older checkpoint.
        first = {peer.output_dir.name: min(peer.rounds()) for peer in back}
        assert min(first.values()) == best + 1, first
        joined = {peer.output_dir.name: peer.wait_for("join")["round"] for peer in back}
        assert min(joined.values()) == joined[newest.output_dir.name] == best, joined
        digests.update(sync["digest"] for peer in back for sync in peer.events("sync") if sync["round"] == best)
        assert len(digests) == 1
        equal_digests(back, max(together) + 2)


def test_a_peer_that_slept_for_many_rounds_fetches_the_reference_and_goes_on(tmp_path: Path) -> None:
    with swarm(tmp_path, round={"inner_steps": 2}) as running:
        *others, sleeper = running.start_all(3)
        sleeper.wait_for_round(2)
        sleeper.signal_tree(signal.SIGSTOP)
        asleep_at = max(sleeper.rounds())
        try:
            others[0].wait_for_round(asleep_at + 14)
        finally:
            sleeper.signal_tree(signal.SIGCONT)
        sync = sleeper.wait_for("sync", lambda event: "why" in event)
        # So late that no round could have brought it in step; of the donors one may be a round behind the other.
        assert sync["round"] > asleep_at + 8
        assert sleeper.process.poll() is None
        together = sleeper.wait_for("round", lambda event: event["peers"] == 3 and event["round"] > sync["round"])
        for peer in running.peers:
            peer.wait_for_round(together["round"])
        equal_digests(running.peers, together["round"])
        assert {event["peers"] for event in sleeper.rounds().values()} <= {2, 3}  # it never went on alone


def test_a_newcomer_holds_its_first_round_with_the_peer_that_waited_for_it(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        founder, newcomer = running.found("--wait-for-peers", 2, "--max-rounds", 3), running.join("--max-rounds", 3)
        for peer in (founder, newcomer):
            assert peer.wait() == 0, peer.tail()
            assert [event["peers"] for event in peer.rounds().values()] == [2, 2, 2]
        equal_digests(running.peers, 3)
