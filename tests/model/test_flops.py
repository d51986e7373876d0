"""The operations of a step: counted one product at a time, by torch's own formulas, while a real step runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.flops import ModelFlops
from spes_swarm.model.losses import LossWeights
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.gradients import Gradients

torch.set_num_threads(1)

BATCH, LENGTH = 3, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": {"num_experts": 6, "intermediate_size": 16, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "intermediate_size": 20,
        "head_dim": 12,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 6, "intermediate_size": 16, "num_experts_per_tok": 1},
    "flex_olmo": {"num_experts": 6, "intermediate_size": 16, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 12,
        "intermediate_size": 20,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {"num_local_experts": 6, "intermediate_size": 16, "num_experts_per_tok": 2},
}
COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_aten = torch.ops.aten


def grouped_mm_flops(first: Tensor, second: Tensor, *_: Any) -> int:
    """Each row meets one matrix; or, as a gradient of the matrices, each pair of rows gives one outer product."""
    rows, inner = (first.shape[0], first.shape[1]) if second.dim() == 3 else (first.shape[1], first.shape[0])
    return 2 * rows * inner * second.shape[-1]


# What torch's registry lacks.
MORE_FORMULAS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: grouped_mm_flops,
    _aten.addmm_: lambda _, first, second, **__: 2 * first.shape[0] * first.shape[1] * second.shape[1],
}


class CountedFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Adds up the operations of everything that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        inputs = {key: value for key, value in kwargs.items() if key != "out"}
        if packet in flop_registry:
            self.total += flop_registry[packet](*args, **inputs, out_val=out)
        elif packet in MORE_FORMULAS:
            self.total += MORE_FORMULAS[packet](*args, **inputs)
        return out


def counted_step(
    model_type: str, held: tuple[int, ...], kernel: str = "torch", checkpointing: str = "none", **more: Any
) -> tuple[SparseModel, int, int]:
    """Returns a model, the counted operations of a step, and the rows of the held experts."""
    settings = COMMON | SETTINGS[model_type] | more
    module = build_model(model_type, settings, seed=0, device="cpu")
    module.set_attn_implementation("eager")  # fused attention computes its scores again, which is not counted
    model = SparseModel(module, held, kernel)
    checkpoint_activations(model.module, checkpointing)
    gradients = Gradients(
        model, LossWeights(), 2, device=torch.device("cpu"), autocast=nullcontext, warn=lambda *_: None
    )
    batch_BS = np.random.default_rng(1).integers(0, 50, (BATCH, LENGTH))
    gradients.compute(batch_BS, progress=0.0)  # the first step looks for the output head, too
    model.pop_routed_tokens()
    with CountedFlops() as counted:
        gradients.compute(batch_BS, progress=0.0)
    return model, counted.total, int(model.pop_routed_tokens()[:, list(held)].sum())


@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_operations_are_those_of_a_real_step(model_type: str) -> None:
    model, counted, held_rows = counted_step(model_type, (1, 4))
    assert held_rows > 0
    assert ModelFlops.of(model, LENGTH).step(BATCH * LENGTH, held_rows).model == counted


@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_kernels_take_the_same_operations(model_type: str) -> None:
    """The plain loop has products of two matrices only, whose formula is torch's own."""
    assert counted_step(model_type, (1, 4), "loop")[1:] == counted_step(model_type, (1, 4))[1:]


@pytest.mark.parametrize("model_type", sorted(SETTINGS))
def test_what_backward_computes_again_is_not_work_of_the_model(model_type: str) -> None:
    _, counted, held_rows = counted_step(model_type, (1, 4))
    for kind in ("selective", "layers"):
        model, recomputing, rows = counted_step(model_type, (1, 4), checkpointing=kind)
        assert ModelFlops.of(model, LENGTH).step(BATCH * LENGTH, rows).model == counted
        assert rows == held_rows
        assert recomputing > counted if kind == "layers" else recomputing >= counted


def test_a_dense_layer_between_those_with_experts_is_counted() -> None:
    model, counted, held_rows = counted_step("qwen3_moe", (1, 4), mlp_only_layers=[1])
    assert ModelFlops.of(model, LENGTH).step(BATCH * LENGTH, held_rows).model == counted


def test_a_peer_without_experts_saves_the_gradients_of_their_weights() -> None:
    """A whole step is three times its forward pass; what is saved is a third of the experts' share."""
    model, _, _ = counted_step("mixtral", ())
    tokens, mixtral = BATCH * LENGTH, COMMON | SETTINGS["mixtral"]
    rows = tokens * mixtral["num_hidden_layers"] * mixtral["num_experts_per_tok"]
    none, all_rows = (ModelFlops.of(model, LENGTH).step(tokens, held_rows) for held_rows in (0, rows))
    assert all_rows.model == 3 * all_rows.forward
    weights_of_an_expert = 3 * mixtral["hidden_size"] * mixtral["intermediate_size"]
    assert all_rows.model - none.model == 2 * rows * weights_of_an_expert
