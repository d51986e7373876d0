"""NaN and infinite losses: the peer recovers where it can, and otherwise reports why it cannot."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from scripts.testing.local_peer import LocalPeer
from spes_swarm.base.errors import DivergenceError
from spes_swarm.training.health.divergence import DivergenceGuard
from tests.helpers.poisoned_join import launch_poisoned
from tests.helpers.swarm import equal_digests, swarm


def test_single_overflows_are_passed_over() -> None:
    guard = DivergenceGuard()
    for _ in range(100):
        assert not any(guard.record_bad_step() for _ in range(4))
        guard.stepped()


@pytest.mark.slow
def test_after_five_in_a_row_the_peer_begins_again_and_after_three_beginnings_it_gives_up() -> None:
    guard = DivergenceGuard()
    restarts = [5, 10, 15]
    assert [step for step in range(1, 20) if guard.record_bad_step()] == restarts
    with pytest.raises(DivergenceError, match="learning_rate"):
        guard.record_bad_step()


def test_a_round_without_a_new_beginning_forgives_what_was() -> None:
    guard = DivergenceGuard()
    for _ in range(10):
        guard.restart()
        guard.restart()
        guard.committed()
        guard.committed()


def test_a_peer_that_begins_again_in_every_round_gets_nowhere() -> None:
    """Others go on committing, and a round that was under way when it gave up its weights may commit, too."""
    guard = DivergenceGuard()
    for _ in range(3):
        guard.restart()
        guard.committed()
    with pytest.raises(DivergenceError):
        guard.restart()


@pytest.mark.swarm
def test_a_peer_whose_weights_are_spoilt_goes_back_to_the_reference(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        other = running.found("--experts", 4, "--wait-for-peers", 2)
        common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1", "--experts", "4"]
        arguments = [*common, "--initial-peers", other.address(), "--wait-for-peers", "2"]
        with LocalPeer(tmp_path / "spoilt", arguments, launch_poisoned(23)) as spoilt:
            began_again = spoilt.wait_for("fault", lambda e: e["kind"] == "diverged")
            at = max(spoilt.rounds(), default=0)
            back = spoilt.wait_for("round", lambda e: e["round"] > at + 1 and e["peers"] == 2)
            other.wait_for_round(back["round"])
            equal_digests([other, spoilt], back["round"])
            assert began_again["detail"] in spoilt.text()
            assert math.isfinite(back["train_loss"])
            assert [e["kind"] for e in spoilt.events("fault")].count("diverged") == 1
            assert not [e for e in other.events("fault") if e["kind"] == "nonfinite"]  # nothing of it was ever sent


@pytest.mark.swarm
def test_a_run_that_cannot_work_ends_with_the_reason_and_keeps_a_finite_reference(tmp_path: Path) -> None:
    with swarm(tmp_path, training={"learning_rate": 1e30, "warmup_steps": 40}, round={"inner_steps": 4}) as running:
        peer = running.found()
        assert peer.wait() == 2
        assert "training diverges" in peer.text()
        assert "learning_rate" in peer.text()
        assert "Traceback" not in peer.text()
        for saved in (peer.output_dir / "checkpoints").glob("round-*/reference-*.safetensors"):
            assert all(np.isfinite(values).all() for values in load_file(saved).values())
