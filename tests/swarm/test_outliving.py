"""A swarm outlives its peers: experts and rounds when somebody leaves, dies or stops. Real processes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scripts.testing.local_peer import LocalPeer
from spes_swarm.protocol.meeting.view import rank
from spes_swarm.storage.checkpoint import load_newest
from tests.helpers.slow_join import launch_slow, launch_slower_than
from tests.helpers.swarm import Swarm, equal_digests, swarm
from tests.helpers.tiny_model import tiny_layout

pytestmark = pytest.mark.swarm


# With one holder for each expert every peer has room to spare, and somebody's experts are nobody else's.
SPREAD: dict[str, Any] = {"ownership": {"replicas": 1}, "experts_per_peer": 8}


def start_in_turn(running: Swarm, count: int) -> list[LocalPeer]:
    """Peers that join one after the other.

    Of those that begin together, two may choose the same expert, and keep it if the founder holds all others.
    """
    running.found().wait_for("join")
    for _ in range(count - 1):
        running.join().wait_for("join")
    return running.peers


def held_once(number: int, peers: list[LocalPeer]) -> bool:
    """Returns True if all have committed the round and no expert has two holders."""
    rounds = [peer.rounds().get(number) for peer in peers]
    held = [expert for event in rounds if event is not None for expert in event["experts_held"]]
    return None not in rounds and len(held) == len(set(held))


def a_leaving_peer_loses_nothing_and_others_adopt_its_experts(leaver: LocalPeer, stay: list[LocalPeer]) -> None:
    leaver.wait_for_round(leaver.wait_for("round", lambda e: e["peers"] == len(stay) + 1)["round"] + 2)
    assert leaver.terminate() == 0
    last = max(leaver.rounds())
    # Its last round is one with the others, so its last steps are in their reference.
    assert leaver.rounds()[last]["peers"] == len(stay) + 1
    assert leaver.rounds()[last]["parts_missing"] == 0
    for peer in stay:
        peer.wait_for_round(last + 2)
        assert peer.rounds()[last + 1]["experts_covered"] == 8
    equal_digests([*stay, leaver], last)
    equal_digests(stay, last + 2)
    lost = set(leaver.rounds()[last]["experts_held"])
    adopted = {e for peer in stay for e in peer.rounds()[last + 1]["experts_held"] if e in lost}
    assert set(leaver.events("lease")[-1]["lost"]) == adopted == lost != set()


def a_dead_peers_experts_are_adopted_within_a_round_after_its_lease(
    victim: LocalPeer, stay: list[LocalPeer], lease_s: float
) -> None:
    # Each of them may have adopted what a leaver had: whatever dies is to be nobody else's.
    begun = max(victim.rounds())
    victim.wait_for("round", lambda e: e["round"] > begun and held_once(e["round"], [*stay, victim]))
    victim.kill()
    expired = time.time() + lease_s  # at the latest
    last = max(victim.rounds())
    lost = set(victim.rounds()[last]["experts_held"])
    assert lost
    # The first round of which the rendezvous began after that; the others' records are read once a second.
    first = stay[0].wait_for("round", lambda e: e["time"] - e["group_seconds"] - e["exchange_seconds"] > expired + 2.0)
    for peer in stay:
        peer.wait_for_round(first["round"] + 1)
        assert peer.rounds()[first["round"] + 1]["experts_covered"] == 8
    adopted = {e for peer in stay for e in peer.rounds()[first["round"] + 1]["experts_held"]}
    assert adopted == set(range(8))
    # Until the lease expired, the place was kept for the dead one, which might have come back.
    changes = [e for peer in stay for e in peer.events("lease") if e.get("round", 0) > last]
    gains = [e for e in changes if lost & set(e["gained"])]
    assert gains
    assert all(event["time"] > expired - 2 * lease_s / 3 for event in gains)
    equal_digests(stay, first["round"] + 1)


def test_the_experts_of_a_peer_that_leaves_and_of_one_that_dies_are_adopted(tmp_path: Path) -> None:
    lease_s = 12.0
    with swarm(tmp_path, training={"optimiser": "muon"}, round={"lease_s": lease_s}, **SPREAD) as running:
        running.launch = launch_slow(0.3)  # the others mostly wait for the lease
        *stay, victim, leaver = start_in_turn(running, 4)
        a_leaving_peer_loses_nothing_and_others_adopt_its_experts(leaver, [*stay, victim])
        a_dead_peers_experts_are_adopted_within_a_round_after_its_lease(victim, stay, lease_s)


def test_experts_in_every_third_round_outlive_a_peer_that_leaves_and_one_that_is_killed(tmp_path: Path) -> None:
    with swarm(tmp_path, round={"expert_every": 3}, merge={"alpha": 0.0}, **SPREAD) as running:
        running.launch = launch_slow(0.2)  # rounds of a second: the peers' departures hit the rounds that are meant
        peers = running.start_all(4)
        *stay, victim, leaver = peers
        leaver.wait_for_round(3)
        assert leaver.terminate() == 0
        last = max(leaver.rounds())
        assert last % 3  # a round that leaves out the others' experts
        assert leaver.rounds()[last]["peers"] == 4
        for peer in (*stay, victim):
            peer.wait_for_round(last + 1)
            assert peer.rounds()[last + 1]["experts_covered"] == 8
        equal_digests(peers, last)
        # All that the leaver has done with its experts is in the reference.
        layout = tiny_layout()
        joined = leaver.events("join")[0]
        checkpoint, _ = load_newest(leaver.output_dir / "checkpoints", joined["run_id"], joined["peer_id"], layout)
        assert checkpoint is not None
        live_N, reference_N = np.empty((2, layout.num_elements), dtype=np.float32)
        checkpoint.live(layout, live_N)
        checkpoint.reference(layout, reference_N)
        held = set(leaver.rounds()[last]["experts_held"])
        assert held
        for expert in range(8):
            block = layout.expert_block(expert)
            assert checkpoint.meta.versions[block.index] == (last if expert in held else 3), expert
            if expert in held:
                where = slice(block.start, block.stop)
                np.testing.assert_allclose(live_N[where], reference_N[where], atol=1e-5)  # fp16
        assert held <= {e for peer in (*stay, victim) for e in peer.rounds()[last + 1]["experts_held"]}
        victim.kill()
        lost = max(victim.rounds())
        for peer in stay:
            peer.wait_for_round(lost + 3)
        for number in range(lost + 1, lost + 4):
            equal_digests(stay, number)
        assert "clipped" not in {fault["kind"] for peer in peers for fault in peer.events("fault")}


def test_a_lone_peer_trains_all_experts_in_turn(tmp_path: Path) -> None:
    with swarm(tmp_path, ownership={"rotate_every_rounds": 1}, experts_per_peer=3) as running:
        peer = running.found("--max-rounds", 7)
        assert peer.wait() == 0
        trained = {number: event["experts_held"] for number, event in peer.rounds().items()}
        for start in range(1, 5):
            window = {expert for number in range(start, start + 4) for expert in trained[number]}
            assert window == set(range(8)), trained
        assert all(len(experts) == 3 for experts in trained.values())


def lose_the_leader(peers: list[LocalPeer], how: signal.Signals) -> LocalPeer:
    """A round begins in time although its leader is gone, which is returned."""
    joined = {peer.wait_for("join")["peer_id"]: peer for peer in peers}
    run_id = peers[0].wait_for("join")["run_id"]
    number = max(max(peer.rounds()) for peer in peers) + 2
    leader = joined[min(joined, key=lambda peer_id: rank(run_id, number, peer_id))]
    others = [peer for peer in peers if peer is not leader]
    leader.wait_for_round(number - 1)
    # It dies before the round is due or while it gathers, whichever comes first on this machine.
    leader.signal_tree(how)
    for peer in others:
        event = peer.wait_for_round(number)
        assert event["group_seconds"] < 8.0 + 5.0, event
    equal_digests(others, max(set.intersection(*(set(p.rounds()) for p in others))))
    return leader


def test_a_round_begins_in_time_when_its_leader_is_gone(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        peers = running.start_all(4)
        for peer in peers:
            peer.wait_for_round(2)
        stopped = lose_the_leader(peers, signal.SIGSTOP)
        stopped_at = max(stopped.rounds())
        stopped.signal_tree(signal.SIGCONT)
        stopped.wait_for("round", lambda e: e["round"] > stopped_at and e["peers"] == 4)
        lose_the_leader(peers, signal.SIGKILL)


def test_a_peer_ten_times_slower_contributes_what_it_has(tmp_path: Path) -> None:
    with swarm(tmp_path, round={"inner_steps": 12}) as running:
        fast = tuple(running.start_all(2))
        common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1", "--initial-peers", fast[0].address()]
        slow = LocalPeer(tmp_path / "slow", common, launch_slower_than(fast[0].output_dir / "metrics.jsonl", 10))
        running.peers.append(slow)
        first = slow.wait_for("round", lambda event: event["peers"] == 3)["round"] + 1
        last = first + 2
        for peer in running.peers:
            peer.wait_for_round(last)
        steps = {
            peer: [sum(event["round"] == number for event in peer.events("step")) for number in range(first, last)]
            for peer in running.peers
        }
        for number in range(first, last + 1):
            equal_digests(running.peers, number)
            assert all(peer.rounds()[number]["peers"] == 3 for peer in running.peers)
            assert all(peer.rounds()[number]["parts_missing"] == 0 for peer in running.peers)
        # It has worked in every round, and nobody has waited for it to do its twelve steps.
        assert all(count >= 1 for count in steps[slow])
        assert sum(steps[slow]) < 12 * (last - first) / 2, steps
        assert sum(sum(steps[peer]) for peer in fast) > 2 * 12 * (last - first), steps
