"""The swarm as its users see it: real processes, real libp2p, real text."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.local_peer import LocalPeer
from spes_swarm.protocol.rounds.plan import MIN_PART_ELEMENTS
from spes_swarm.storage.checkpoint import load_newest
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import PATIENT, SWARM_RUN, Swarm, equal_digests, swarm
from tests.helpers.tiny_model import tiny_layout

pytestmark = pytest.mark.swarm


NUM_ROUNDS = 6


def test_four_peers_agree_in_every_round(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        peers = running.start_all(4, "--max-rounds", NUM_ROUNDS, "--experts", 2)
        assert [peer.wait() for peer in peers] == [0, 0, 0, 0]
        layout = tiny_layout()
        # fp16: two bytes a value, and few for scales. The shared block has parts for three of the peers.
        shared, experts = 2 * layout.blocks[0].size, 2 * 8 * layout.expert_block(0).size
        assert layout.blocks[0].size // MIN_PART_ELEMENTS == 3
        payloads = [num_parts * shared + (1 - num_parts / 3) * shared + 3 / 4 * experts for num_parts in (0, 1, 1, 1)]
        for number in range(1, NUM_ROUNDS + 1):
            equal_digests(peers, number)
            for direction in ("sent", "received"):
                counted = sorted(peer.rounds()[number][f"payload_bytes_{direction}"] for peer in peers)
                assert counted == pytest.approx(payloads, rel=0.05)
            for peer in peers:
                event = peer.rounds()[number]
                assert event["peers"] == 4
                assert event["experts_covered"] == 8
                assert event["parts_missing"] == 0
        # Together they do the inner steps of all, to the nearest step; up to one of each other peer is predicted. (Not
        # so in the first round: who calls it may not have seen everybody begin.)
        inner_steps = SWARM_RUN["round"]["inner_steps"]
        for number in range(1, NUM_ROUNDS):
            done = sum(event["round"] == number for peer in peers for event in peer.events("step"))
            assert 4 * (inner_steps - 0.5) - 3 <= done, number
        held = [set(peer.events("join")[0]["experts"]) for peer in peers]
        assert {peer.events("join")[0]["kernel"] for peer in peers} == {"torch"}
        assert set().union(*held) == set(range(8))
        assert peers[0].rounds()[NUM_ROUNDS]["eval_loss"] < peers[0].rounds()[1]["eval_loss"]
        assert not [fault for peer in peers for fault in peer.events("fault")]


# Large enough that an exchange takes about a second: what hits a peer then hits it in the middle.
WIDE = {"model": {"settings": {"hidden_size": 128, "intermediate_size": 512}}, "round": {"inner_steps": 4}}


def wait_for_group(peer: LocalPeer, number: int) -> None:
    peer.wait_for("group", lambda e: e["round"] == number)


def hit_during_exchange(peers: list[LocalPeer], victim: LocalPeer, first_round: int, number: int) -> int:
    """Signals the victim after a group with everybody in it has formed; returns the round that was hit.

    All have the group by then: whom a leader that is hit has not told learns it from another member, and comes late.
    """

    def is_met_by_all(group: dict[str, Any]) -> bool:
        return bool(group["round"] >= first_round and group["peers"] == len(peers))

    while True:
        hit = int(peers[0].wait_for("group", is_met_by_all)["round"])
        for peer in peers:
            wait_for_group(peer, hit)
        victim.signal_tree(signal.SIGSTOP)
        if hit not in victim.rounds():
            break
        victim.signal_tree(signal.SIGCONT)  # it was faster; another time
        first_round = max(peers[0].rounds()) + 2
    victim.signal_tree(number)
    return hit


def go_on_without_the_victim(survivors: list[LocalPeer], hit: int) -> None:
    for peer in survivors:
        assert peer.wait_for_round(hit + 2)["peers"] == 3
        assert peer.rounds()[hit]["exchange_seconds"] < 30.0 + 3.0
    for number in (hit, hit + 1, hit + 2):
        equal_digests(survivors, number)


def test_a_peer_frozen_or_killed_during_an_exchange_costs_the_others_nothing(tmp_path: Path) -> None:
    with swarm(tmp_path, **WIDE) as running:
        peers = running.start_all(4, "--experts", 2)
        survivors, victim = peers[:3], peers[3]
        hit = hit_during_exchange(peers, victim, 2, signal.SIGSTOP)
        go_on_without_the_victim(survivors, hit)
        victim.signal_tree(signal.SIGCONT)
        back = victim.wait_for("round", lambda e: e["round"] > hit and e["peers"] == 4)["round"]
        for peer in survivors:
            peer.wait_for_round(back)
        equal_digests(peers, back)
        hit = hit_during_exchange(peers, victim, max(peers[0].rounds()) + 2, signal.SIGKILL)
        go_on_without_the_victim(survivors, hit)


def a_suspended_trainer_holds_the_others_up_only_at_first(peers: list[LocalPeer], victim: LocalPeer) -> None:
    """Ctrl-Z stops the trainer but not its network process, which must not go on claiming that it trains."""
    peers[0].wait_for("round", lambda e: e["peers"] == 3)
    victim.process.send_signal(signal.SIGSTOP)
    quick = SWARM_RUN["round"]["window_s"] / 2
    first = peers[0].wait_for("round", lambda e: e["peers"] == 2 and e["group_seconds"] < quick)["round"]
    for number in range(first + 1, first + 3):
        peers[0].wait_for_round(number)
        assert peers[0].rounds()[number]["group_seconds"] < quick
    victim.process.send_signal(signal.SIGCONT)
    back = victim.wait_for("round", lambda e: e["round"] > first and e["peers"] == 3)["round"]
    for peer in peers:
        peer.wait_for_round(back)
    equal_digests(peers, back)


def a_founder_that_comes_back_finds_its_swarm(running: Swarm, founder: LocalPeer, others: list[LocalPeer]) -> LocalPeer:
    """Started again by the very same command, without --initial-peers, it must not go on alone beside the others."""
    founder.kill()
    gone_at = max(others[0].rounds()) + 1
    others[0].wait_for_round(gone_at + 1)
    again = running.found("--experts", 3)
    back = again.wait_for("round", lambda e: e["peers"] == 3)["round"]
    assert back > gone_at
    for peer in others:
        peer.wait_for_round(back)
    equal_digests([again, *others], back)
    assert again.events("join")[0]["experts"] == founder.rounds()[max(founder.rounds())]["experts_held"]
    return again


def a_leaving_peer_says_goodbye_and_its_checkpoint_is_whole(leaver: LocalPeer, others: list[LocalPeer]) -> None:
    assert leaver.terminate() == 0
    assert leaver.events("leave")
    assert "newest work" not in leaver.text()
    joined, last = leaver.events("join")[0], leaver.rounds()[max(leaver.rounds())]
    checkpoints = leaver.output_dir / "checkpoints"
    checkpoint, complaints = load_newest(checkpoints, joined["run_id"], joined["peer_id"], tiny_layout())
    assert checkpoint is not None
    assert not complaints
    assert checkpoint.meta.held == last["experts_held"]
    # Shared tensors aside, each of two layers has two stacked expert parameters.
    assert sum("experts" in name and name.endswith("exp_avg") for name in checkpoint.optimiser()) == 4
    gone_at = max(leaver.rounds())
    others[0].wait_for("round", lambda e: e["round"] > gone_at and e["peers"] == 2)


def a_peer_whose_goodbye_nobody_hears_says_so(leaver: LocalPeer, deaf: LocalPeer) -> None:
    deaf.signal_tree(signal.SIGSTOP)
    assert leaver.terminate() == 0
    assert [fault["kind"] for fault in leaver.events("fault")].count("goodbye") == 1
    assert "no other peer joined the last round" in leaver.text()


def test_peers_are_suspended_come_back_and_leave(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        founder, one, other = running.start_all(3, "--experts", 3)
        a_suspended_trainer_holds_the_others_up_only_at_first([founder, one, other], victim=other)
        founder = a_founder_that_comes_back_finds_its_swarm(running, founder, [one, other])
        a_leaving_peer_says_goodbye_and_its_checkpoint_is_whole(one, [founder, other])
        a_peer_whose_goodbye_nobody_hears_says_so(other, deaf=founder)


def test_a_late_joiner_is_in_step_within_one_round(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        running.launch = launch_slow(0.4)  # rounds that last longer than it takes to read a newcomer's record
        # Donors so slow that one of them cannot have sent everything before the next is asked.
        peers = running.start_all(2, "--experts", 4, "--upload-mbps", 2)
        peers[0].wait_for_round(2)
        late = running.join("--experts", 4)
        sync = late.wait_for("sync")
        assert sync["round"] >= 2
        assert len(sync["donors"]) == 2
        joined = late.wait_for("join")
        first = late.wait_for("round")
        assert first["peers"] == 3
        # Rounds go on while it builds its model; from its first step on it must not miss one. (An event is written
        # after the step that follows the commit.)
        written_by = joined["time"] + 1.0
        committed_at_join = max(e["round"] for p in peers for e in p.events("round") if e["time"] <= written_by)
        assert first["round"] <= committed_at_join + 2
        for peer in peers:
            peer.wait_for_round(first["round"] + 1)
        late.wait_for_round(first["round"] + 1)
        equal_digests([*peers, late], first["round"])
        equal_digests([*peers, late], first["round"] + 1)
        assert late.rounds()[first["round"] + 1]["experts_covered"] == 8
        # What went into earlier rounds it learns from the others.
        late.wait_for("round", lambda e: peers[0].rounds().get(e["round"], {}).get("swarm_tokens") == e["swarm_tokens"])


def test_a_stopped_run_goes_on_exactly_where_it_was(tmp_path: Path) -> None:
    """One peer, CPU, fixed seed: stopped by SIGTERM and started again, it gives the digests of an unbroken run."""
    with swarm(tmp_path) as running:
        whole = running.found("--experts", 8, "--seed", 5, "--max-rounds", 3)
        assert whole.wait() == 0
        identity = tmp_path / "broken" / "identity.key"
        identity.parent.mkdir()
        identity.write_bytes((whole.output_dir / "identity.key").read_bytes())
        running.launch = launch_slow(0.3)  # it is to be stopped before it has done all its rounds
        first = running.found("--experts", 8, "--seed", 5, "--max-rounds", 3, name="broken")
        first.wait_for("step", lambda e: e["round"] == 1 and e["step"] % 5 == 2)
        assert first.terminate() == 0
        stopped_at = max(first.rounds())
        steps_before = first.events("step")[-1]["step"]
        assert stopped_at < 3
        again = running.start("broken", "--experts", 8, "--seed", 5, "--max-rounds", 3 - stopped_at)
        assert again.wait() == 0
        assert again.events("step")[0]["step"] == steps_before + 1
        assert again.events("join")[0]["experts"] == first.events("join")[0]["experts"]
        digests = {n: e["digest"] for n, e in {**first.rounds(), **again.rounds()}.items()}
        assert digests == {n: e["digest"] for n, e in whole.rounds().items()}
        damaged_checkpoints_never_restart_it(running, again)


def damaged_checkpoints_never_restart_it(running: Swarm, peer: LocalPeer) -> None:
    """The peer has ended after its third round."""
    checkpoints = peer.output_dir / "checkpoints"
    (max(checkpoints.iterdir()) / "live.safetensors").write_bytes(b"damaged")
    again = running.start(peer.output_dir.name, "--max-rounds", 1)
    assert again.wait() == 0
    assert min(again.rounds()) == 3  # from the one before
    for directory in checkpoints.glob("round-*"):
        (directory / "reference-00000.safetensors").unlink()
    last = running.start(peer.output_dir.name, "--max-rounds", 1)
    assert last.wait() == 2
    assert "none of the checkpoints" in last.text()
    assert not last.rounds()
