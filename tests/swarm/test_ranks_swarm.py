"""A peer of two ranks, started with torchrun, in a swarm. Real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from tests.helpers.swarm import PATIENT, Launch, Swarm, equal_digests, swarm
from tests.helpers.torchrun import NUM_RANKS, launch_forked_ranks, launch_ranks, rank_process

pytestmark = pytest.mark.swarm


def join_with_ranks(running: Swarm, launch: Launch, name: str) -> LocalPeer:
    """Another peer of a swarm, once it is in the same round as the first."""
    running.launch, launch = launch, running.launch
    peer = running.join("--precision", "bf16", name=name)  # the other's is fp32
    running.launch = launch
    together = peer.wait_for("round", lambda event: event["peers"] == 2)["round"]
    running.peers[0].wait_for_round(together)
    equal_digests([running.peers[0], peer], together)
    assert peer.wait_for("join")["ranks"] == NUM_RANKS
    return peer


def assert_nobody_is_left(tree: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
    assert not alive


def test_two_ranks_commit_what_one_rank_commits(tmp_path: Path) -> None:
    rounds = 2
    arguments = ["--experts", "1,4", "--seed", "5", "--micro-batch-size", "1", "--max-rounds", rounds]
    arguments += ["--precision", "bf16"]
    with swarm(tmp_path) as running:
        alone = running.found(*arguments, name="alone")
        running.launch = launch_forked_ranks()
        shared = running.found(*arguments, name="shared")
        assert [peer.wait() for peer in (alone, shared)] == [0, 0], shared.tail()
        for number in range(1, rounds + 1):
            equal_digests([alone, shared], number)
        steps = [peer.events("step") for peer in (alone, shared)]
        assert [event["tokens"] for event in steps[1]] == [event["tokens"] for event in steps[0]]


def test_a_killed_rank_ends_its_peer_and_the_swarm_goes_on(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        other = running.found("--wait-for-peers", 2)
        for killed in range(NUM_RANKS):
            peer = join_with_ranks(running, launch_forked_ranks(), name=f"killed{killed}")
            tree = peer.tree()
            assert len(tree) == 1 + NUM_RANKS + 2  # torchrun, the ranks, and rank 0's network process and p2pd
            rank_process(peer, killed).kill()
            assert peer.wait() == 1, peer.tail()
            assert_nobody_is_left(tree)
            other.wait_for_round(max(other.rounds()) + 2)


def test_a_peer_that_torchrun_starts_leaves_in_order(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        running.found("--wait-for-peers", 2)
        peer = join_with_ranks(running, launch_ranks, name="ranks")
        tree = peer.tree()
        peer.process.send_signal(signal.SIGTERM)
        peer.wait()  # torchrun's own exit code is not zero after a signal
        assert_nobody_is_left(tree)
        left = peer.wait_for("leave")
        assert left["round"] == max(peer.rounds())
        assert "another rank" not in peer.text(), peer.tail()
        assert "left the swarm after round" in peer.text(), peer.tail()
