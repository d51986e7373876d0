"""Tiny dense models on disk, for the tests of upcycling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from spes_swarm.convert.recipes import UpcyclingOptions

_COMMON: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
# Whatever could get lost on the way to the mixture is away from its default.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "attention_bias": True, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
    "llama": {
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e3,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "olmo2": {"rms_norm_eps": 1e-3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e3}},
}


def dense_model(kind: str, **settings: Any) -> PreTrainedModel:
    """A random model whose weights are large enough for every part to matter to the logits."""
    config = CONFIG_MAPPING[kind](**_COMMON | KINDS.get(kind, {}) | settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2 + (1.0 if "norm" in name else 0.0))
    return model


def save_dense(directory: Path, kind: str, max_shard_size: str = "50GB", **settings: Any) -> Path:
    dense_model(kind, **settings).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


def options(**changes: Any) -> UpcyclingOptions:
    return UpcyclingOptions(**{"experts": 4, "top_k": 2, "source_name": "someone/dense", **changes})
