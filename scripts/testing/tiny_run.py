"""The smallest run that exercises all features, for scripts and tests that start real peers."""

from __future__ import annotations

from typing import Any


def tiny_run(
    name: str,
    *,
    hidden_size: int = 32,
    intermediate_size: int = 32,
    training: dict[str, Any],
    **others: Any,
) -> dict[str, Any]:
    """A new `run:` section of a configuration file: two layers of eight experts on bytes, in sequences of 64.

    The sizes set the bytes of an exchange; the deadlines in `round` decide how long others wait for a stopped peer. The
    `others` are the remaining settings of the section.
    """
    return {
        "name": name,
        "model": {
            "type": "olmoe",
            "settings": {
                "vocab_size": 272,
                "hidden_size": hidden_size,
                "intermediate_size": intermediate_size,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "max_position_embeddings": 64,
                "bos_token_id": None,
                "eos_token_id": 256,
                "pad_token_id": None,
            },
        },
        "training": {"sequence_length": 64, "batch_size": 2, **training},
        **others,
    }
