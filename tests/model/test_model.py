"""A sparse model against the untouched transformers model that it was made from."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.norm import replace_norms
from spes_swarm.model.sparse_model import (
    SparseModel,
    build_model,
    flat_from_model,
    layout_of,
    replace_experts,
)
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from tests.helpers.model_state import bytes_per_class, plain_state_dict

torch.set_num_threads(1)

E, D, F, V, LAYERS = 6, 16, 12, 50, 2
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,  # ten times the usual: else the experts would hardly matter
    "bos_token_id": None,
    "eos_token_id": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": COMMON | {"num_experts": E, "intermediate_size": F, "pad_token_id": None},
    "qwen3_moe": COMMON
    | {
        "num_experts": E,
        "moe_intermediate_size": F,
        "intermediate_size": 20,
        "head_dim": 8,
        "norm_topk_prob": True,
    },
    "mixtral": COMMON | {"num_local_experts": E, "intermediate_size": F},
}
MODEL_TYPES = sorted(SETTINGS)
HELD_SUBSETS = [(), (1,), (0, 4), (2, 3, 5), tuple(range(E))]
# Bytes of one expert over all layers, and of the optimiser's two moments, counted by hand: 3 F D fp32
# numbers a layer.
EXPERT_BYTES = LAYERS * 3 * F * D * 4


def build(model_type: str, seed: int = 0, **changes: Any) -> Any:
    return build_model(model_type, SETTINGS[model_type] | changes, seed, "cpu")


def token_ids(seed: int = 1) -> Tensor:
    return torch.randint(0, V, (3, 9), generator=torch.Generator().manual_seed(seed))


def transformers_loss(model: Any) -> Tensor:
    """transformers' own loss, auxiliary loss included: nothing of it is ours."""
    loss: Tensor = model(token_ids(), labels=token_ids(), output_router_logits=True).loss
    return loss


