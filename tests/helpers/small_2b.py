"""The paper's 2B made small enough for tests."""

from __future__ import annotations

from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from tests.helpers.repository import ROOT


def eighth_of_2b() -> RunConfig:
    """The paper's 2B with an eighth of its widths and layers, and sequences of 128."""
    run = load_config(ROOT / "configs" / "spes-2b.yaml").run
    assert run is not None
    values = run.to_dict()
    settings = values["model"]["settings"]
    for key in ("hidden_size", "intermediate_size", "vocab_size"):
        settings[key] = settings[key] // 8 // 8 * 8
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2, "eos_token_id": None}
    values["training"] |= {"sequence_length": 128, "batch_size": 4}
    return RunConfig.from_dict(values, "test")
