"""A trainer in rounds that leave the experts out: their live weights stay, and a restart loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from spes_swarm.storage.checkpoint import load_newest
from tests.helpers.lone_trainer import HELD, LoneTrainer, run_config
from tests.helpers.memory_swarm import memory_swarm

Make = Callable[..., LoneTrainer]
NO_MERGE = {"alpha": 0.0}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes trainers of a run whose experts take part in every third round."""
    with ExitStack() as stack:

        def make_one(name: str = "one", **round_changes: Any) -> LoneTrainer:
            run = run_config(round={"expert_every": 3, **round_changes}, merge=NO_MERGE)
            peer = LoneTrainer(tmp_path / name, run)
            stack.callback(peer.close)
            return peer

        yield make_one


def do_round(peer: LoneTrainer, steps: int, during: int = 0) -> FloatArray:
    """Steps, a round, and steps while it runs; returns the live experts just before its outcome is applied."""
    for _ in range(steps):
        peer.trainer._train_step()
    assert peer.trainer._rounds.begin(leaving=False)
    for _ in range(during):
        peer.trainer._train_step()
    before_N = experts(peer)
    peer.trainer._rounds.end()
    return before_N


def experts(peer: LoneTrainer) -> FloatArray:
    """The live weights of the held experts."""
    live_N, layout = peer.live(), peer.model.layout
    return np.concatenate([live_N[layout.expert_block(e).start : layout.expert_block(e).stop] for e in HELD])


def reference_experts(peer: LoneTrainer) -> FloatArray:
    values_N, layout = peer.network.reference.values_N, peer.model.layout
    return np.concatenate([values_N[layout.expert_block(e).start : layout.expert_block(e).stop] for e in HELD])


@pytest.mark.parametrize("overlap", [False, True])
def test_experts_keep_their_live_weights_until_they_take_part(make: Make, overlap: bool) -> None:
    peer = make(overlap=overlap)
    start_N = reference_experts(peer)
    stated = peer.statements()
    for number in (1, 2, 3):
        before_N = do_round(peer, 2, during=1 if overlap else 0)
        if number < 3:
            assert np.array_equal(experts(peer), before_N)
            assert np.array_equal(reference_experts(peer), start_N)
        else:
            np.testing.assert_allclose(experts(peer), before_N, atol=1e-6)
            assert not np.array_equal(reference_experts(peer), start_N)
    begun = [2, 5, 8] if overlap else [2, 4, 6]  # steps until each of the rounds began
    assert [tokens for tokens, _ in stated] == [128 * (to - since) for since, to in pairwise([0, *begun])]
    assert stated[0][1] < stated[1][1] < stated[2][1]
    do_round(peer, 2)
    assert stated[3][1] < stated[2][1]


def restarted(make: Make, peer: LoneTrainer, **round_changes: Any) -> LoneTrainer:
    """Another trainer, from the newest checkpoint of the first and the reference that the swarm has now."""
    reference = peer.network.reference
    checkpoint, _ = load_newest(peer.setup.checkpoints, "test", "me", peer.model.layout, set_aside=False)
    assert checkpoint is not None
    again = make("again", **round_changes)
    again.network.reference.values_N[:] = reference.values_N
    again.network.reference.finish(reference.round, list(enumerate(reference.versions)))
    again.trainer.restore(checkpoint, again.network.reference.table)
    return again


def test_a_restart_between_two_synchronisations_goes_on_exactly_where_it_was(make: Make) -> None:
    peer = make()
    do_round(peer, 2)
    peer.trainer._train_step()
    peer.trainer._saver.save()
    again = restarted(make, peer)
    assert np.array_equal(again.live(), peer.live())
    assert not np.array_equal(experts(again), reference_experts(again))
    work, before = again.trainer._learner.work, peer.trainer._learner.work
    assert (work.steps, work.tokens) == (1, 128)
    assert [work.routed_E[e] for e in HELD] == [before.routed_E[e] for e in HELD]
    for one in (peer, again):
        do_round(one, 1)
        do_round(one, 1)
    assert again.network.reference.digest == peer.network.reference.digest
    assert again.network.reference.versions[1 + HELD[0]] == 3


def test_a_peer_that_missed_a_round_without_experts_goes_on_with_its_work_on_them(make: Make) -> None:
    peer = make()
    do_round(peer, 2)
    peer.trainer._saver.save()
    saved_N, routed_E = experts(peer), peer.trainer._learner.work.routed_E.copy()
    reference = peer.network.reference
    shared = reference.layout.blocks[SHARED_BLOCK]
    reference.values_N[shared.start : shared.stop] += 0.01
    reference.finish(2, [(SHARED_BLOCK, 2)])
    again = restarted(make, peer)
    assert np.array_equal(experts(again), saved_N)
    assert np.array_equal(again.live()[shared.start : shared.stop], reference.values_N[shared.start : shared.stop])
    work = again.trainer._learner.work
    assert (work.steps, work.tokens) == (0, 0)
    assert [work.routed_E[e] for e in HELD] == [routed_E[e] for e in HELD]
    assert work.routed_E.sum() == sum(routed_E[e] for e in HELD)


@pytest.mark.slow
def test_with_the_last_round_of_a_peer_all_its_work_is_in_the_reference(tmp_path: Path) -> None:
    """Three peers leave after round 4, which would leave the experts out."""
    run = run_config(round={"expert_every": 3}, merge=NO_MERGE)
    peers = memory_swarm(tmp_path, [(0, 1, 2), (3, 4, 5), (6, 7)], run, max_rounds=4)
    threads = [threading.Thread(target=peer.trainer.run) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for peer in peers:
        peer.setup.metrics.close()
        assert peer.setup.reference_N.tobytes() == peers[0].setup.reference_N.tobytes()
        for expert in peer.model.held:
            block = peer.model.layout.expert_block(expert)
            live_N = np.empty(block.size, dtype=np.float32)
            peer.model.read_block(block.index, live_N)
            np.testing.assert_allclose(peer.setup.reference_N[block.start : block.stop], live_N, atol=1e-7)
