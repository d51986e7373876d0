"""A small valid run as a user writes it, for tests of the configuration."""

from __future__ import annotations

import copy
from typing import Any

VALUES: dict[str, Any] = {
    "name": "test",
    "model": {
        "type": "olmoe",
        "settings": {
            "vocab_size": 272,
            "hidden_size": 32,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "eos_token_id": 256,
            "pad_token_id": None,
        },
    },
    "training": {
        "sequence_length": 64,
        "batch_size": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 5,
        "total_steps": 50,
    },
    "round": {"inner_steps": 5},
    "merge": {"steps": 10, "interval": 5},
    "experts_per_peer": 2,
}


def with_value(key: str, value: Any) -> dict[str, Any]:
    """VALUES with one dotted key changed."""
    values = copy.deepcopy(VALUES)
    *sections, last = key.split(".")
    target = values
    for section in sections:
        target = target.setdefault(section, {})
    target[last] = value
    return values
