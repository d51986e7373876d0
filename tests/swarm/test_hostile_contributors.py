"""Members that lie about their work, or about the others, two or three at a time against four real peers.

`scripts/attack.py` measures what each of them costs, beside an honest run.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

import pytest

from scripts.testing.chaos.peer import accuses
from scripts.testing.local_peer import Event, LocalPeer
from tests.helpers.lying_contributor import launch_lying
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm

TURNS = (("opposite", "idle"), ("experts", "verdicts"), ("copied", "accusing", "tenfold"))
IGNORED = TURNS[0]  # they lie until all peers say so
LYING_ROUNDS = 3  # of the others
TOGETHER = ("--wait-for-peers", 4 + len(TURNS[0]), "--experts", 2)
# Honest swarms have a loss of 5.1 after one round, and of 3.1 after ten; at least as many are held here.
LEARNT = 3.5


def peer_id(peer: LocalPeer) -> str:
    identity: str = peer.wait_for("join")["peer_id"]
    return identity


def is_ignored(fault: Event, peer_id: str) -> bool:
    return (fault["kind"], fault["peer"]) == ("duty", peer_id) and "its work does not count" in fault["detail"]


def test_lies_about_work_and_about_others_harm_neither_the_run_nor_honest_peers(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        peers = [running.found(*TOGETHER), *(running.join(*TOGETHER) for _ in range(3))]
        last = 0
        for kinds in TURNS:
            liars: dict[str, LocalPeer] = {}
            until = () if kinds == IGNORED else ("--max-rounds", LYING_ROUNDS)
            for kind in kinds:
                running.launch = launch_lying(kind)
                liars[kind] = running.join("--experts", 2, *until, name=kind)
            if kinds == IGNORED:
                for liar, peer in product(liars.values(), peers):
                    peer.wait_for("fault", partial(is_ignored, peer_id=peer_id(liar)))
                for liar in liars.values():
                    assert liar.terminate() == 0
            else:
                for liar in liars.values():
                    last = liar.wait_for_round(liar.wait_for("round")["round"] + LYING_ROUNDS - 1)["round"]
        culprit, honest = peer_id(liars["tenfold"]), {peer_id(peer) for peer in peers}
        for peer in peers:
            peer.wait_for("fault", lambda event: (event["kind"], event["peer"]) == ("clipped", culprit))
            peer.wait_for_round(last + 1)
        for number in range(1, last + 2):
            equal_digests([peer for peer in peers if number in peer.rounds()], number)
        for peer in peers:
            assert not [fault for fault in peer.events("fault") if accuses(fault) and fault["peer"] in honest]
            assert not [event for event in peer.rounds().values() if event.get("taken_back") is not None]
        assert peers[0].wait_for_round(last + 1)["eval_loss"] < LEARNT
