"""Settings that only a real peer carries from the configuration to the weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from spes_swarm.model.sparse_model import build_model, layout_of
from tests.helpers.swarm import SWARM_RUN, swarm

pytestmark = pytest.mark.swarm


def test_initial_weights_warm_up_and_decay_are_the_configured_ones(tmp_path: Path) -> None:
    # AdamW moves a weight by at most about the learning rate a step: 1e-6, next to which only decay is seen.
    peak, weight_decay, warmup = 1e-6, 1e4, 5
    training = {
        "learning_rate": peak,
        "weight_decay": weight_decay,
        "warmup_steps": warmup,
        "warmup_start_ratio": 0.5,
        "decay_norm_and_bias": True,
    }
    with swarm(tmp_path, training=training, model={"init_cutoff": 1.0}, round={"codec": "fp32"}) as running:
        peer = running.found("--experts", 8, "--max-rounds", 1)
        assert peer.wait() == 0, peer.tail()
        num_steps = len(peer.events("step"))
        (saved,) = (peer.output_dir / "checkpoints").glob("round-00000001-*")
        files = saved.glob("reference-*.safetensors")
        blocks = {name: values for file in files for name, values in load_file(file).items()}
    assert num_steps >= SWARM_RUN["round"]["inner_steps"]
    left = math.prod(
        1 - weight_decay * peak * (0.5 + 0.5 * min(step + 1, warmup) / warmup) for step in range(num_steps)
    )
    model = SWARM_RUN["model"]
    layout = layout_of(build_model(model["type"], model["settings"], 0, "cpu", on_meta=True))
    tensors = [
        (slot.shape, blocks[block.name][slot.start - block.start :][: slot.size])
        for block in layout.blocks
        for slot in block.slots
    ]
    norms = [values for shape, values in tensors if len(shape) == 1]
    matrices = [values for shape, values in tensors if len(shape) > 1]
    assert norms
    for values in norms:
        assert values == pytest.approx(left, abs=1e-4)  # they begin at 1
    # transformers draws OLMoE's weights from N(0, 0.02).
    largest = max(float(abs(values).max()) for values in matrices)
    assert largest == pytest.approx(0.02 * left, rel=1e-3)
