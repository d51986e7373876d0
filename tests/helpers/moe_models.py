"""Tiny random Mixtures-of-Experts, saved by transformers as any user's model is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

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
_QWEN = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# What could get lost on the way is away from its default.
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-3},
    "qwen3_moe": {**_QWEN, "norm_topk_prob": True, "tie_word_embeddings": True},
}


def random_moe(family: str, **settings: Any) -> PreTrainedModel:
    """A random model whose weights are large enough for every part to matter to the logits."""
    config = CONFIG_MAPPING[family](**_COMMON | FAMILIES[family] | settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if "norm" in name else 0.0))
    return model


def save_moe(directory: Path, family: str, **settings: Any) -> PreTrainedModel:
    """Saves such a model without a tokenizer; returns it."""
    model = random_moe(family, **settings)
    model.save_pretrained(directory)
    return model
