"""Helpers of the benchmarks: models of several sizes, and rows of figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.testing.paper_config import paper_config_path
from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig

TINY = "tiny"  # its step is the baseline of memory
# Hidden size, expert's FFN, layers, heads. The names are the numbers of parameters with eight experts.
SIZES = {
    TINY: (32, 32, 1, 2),
    "1M": (96, 192, 2, 4),
    "30M": (384, 768, 4, 6),
    "300M": (768, 1536, 10, 12),
}
Row = dict[str, Any]
"""The figures of one measurement, by name."""


def quickstart_run(hidden: int, ffn: int, layers: int, heads: int, sequence_length: int) -> RunConfig:
    """Returns the run of quickstart-paper.yaml with a model of this size."""
    run = load_config(paper_config_path()).run
    assert run is not None
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": sequence_length,
    }
    return replace(
        run,
        model=replace(run.model, settings=run.model.settings | sizes),
        training=replace(run.training, sequence_length=sequence_length),
    )


def shown(value: object) -> str:
    """Formats a figure."""
    if value is None:
        return "-"
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def save(path: Path, content: object) -> None:
    """Writes results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
