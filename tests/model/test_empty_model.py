"""A model that was built without weights is the real one as soon as they are written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spes_swarm.model.sparse_model import SparseModel, build_empty_model, build_model, flat_from_model, layout_of

torch.set_num_threads(1)

SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 6, "intermediate_size": 12, "pad_token_id": 3},
    "olmoe tied": {"num_experts": 6, "intermediate_size": 12, "pad_token_id": None, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 12, "intermediate_size": 20, "head_dim": 8},
    "mixtral": {"num_local_experts": 6, "intermediate_size": 12},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 12,
        "intermediate_size": 20,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 2,
    },
}
COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_once_written_it_computes_the_same(name: str) -> None:
    model_type, settings = name.split()[0], COMMON | SETTINGS[name]
    real = build_model(model_type, settings, seed=3, device="cpu")
    layout = layout_of(real)
    flat_N = flat_from_model(real, layout)
    empty = build_empty_model(model_type, settings)
    buffers = dict(empty.named_buffers())
    for key, buffer in real.named_buffers():
        assert torch.equal(buffers[key], buffer), key
    sparse = SparseModel(empty, (1, 4))
    assert sparse.layout.digest == layout.digest
    for block in layout.blocks:
        sparse.write_block(block.index, flat_N[block.start : block.stop])
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(sparse.module(input_ids=ids).logits, real(input_ids=ids).logits)
