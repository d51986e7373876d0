"""The smallest run that exercises everything, for scripts and tests that start real peers."""

from __future__ import annotations

from typing import Any


def tiny_run(
    name: str,
    *,
    hidden_size: int = 32,
    intermediate_size: int = 32,
    training: dict[str, Any],
    round: dict[str, Any],
    merge: dict[str, Any],
    experts_per_peer: int,
    evaluation: dict[str, Any],
) -> dict[str, Any]:
    """The `run:` section of a configuration file: two layers of eight experts on bytes, in sequences of 64.

    Args:
        name: of the run.
        hidden_size: how wide the model is; sets the bytes of an exchange together with the next.
        intermediate_size: how wide an expert is.
        training: that section, but for the lengths of sequences and batches.
        round: that section; its deadlines decide how long the others wait for a peer that has stopped.
        merge: that section.
        experts_per_peer: that key.
        evaluation: that section.

    Returns:
        A new dict with every call.
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
        "round": round,
        "merge": merge,
        "experts_per_peer": experts_per_peer,
        "evaluation": evaluation,
    }