@pytest.mark.parametrize("held", HELD_SUBSETS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_loss_and_gradients_equal_those_of_the_untouched_model(
    model_type: str, held: tuple[int, ...], dtype: torch.dtype
) -> None:
    untouched = build(model_type).to(dtype)
    if dtype == torch.float64:
        # Norms compute in fp32 even then; test_norm.py compares their gradients with those of transformers' norms.
        replace_norms(untouched)
    untouched.set_experts_implementation("eager")
    sparse = SparseModel(copy.deepcopy(untouched), held)
    reference, ours = transformers_loss(untouched), transformers_loss(sparse.module)
    torch.autograd.backward(reference)
    torch.autograd.backward(ours)
    # Both compute the same products and add them in different orders. fp32: a few hundred additions of
    # values of the order of 1 (gradients reach about 1). fp64 shows that rounding is indeed the only
    # difference.
    rtol, atol = (2e-5, 2e-6) if dtype == torch.float32 else (1e-10, 1e-12)
    torch.testing.assert_close(ours, reference, rtol=rtol, atol=atol)
    named = dict(sparse.trainable_parameters())
    for name, parameter in untouched.named_parameters():
        if ".experts." not in name:
            torch.testing.assert_close(named.pop(name).grad, parameter.grad, rtol=rtol, atol=atol)
        elif held:
            grad = named.pop(name).grad
            torch.testing.assert_close(grad, parameter.grad[list(held)], rtol=rtol, atol=atol)
            assert grad is not None
            assert grad.any()
    assert not named, "nothing else is trained"


@pytest.mark.parametrize("held", HELD_SUBSETS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_memory_exists_for_exactly_shared_and_held(model_type: str, held: tuple[int, ...]) -> None:
    untouched = build(model_type)
    shared_bytes = sum(p.numel() * 4 for n, p in untouched.named_parameters() if ".experts." not in n)
    sparse = SparseModel(untouched, held)
    optimizer = torch.optim.AdamW(sparse.param_groups(weight_decay=0.1))
    torch.autograd.backward(transformers_loss(sparse.module))
    optimizer.step()
    sizes = bytes_per_class(sparse, optimizer)
    # AdamW keeps two moments of the parameter's size and a 4-byte step count for every tensor.
    num_shared = sum(".experts." not in name for name, _ in sparse.trainable_parameters())
    num_held = LAYERS * 2 if held else 0
    assert sizes == {
        "shared_parameters": shared_bytes,
        "shared_gradients": shared_bytes,
        "shared_optimizer": 2 * shared_bytes + 4 * num_shared,
        "held_parameters": len(held) * EXPERT_BYTES,
        "held_gradients": len(held) * EXPERT_BYTES,
        "held_optimizer": 2 * len(held) * EXPERT_BYTES + 4 * num_held,
        "foreign_parameters": (E - len(held)) * EXPERT_BYTES,
        "foreign_gradients": 0,
        "foreign_optimizer": 0,
    }
    # And without our own accounting: every gradient and moment in the process belongs to a trained parameter.
    trained = {id(parameter) for _, parameter in sparse.trainable_parameters()}
    assert {id(parameter) for parameter in optimizer.state} == trained
    for module in sparse.module.modules():
        for _, buffer in module.named_buffers(recurse=False):
            assert not buffer.requires_grad
            assert buffer.grad is None


def test_training_leaves_foreign_experts_alone_and_moves_the_rest() -> None:
    sparse = SparseModel(build("olmoe"), (1, 4))
    before = [np.empty(block.size, dtype=np.float32) for block in sparse.layout.blocks]
    after = [np.empty(block.size, dtype=np.float32) for block in sparse.layout.blocks]
    for block, out in zip(sparse.layout.blocks, before, strict=True):
        sparse.read_block(block.index, out)
    optimizer = torch.optim.AdamW(sparse.param_groups(0.1), lr=1e-2)
    torch.autograd.backward(transformers_loss(sparse.module))
    optimizer.step()
    for block, out in zip(sparse.layout.blocks, after, strict=True):
        sparse.read_block(block.index, out)
        changed = not np.array_equal(out, before[block.index])
        assert changed == (block.expert in (None, 1, 4)), block.name


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bf16_autocast_stays_near_fp32_with_fp32_gradients(model_type: str) -> None:
    sparse = SparseModel(build(model_type, initializer_range=0.02), (1, 4))
    exact = language_model_loss(sparse.module, token_ids(), LossWeights(), sparse.held, 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = language_model_loss(sparse.module, token_ids(), LossWeights(), sparse.held, 0.0)
    torch.autograd.backward(rounded.total)
    # bf16 keeps 8 bits; with small logits the loss is near log V, so errors of the logits hardly show.
    assert rounded.total.item() == pytest.approx(exact.total.item(), rel=5e-3)
    for name, parameter in sparse.trainable_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_gradient_checkpointing_changes_neither_gradients_nor_counts(model_type: str) -> None:
    gradients, counts = [], []
    for checkpointing in (False, True):
        sparse = SparseModel(build(model_type), (1, 4))
        sparse.module.train()
        if checkpointing:
            checkpoint_activations(sparse.module, "layers")
        loss = language_model_loss(sparse.module, token_ids(), LossWeights(), sparse.held, 0.0)
        torch.autograd.backward(loss.total)
        gradients.append({name: parameter.grad for name, parameter in sparse.trainable_parameters()})
        counts.append(sparse.pop_routed_tokens().tolist())
    assert counts[0] == counts[1]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)


def test_matrices_decay_and_vectors_do_not() -> None:
    sparse = SparseModel(build("qwen3_moe"), (1,))
    matrices, vectors = sparse.param_groups(0.1)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in vectors["params"]} == {1}
    assert {p.dim() for p in matrices["params"]} == {2, 3}
    assert len(matrices["params"]) + len(vectors["params"]) == len(list(sparse.trainable_parameters()))
    assert [group["weight_decay"] for group in sparse.param_groups(0.1, decay_vectors=True)] == [0.1, 0.1]


# The layout


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_layout_covers_every_parameter_once_and_is_the_same_on_meta(model_type: str) -> None:
    model = build(model_type)
    layout = layout_of(model)
    assert layout.num_experts == E
    assert layout.num_elements == sum(parameter.numel() for parameter in model.parameters())
    assert layout.expert_block(0).size * 4 == EXPERT_BYTES
    on_meta = build_model(model_type, SETTINGS[model_type], seed=0, device="cpu", on_meta=True)
    assert next(on_meta.parameters()).is_meta
    assert layout_of(on_meta).digest == layout.digest
    names = {slot.name for block in layout.blocks for slot in block.slots}
    assert names == {name for name, _ in model.named_parameters()}


def test_tied_weights_count_once() -> None:
    tied, untied = (build("olmoe", tie_word_embeddings=tie) for tie in (True, False))
    assert layout_of(untied).num_elements - layout_of(tied).num_elements == V * D
    assert "lm_head.weight" not in {slot.name for slot in layout_of(tied).blocks[SHARED_BLOCK].slots}


@pytest.mark.parametrize("held", HELD_SUBSETS)
def test_reading_blocks_gives_the_flat_vector_of_the_untouched_model(held: tuple[int, ...]) -> None:
    model = build("qwen3_moe")
    expected: dict[str, Any] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    flat = flat_from_model(model, layout_of(model))
    sparse = SparseModel(model, held)
    for block in sparse.layout.blocks:
        out = np.empty(block.size, dtype=np.float32)
        sparse.read_block(block.index, out)
        np.testing.assert_array_equal(out, flat[block.start : block.stop])
        for slot in block.slots:
            values = out[slot.start - block.start :][: slot.size].reshape(slot.shape)
            original = expected[slot.name] if slot.expert is None else expected[slot.name][slot.expert]
            np.testing.assert_array_equal(values, original)


@pytest.mark.parametrize("held", HELD_SUBSETS)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_writing_blocks_turns_one_model_into_another(model_type: str, held: tuple[int, ...]) -> None:
    other = build(model_type, seed=7)
    flat = flat_from_model(other, layout_of(other))
    flat.flags.writeable = False  # as the reference may be
    sparse = SparseModel(build(model_type), held)
    parameters = dict(sparse.trainable_parameters())
    for block in sparse.layout.blocks:
        sparse.write_block(block.index, flat[block.start : block.stop])
    assert all(parameter is parameters[name] for name, parameter in sparse.trainable_parameters())
    with torch.no_grad():
        torch.testing.assert_close(sparse.module(token_ids()).logits, other(token_ids()).logits, rtol=1e-4, atol=1e-4)
    out = np.empty(sparse.layout.num_elements, dtype=np.float32)
    for block in sparse.layout.blocks:
        sparse.read_block(block.index, out[block.start : block.stop])
    assert out.tobytes() == flat.tobytes()


def test_blocks_may_be_strided() -> None:
    sparse = SparseModel(build("olmoe"), (2,))
    for block in sparse.layout.blocks:
        dense = np.empty(block.size, dtype=np.float32)
        strided = np.zeros(3 * block.size, dtype=np.float32)[::3]
        sparse.read_block(block.index, dense)
        sparse.read_block(block.index, strided)
        np.testing.assert_array_equal(strided, dense)
        strided *= 2
        sparse.write_block(block.index, strided)
        sparse.read_block(block.index, dense)
        np.testing.assert_array_equal(strided, dense)


def test_wrong_arrays_are_refused() -> None:
    sparse = SparseModel(build("olmoe"), (2,))
    size = sparse.layout.blocks[1].size
    for array in (
        np.zeros(size + 1, dtype=np.float32),
        np.zeros(size),
        np.zeros((1, size), dtype=np.float32),
    ):
        with pytest.raises(ValueError, match="float32"):
            sparse.read_block(1, array)  # type: ignore[arg-type, unused-ignore]
        with pytest.raises(ValueError, match="float32"):
            sparse.write_block(1, array)  # type: ignore[arg-type, unused-ignore]
    frozen = np.zeros(size, dtype=np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        sparse.read_block(1, frozen)


def test_one_slot_can_be_written() -> None:
    sparse = SparseModel(build("olmoe"), (2,))
    for expert in (2, 3):
        slot = sparse.layout.expert_block(expert).slots[1]
        sparse.write_slot(slot, np.full(slot.shape, 7.0, dtype=np.float32))
        out = np.empty(sparse.layout.expert_block(expert).size, dtype=np.float32)
        sparse.read_block(1 + expert, out)
        assert int((out == 7.0).sum()) == slot.size


# Holding others


def test_holding_others_keeps_the_function_and_trains_the_others() -> None:
    sparse = SparseModel(build("mixtral"), (0, 4))
    before = transformers_loss(sparse.module)
    sparse.set_held((4, 5, 1))
    assert sparse.held == (1, 4, 5)
    after = transformers_loss(sparse.module)
    torch.testing.assert_close(before, after, rtol=1e-5, atol=1e-6)
    torch.autograd.backward(after)
    sizes = bytes_per_class(sparse)
    assert sizes["held_gradients"] == 3 * EXPERT_BYTES
    assert sizes["foreign_gradients"] == 0


@pytest.mark.parametrize(("before", "after"), [((0, 4), (4, 5)), ((2, 3), (1, 2, 3)), ((), (3,)), ((2, 3), ())])
def test_the_optimizer_follows_a_change_of_holdings(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    sparse = SparseModel(build("olmoe"), before)
    optimizer = torch.optim.AdamW(sparse.param_groups(0.1), lr=1e-3)
    torch.autograd.backward(transformers_loss(sparse.module))
    optimizer.step()
    name = "model.layers.1.mlp.experts.down_proj"
    moments = {}
    if before:
        state = optimizer.state[dict(sparse.trainable_parameters())[name]]
        moments = {expert: state["exp_avg"][row].clone() for row, expert in enumerate(before)}
    optimizer.zero_grad()
    sparse.set_held(after, optimizer)
    in_groups = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert {id(parameter) for parameter in sparse.module.parameters()} == in_groups
    assert {id(parameter) for parameter in optimizer.state} <= in_groups
    if before and after:
        state = optimizer.state[dict(sparse.trainable_parameters())[name]]
        assert state["exp_avg"].shape == (len(after), D, F)
        for row, expert in enumerate(sorted(after)):
            expected = moments.get(expert, torch.zeros(D, F))
            assert torch.equal(state["exp_avg"][row], expected)
            assert state["exp_avg_sq"][row].any() == (expert in before)
    torch.autograd.backward(transformers_loss(sparse.module))
    optimizer.step()
    assert bytes_per_class(sparse, optimizer)["foreign_optimizer"] == 0
    assert bytes_per_class(sparse, optimizer)["held_gradients"] == len(after) * EXPERT_BYTES


def test_routed_tokens_are_counted_in_each_layer() -> None:
    sparse = SparseModel(build("qwen3_moe"), (1,))
    chosen: list[Tensor] = []
    for layer in sparse.module.model.layers:  # type: ignore[union-attr]
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
    sparse.module.train()
    transformers_loss(sparse.module)
    counts = sparse.pop_routed_tokens()
    assert counts.dtype == np.int64
    assert counts.tolist() == [[int((c == expert).sum()) for expert in range(E)] for c in chosen]
    assert counts.sum(axis=0).tolist() == [sum(int((c == expert).sum()) for c in chosen) for expert in range(E)]
    assert counts.sum() == LAYERS * token_ids().numel() * 2
    assert sparse.pop_routed_tokens().sum() == 0


# Export


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_state_dict_loads_into_an_untouched_model(tied: bool) -> None:
    source = build("olmoe", seed=3, tie_word_embeddings=tied)
    flat = flat_from_model(source, layout_of(source))
    expected = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    with torch.no_grad():
        logits = source(token_ids()).logits
    plain = plain_state_dict(source, layout_of(source), flat, include_tied=True)
    sparse = SparseModel(source, (2,))
    state = plain_state_dict(sparse.module, sparse.layout, flat, include_tied=True)
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[name], state[name]) for name in state)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    target = build("olmoe", seed=4, tie_word_embeddings=tied)
    target.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert torch.equal(target(token_ids()).logits, logits)


def test_an_exported_state_dict_owns_its_memory_and_names_tied_weights_once() -> None:
    source = build("olmoe", tie_word_embeddings=True)
    flat = flat_from_model(source, layout_of(source))
    sparse = SparseModel(source, (2,))
    state = plain_state_dict(sparse.module, sparse.layout, flat)
    flat[:] = 0
    assert "lm_head.weight" not in state
    assert state["model.embed_tokens.weight"].any()
    assert state["model.layers.0.mlp.experts.down_proj"].shape == (E, D, F)


@pytest.mark.slow
def test_save_pretrained_and_from_pretrained_accept_the_export(tmp_path: Any) -> None:
    source = build("mixtral", seed=3)
    flat = flat_from_model(source, layout_of(source))
    with torch.no_grad():
        logits = source(token_ids()).logits
    sparse = SparseModel(build("mixtral"), (2,))
    state = plain_state_dict(sparse.module, sparse.layout, flat)
    shell = build("mixtral", seed=9)
    shell.load_state_dict(state, strict=True)
    shell.save_pretrained(tmp_path)
    loaded = type(source).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(loaded(token_ids()).logits, logits, rtol=0, atol=0)


# Building


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_random_state() -> None:
    def flat(seed: int) -> bytes:
        model = build("olmoe", seed=seed)
        return flat_from_model(model, layout_of(model)).tobytes()

    torch.manual_seed(123)
    expected_next = torch.rand(3)
    torch.manual_seed(123)
    first = flat(5)
    assert torch.equal(torch.rand(3), expected_next)
    torch.rand(100)
    assert flat(5) == first
    assert flat(6) != first


def test_models_are_fp32_with_sdpa_attention() -> None:
    model = build("olmoe")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("olmo_e", {}, "did you mean olmoe"),
        ("olmoe", {"num_expert": 4}, "did you mean num_experts"),
        ("olmoe", {"trust_remote_code": True}, "trust_remote_code"),
        ("olmoe", {"auto_map": {"AutoConfig": "evil.Config"}}, "auto_map"),
        ("olmoe", {"num_attention_heads": "many"}, "'num_attention_heads' expected int"),
        ("olmoe", {"hidden_size": -4}, "cannot build olmoe"),
        ("olmoe", {"num_attention_heads": 0}, "olmoe"),
        ("olmoe", {"rope_scaling": "yes"}, "olmoe"),
        ("vit", {}, "no causal language model"),
    ],
)
def test_impossible_settings_are_refused(model_type: str, changes: dict[str, Any], message: str) -> None:
    base = SETTINGS["olmoe"] if model_type == "olmoe" else {}
    with pytest.raises(ConfigError, match=message):
        build_model(model_type, base | changes, 0, "cpu")


def test_models_without_experts_are_refused() -> None:
    dense = nn.Sequential(nn.Linear(2, 2))
    for function in (
        layout_of,
        lambda model: replace_experts(model, ()),
        lambda model: SparseModel(model, ()),
    ):
        with pytest.raises(ConfigError, match="no experts module"):
            function(dense)


def test_replacing_returns_the_layers_in_order() -> None:
    model = build("olmoe")
    replaced = replace_experts(model, (1, 2))
    assert [layer.mlp.experts for layer in model.model.layers] == replaced
    assert all(isinstance(experts, SparseExperts) for experts in replaced)


def test_an_unknown_kernel_or_holding_leaves_the_model_untouched() -> None:
    model = build("olmoe")
    for held, kernel in (((E,), "torch"), ((0,), "fast")):
        with pytest.raises(ConfigError):
            SparseModel(model, held, kernel)
    assert not any(isinstance(module, SparseExperts) for module in model.modules())
