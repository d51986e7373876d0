"""A run that begins from an upcycled model: the founder has the weights, the others get them from the swarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from scripts.testing.local_peer import LocalPeer
from spes_swarm.convert.upcycling import upcycle
from spes_swarm.model.initial_weights import load_initial_reference, model_section
from spes_swarm.model.sparse_model import build_model, layout_of
from tests.helpers.swarm import Swarm
from tests.helpers.upcycling_models import options, save_dense

pytestmark = pytest.mark.swarm


def founded(running: Swarm, directory: Path, *arguments: object) -> LocalPeer:
    return running.found("--initial-weights", directory, "--experts", 2, *arguments)


def test_an_upcycled_model_trains_in_a_swarm(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture"
    upcycle(save_dense(tmp_path / "dense", "qwen3"), mixture, options(noise_std=0.0))
    section = model_section(mixture)
    layout = layout_of(build_model(section["type"], section["settings"], 0, "meta", on_meta=True))
    digest = load_initial_reference(mixture, layout, np.empty(layout.num_elements, dtype=np.float32))
    with Swarm(
        tmp_path, {"model": section, "training": {"learning_rate": 3e-3}, "round": {"inner_steps": 10}}
    ) as running:
        founder = founded(running, mixture, "--wait-for-peers", 2)
        other = running.join("--wait-for-peers", 2, "--experts", 2)
        peers = [founder, other]
        for peer in peers:
            peer.wait_for_round(6)
        rounds: list[dict[int, Any]] = [peer.rounds() for peer in peers]
        assert rounds[0][6]["digest"] == rounds[1][6]["digest"]
        assert rounds[0][6]["eval_loss"] < rounds[0][1]["eval_loss"] - 0.1
        assert rounds[0][6]["experts_covered"] == 4
        for peer in peers:
            assert peer.terminate() == 0
    manifest = yaml.safe_load((founder.output_dir / "manifest.json").read_text())
    assert digest in bytes.fromhex(manifest["manifest"]).decode()


def test_a_founder_that_lost_everything_needs_the_same_weights_again(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    dense = save_dense(tmp_path / "dense", "qwen3")
    upcycle(dense, one, options(seed=1))
    upcycle(dense, two, options(seed=2))
    with Swarm(tmp_path, {"model": model_section(one)}) as running:
        assert founded(running, one, "--max-rounds", 1).wait() == 0
        for checkpoint in (tmp_path / "peer0" / "checkpoints").iterdir():
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()
        without = running.start("peer0", "--max-rounds", 1)
        assert without.wait() == 2
        assert "give it with --initial-weights" in without.text()
        wrong = running.start("peer0", "--initial-weights", two, "--max-rounds", 1)
        assert wrong.wait() == 2
        assert "does not have the weights" in wrong.text()
        assert "Traceback" not in wrong.text()
        assert running.start("peer0", "--initial-weights", one, "--max-rounds", 1).wait() == 0
