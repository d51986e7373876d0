"""Streamed data sets in swarms of real peers: disjoint shares, exact resumption, and pinned commits."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.local_peer import LocalPeer
from spes_swarm.data.streaming.pieces import BLOCK_EXAMPLES, Deal, Piece
from spes_swarm.storage.checkpoint import checkpoints_in
from tests.helpers.hub_join import launch_at
from tests.helpers.hub_server import HubServer
from tests.helpers.streamed_data import save_jsonl
from tests.helpers.swarm import PATIENT, REASONABLE_S, swarm

pytestmark = pytest.mark.swarm

NUM_FILES = 3


def peer_id(peer: LocalPeer) -> str:
    return str(peer.events("step")[0]["peer_id"])


def pieces_of(peer: LocalPeer, deal: Deal) -> set[Piece]:
    """The pieces that a peer has begun, as its steps report them; a step is shorter than any piece."""
    found = set()
    for step in peer.events("step"):
        epoch, place, example = deal.place_of(step["data"][0])
        if example:  # otherwise it has come to a unit and begun nothing in it
            found.add(Piece(epoch, place, example // BLOCK_EXAMPLES - 1))
    return found


def steps_by_round(peer: LocalPeer) -> dict[tuple[int, int], tuple[Any, ...]]:
    """Loss and position after each step."""
    return {(step["round"], step["step"]): (step["loss"], step["data"]) for step in peer.events("step")}


def checkpoint_rounds(peer: LocalPeer) -> dict[int, Path]:
    return {int(path.name.split("-")[1]): path for path in checkpoints_in(peer.output_dir / "checkpoints")}


def test_two_peers_divide_a_data_set_and_resume_exactly(tmp_path: Path) -> None:
    files = [range(first, first + 3000) for first in range(0, 3000 * NUM_FILES, 3000)]
    source = save_jsonl(tmp_path / "set", files)
    with swarm(tmp_path, round={**PATIENT, "inner_steps": 15}) as running:
        first, second = peers = running.start_all(2, "--data", f"hf:{source}")
        for peer in peers:
            peer.wait_for_round(3)
        for peer in peers:
            peer.kill()
        members = [peer_id(peer) for peer in peers]
        deal = Deal(0, NUM_FILES, 0.02)
        begun = [pieces_of(peer, deal) for peer in peers]
        assert all(len(pieces) > 1 for pieces in begun)
        assert not begun[0] & begun[1]
        for member, pieces in zip(members, begun, strict=True):
            assert {deal.owner(piece, members) for piece in pieces} == {member}

        # Both go on from the newest checkpoint that they have in common and that was followed by more steps.
        before = [steps_by_round(peer) for peer in peers]
        stored = [checkpoint_rounds(peer) for peer in peers]
        common = max(
            number
            for number in stored[0].keys() & stored[1].keys()
            if all(any(at == number for at, _ in steps) for steps in before)
        )
        for of_peer in stored:
            for number, path in of_peer.items():
                if number > common:
                    shutil.rmtree(path)
        cursor = json.loads((stored[0][common] / "meta.json").read_text())["cursor"]
        assert cursor["members"] == sorted(members)

        first = running.start(first.output_dir.name, "--wait-for-peers", 2, "--max-rounds", 2)
        second = running.start(
            second.output_dir.name, "--initial-peers", first.address(), "--wait-for-peers", 2, "--max-rounds", 2
        )
        for peer, earlier in zip((first, second), before, strict=True):
            assert peer.wait() == 0, peer.tail()
            assert peer.events("join")[0]["round"] == common
            again = steps_by_round(peer)
            # In the round after the checkpoint, each step has the same batch and weights as it had then.
            same = [key for key in again.keys() & earlier.keys() if key[0] == common]
            assert same
            assert min(again)[1] in {step for _, step in same}
            assert [again[key] for key in same] == [earlier[key] for key in same]
        later = [pieces_of(peer, deal) for peer in (first, second)]
        assert not (later[0] | begun[0]) & (later[1] | begun[1])


def test_a_data_set_of_the_hub_is_pinned_to_the_founders_commit(tmp_path: Path) -> None:
    old = save_jsonl(tmp_path / "old", [range(2000)])
    new = save_jsonl(tmp_path / "new", [range(5000, 9000)])
    with HubServer(tmp_path / "hub") as hub, swarm(tmp_path) as running:
        running.launch = launch_at(hub)
        commit = hub.upload(old, "user/verses", "dataset")
        founder = running.found("--data", "hf:user/verses", "--experts", 4)
        founder.wait_for_round(2)
        (event,) = founder.events("data")
        assert (event["name"], event["revision"], event["split"]) == ("user/verses", commit, "train")
        assert hub.upload(new, "user/verses", "dataset") != commit
        # The printed command needs no --data.
        printed = next(line for line in founder.text().splitlines() if "--initial-peers" in line)
        assert "--data" not in shlex.split(printed)
        joiner = running.join("--max-rounds", 1, name="joiner")
        assert joiner.wait(REASONABLE_S) == 0, joiner.tail()
        assert joiner.events("data")[0]["digest"] == event["digest"]
        # It began beyond what the founder had begun when it was started.
        known = founder.events("round")[1]["time"]
        done = max(step["data"][0] for step in founder.events("step") if step["time"] <= known)
        assert joiner.events("step")[0]["data"][0] >= done
