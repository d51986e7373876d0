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
_FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SMALL = {**_FOUR, "moe_intermediate_size": 16, "head_dim": 8}
_SHARED = {**_SMALL, "shared_expert_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
# Families that a run can start from. Some settings are away from their defaults, so that nothing gets lost unnoticed.
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**_SMALL, "num_dense_layers": 1, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2_moe": _SMALL,
    "deepseek_v2": {**_LATENT, **_ROUTED, "moe_intermediate_size": 16, "q_lora_rank": None},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "flex_olmo": _FOUR,
    "granitemoe": {**_LOCAL, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "granitemoe_swa": _LOCAL,
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 24},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "jamba": {
        **_FOUR,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "laguna": _SMALL,
    "mellum": _SMALL,
    "mixtral": {**_LOCAL, "sliding_window": 8},
    "olmoe": {**_FOUR, "norm_topk_prob": True, "rms_norm_eps": 1e-3},
    "phimoe": _LOCAL,
    "qwen2_moe": _SHARED,
    "qwen3_5_moe_text": {**_SHARED, **_LINEAR},
    "qwen3_moe": {**_SMALL, "norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen3_next": {**_SHARED, **_LINEAR},
}
# Families that it cannot start from, and what the user is told.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gpt_oss": (
        {**_LOCAL, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        r"experts module .* is not supported: has_bias is True",
    ),
    "qwen3": ({}, r"found 'qwen3', expected a mixture of experts .*; upcycle a dense model first"),
}
# Their routers have trained buffers, which are not parameters.
BUFFERED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_LATENT, **_ROUTED, "moe_intermediate_size": 16, "q_lora_rank": 16, "n_group": 1, "topk_group": 1}
}


def random_moe(family: str, **settings: Any) -> PreTrainedModel:
    """A random model whose weights are large enough for every part to matter to the logits."""
    known = FAMILIES | BUFFERED | {name: own for name, (own, _) in REFUSED.items()}
    config = CONFIG_MAPPING[family](**_COMMON | known[family] | settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (1.0 if "norm" in name else 0.0))
    return model


def save_moe(directory: Path, family: str, max_shard_size: str = "50GB", **settings: Any) -> PreTrainedModel:
    """Saves such a model without a tokenizer; returns it."""
    model = random_moe(family, **settings)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
