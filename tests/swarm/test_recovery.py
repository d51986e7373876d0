"""A swarm that comes back, and peers that come back to it, from checkpoints that are not the same. Real processes."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import psutil
import pytest

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.storage.track_record_file import TrackRecordFile
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm


def newest_checkpoint(peer: LocalPeer) -> int:
    return max(int(path.name.split("-")[1]) for path in (peer.output_dir / "checkpoints").glob("round-*"))


def forget_since(peer: LocalPeer, number: int) -> None:
    """Removes the checkpoints after a round: what a peer has that saves seldom."""
    for path in (peer.output_dir / "checkpoints").glob("round-*"):
        if int(path.name.split("-")[1]) > number:
            shutil.rmtree(path)


def kill(peer: LocalPeer) -> None:
    """As the kernel's OOM killer does; it leaves no processes."""
    tree = peer.kill()
    assert len(tree) >= 3  # the trainer, the network process, p2pd
    _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
    assert not alive


def commits_of(peer: LocalPeer) -> dict[str, int]:
    """How many commits of each other peer one has on its disk."""
    known = TrackRecordFile(peer.output_dir / "track_records.json").read(peer.events("join")[0]["run_id"])
    assert known is not None
    return {peer_id: record.commits for peer_id, record in known.tracks.items()}


def test_the_whole_swarm_can_die_and_go_on_from_disk(tmp_path: Path) -> None:
    """Without its founder, and from the newest of the others' checkpoints."""
    with swarm(tmp_path) as running:
        # Without the founder: nobody's return is needed.
        _, *rest = running.start_all(4)
        for peer in rest:
            peer.wait_for_round(3)
        for peer in running.peers:
            kill(peer)
        oldest, middle, newest = rest
        before = commits_of(newest)
        best = newest_checkpoint(newest)
        # A peer may be killed between a checkpoint and the event of its round.
        digests = {event["digest"] for number, event in newest.rounds().items() if number == best}
        for peer in (oldest, middle):
            forget_since(peer, best - 1)
        killed = [peer.rounds()[max(peer.rounds())] for peer in rest]
        back = [running.start(peer.output_dir.name, "--wait-for-peers", 3) for peer in rest]
        together = [peer.wait_for("round", lambda event: event["peers"] == 3) for peer in back]
        last = max(event["round"] for event in together) + 1
        for peer in back:
            peer.wait_for_round(last)
        # On a busy machine one of them may miss the first round, but none goes on from an older checkpoint.
        first = {peer.output_dir.name: min(peer.rounds()) for peer in back}
        assert min(first.values()) == best + 1, first
        joined = [peer.wait_for("join") for peer in back]
        assert min(event["round"] for event in joined) == joined[-1]["round"] == best, joined
        assert [event["experts"] for event in joined] == [event["experts_held"] for event in killed]
        assert all(event["eval_loss"] < killed[-1]["eval_loss"] + 0.3 for event in together)
        digests.update(sync["digest"] for peer in back for sync in peer.events("sync") if sync["round"] == best)
        assert len(digests) == 1
        equal_digests(back, last)
        # What they know of each other is older than these processes.
        assert back[-1].terminate() == 0
        common = sum(event["peers"] == 3 for event in back[-1].rounds().values())
        after = commits_of(back[-1])
        for peer_id in (event["peer_id"] for event in joined[:-1]):
            assert before[peer_id] > 0
            assert after[peer_id] >= before[peer_id] + common


def test_peers_that_both_start_alone_find_each_other(tmp_path: Path) -> None:
    """As after a power cut, when neither finds the other in time: here one does not know where to look."""
    with swarm(tmp_path) as running:
        peers = running.start_all(2)
        for peer in peers:
            peer.wait_for_round(2)
        for peer in peers:
            kill(peer)
        founder, other = peers
        (other.output_dir / "peers.json").unlink()
        first = running.start(founder.output_dir.name, "--wait-for-peers", 2)
        first.wait_for_text("this peer starts alone")
        second = running.start(other.output_dir.name, "--wait-for-peers", 2)
        for peer in (first, second):
            peer.wait_for("round", lambda event: event["peers"] == 2)
        equal_digests([first, second], max(min(first.rounds()), min(second.rounds())))


def test_who_went_on_alone_is_told_that_the_others_have_gone_on_without_it(tmp_path: Path) -> None:
    """The founder is killed and comes back from its older checkpoint, when the other one is away."""
    with swarm(tmp_path) as running:
        founder, other = running.start_all(2)
        other.wait_for_round(2)
        kill(founder)
        resumed = newest_checkpoint(founder)
        other.wait_for_round(resumed + 2)
        assert other.terminate() == 0
        last = max(other.rounds())
        again = running.start(founder.output_dir.name)
        again.wait_for_round(last + 1)
        late = running.start(other.output_dir.name, "--initial-peers", again.address())
        fault = late.wait_for("fault", lambda event: event["kind"] == "branch")
        assert f"to {last} of this peer are not in the run" in fault["detail"]
        late.wait_for_text("of this peer are not in the run")
        together = late.wait_for_round(last)["round"] + 1
        for peer in (again, late):
            peer.wait_for_round(together)
        equal_digests([again, late], together)


def test_a_peer_that_slept_for_many_rounds_fetches_the_reference_and_goes_on(tmp_path: Path) -> None:
    with swarm(tmp_path, round={"inner_steps": 2}) as running:
        *others, sleeper = running.start_all(3)
        sleeper.wait_for_round(2)
        sleeper.signal_tree(signal.SIGSTOP)
        asleep_at = max(sleeper.rounds())
        try:
            others[0].wait_for_round(asleep_at + 10)
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
        founder, newcomer = running.found("--wait-for-peers", 2, "--max-rounds", 2), running.join("--max-rounds", 2)
        for peer in (founder, newcomer):
            assert peer.wait() == 0, peer.tail()
            assert [event["peers"] for event in peer.rounds().values()] == [2, 2]
        equal_digests(running.peers, 2)
