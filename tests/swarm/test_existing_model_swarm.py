"""Runs that start from an existing model: founded from it alone, trained, and exported to plain transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from spes_swarm.export import export_model
from spes_swarm.testing.local_peer import LocalPeer
from tests.helpers.moe_models import save_moe
from tests.helpers.repository import ROOT
from tests.helpers.swarm import Swarm

pytestmark = pytest.mark.swarm


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        yield swarm


def text(path: Path) -> Path:
    path.write_text((ROOT / "README.md").read_text(encoding="utf-8") * 2, encoding="utf-8")
    return path


def founded(running: Swarm, model: object, *arguments: object) -> LocalPeer:
    """The founder of a run with the packaged configuration: no --config."""
    return running.start("peer0", "--initial-weights", model, "--batch-size", 2, *arguments)


def check_export(peer: LocalPeer, original: PreTrainedModel, destination: Path) -> PreTrainedModel:
    """Exports the run; it is a plain model of the same architecture with trained weights. Returns it."""
    export_model(peer.output_dir, destination)
    exported: PreTrainedModel = AutoModelForCausalLM.from_pretrained(destination)
    assert type(exported) is type(original)
    weights, before = exported.state_dict(), original.state_dict()
    assert weights.keys() == before.keys()
    for name, values in before.items():
        assert weights[name].shape == values.shape
        distance = (weights[name] - values).abs().max()
        # Every tensor has moved, and none far: 50 steps of at most the learning rate, 2e-5.
        assert 0 < distance < 50 * 2e-5 * 1.1, name
    return exported


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_a_model_is_trained_further_from_its_directory(tmp_path: Path, running: Swarm, family: str) -> None:
    original = save_moe(tmp_path / "My Model", family)
    data = text(tmp_path / "text.txt")
    founder = founded(running, tmp_path / "My Model", "--data", data, "--wait-for-peers", 2, "--max-rounds", 2)
    other = running.join("--data", data, "--wait-for-peers", 2, "--batch-size", 2, "--max-rounds", 2)
    assert [founder.wait(), other.wait()] == [0, 0]
    (joined,) = founder.events("join")
    assert joined["run_id"].startswith("my-model-")
    assert joined["experts"] == [0, 1, 2, 3]
    assert founder.rounds()[1]["digest"] == other.rounds()[1]["digest"]
    exported = check_export(founder, original, tmp_path / "exported")
    with torch.no_grad():
        assert torch.isfinite(exported(input_ids=torch.arange(16)[None]).logits).all()
    assert founder.events("step")[0]["loss"] > 0
