"""Which weights count as hidden matrices, in families whose routers, heads and gates differ."""

from __future__ import annotations

import re

import pytest

from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.optimiser.matrices import hidden_matrices
from tests.helpers.moe_models import random_moe

ATTENTION = {f"self_attn.{name}_proj.weight" for name in "qkvo"}
MLP = {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
SHARED_EXPERT = {name.replace("mlp.", "mlp.shared_expert.") for name in MLP}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("olmoe", ATTENTION),
        ("qwen3_moe", ATTENTION),  # its embedding is tied to the head
        ("mixtral", ATTENTION),
        # The router is a linear layer, and so is the gate of the shared expert, which has one row.
        ("hunyuan_v1_moe", ATTENTION | {name.replace("mlp.", "mlp.shared_mlp.") for name in MLP}),
        ("qwen2_moe", ATTENTION | SHARED_EXPERT),
        (
            "qwen3_next",
            ATTENTION
            | SHARED_EXPERT
            | {f"linear_attn.{name}.weight" for name in ("in_proj_ba", "in_proj_qkvz", "out_proj")},
        ),
        (
            "afmoe",
            ATTENTION
            | MLP
            | {name.replace("mlp.", "mlp.shared_experts.") for name in MLP}
            | {"self_attn.gate_proj.weight"},
        ),
    ],
)
def test_projections_are_matrices_and_embeddings_heads_routers_and_gates_are_not(
    family: str, expected: set[str]
) -> None:
    model = random_moe(family)
    found = hidden_matrices(model)
    assert {re.sub(r"model\.layers\.\d+\.", "", name) for name in found} == expected
    assert hidden_matrices(SparseModel(model, (1,)).module) == found
