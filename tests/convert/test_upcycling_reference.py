"""Weights on disk become the initial reference of a run, whatever wrote them, or the mistake is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.config.run import ModelConfig
from spes_swarm.convert.upcycling import upcycle
from spes_swarm.model.initial_weights import load_initial_reference, model_section
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model, layout_of
from spes_swarm.protocol.consensus.layout import Layout
from tests.helpers.model_state import plain_state_dict
from tests.helpers.upcycling_models import KINDS, options, save_dense

torch.set_num_threads(1)

_COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "olmoe": _COMMON | {"num_experts": 3},
    "qwen3_moe": _COMMON | {"num_experts": 3, "moe_intermediate_size": 12, "head_dim": 8, "tie_word_embeddings": True},
    "mixtral": _COMMON | {"num_local_experts": 3},
    "flex_olmo": _COMMON | {"num_experts": 1},  # stacks of one
}


def build(model_type: str) -> PreTrainedModel:
    return build_model(model_type, SETTINGS[model_type], seed=1, device="cpu")


def load(directory: Path, layout: Layout) -> tuple[FloatArray, str]:
    reference_N = np.full(layout.num_elements, np.nan, dtype=np.float32)
    return reference_N, load_initial_reference(directory, layout, reference_N)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", SETTINGS)
@pytest.mark.parametrize("form", ["experts one by one", "experts stacked", "sharded"])
def test_round_trip(tmp_path: Path, model_type: str, form: str) -> None:
    model = build(model_type)
    layout = layout_of(model)
    flat_N = flat_from_model(model, layout)
    if form == "experts stacked":
        save_file(plain_state_dict(model, layout, flat_N), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path, max_shard_size="3KB" if form == "sharded" else "1GB")
        assert (len(list(tmp_path.glob("*.safetensors"))) > 1) is (form == "sharded")
    found_N, _ = load(tmp_path, layout)
    np.testing.assert_array_equal(found_N, flat_N)


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_any_mixture_of_both_namings(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Each stack of experts may be whole or in pieces, independently of the others."""
    directory = tmp_path_factory.mktemp("mixed")
    model = build("olmoe")
    layout = layout_of(model)
    flat_N = flat_from_model(model, layout)
    state: dict[str, Tensor] = {}
    for name, tensor in plain_state_dict(model, layout, flat_N).items():
        if not name.endswith(("gate_up_proj", "down_proj")) or data.draw(st.booleans(), label=name):
            state[name] = tensor
            continue
        experts, _, projection = name.rpartition(".")
        matrices = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for expert, values in enumerate(tensor):
            for matrix, piece in zip(matrices, values.chunk(len(matrices)), strict=True):
                state[f"{experts}.{expert}.{matrix}.weight"] = piece.clone()
    save_file(state, directory / "model.safetensors")
    np.testing.assert_array_equal(load(directory, layout)[0], flat_N)


def test_the_digest_names_the_values_not_the_files(tmp_path: Path) -> None:
    model = build("mixtral")
    layout = layout_of(model)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="3KB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "rounded")
    _, digest = load(tmp_path / "one", layout)
    assert load(tmp_path / "many", layout)[1] == digest
    rounded_N, rounded_digest = load(tmp_path / "rounded", layout)
    assert rounded_digest != digest
    np.testing.assert_array_equal(rounded_N, flat_from_model(model, layout))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_run_starts_from_an_upcycled_model(tmp_path: Path, kind: str) -> None:
    """The model section and the weights give a peer's model that says what the published mixture says."""
    upcycle(save_dense(tmp_path / "dense", kind), tmp_path / "moe", options(noise_std=0.1, max_shard_size="50KB"))
    section = ModelConfig(**model_section(tmp_path / "moe"))
    assert (section.num_experts, section.experts_per_token) == (4, 2)
    model = build_model(section.type, section.settings, seed=0, device="cpu").eval()
    sparse = SparseModel(model, held=[1, 3])
    reference_N, _ = load(tmp_path / "moe", sparse.layout)
    for block in sparse.layout.blocks:
        sparse.write_block(block.index, reference_N[block.start : block.stop])
    ids = torch.randint(0, 272, (2, 40), generator=torch.Generator().manual_seed(0))
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").eval()
    torch.testing.assert_close(sparse.module(ids).logits, published(ids).logits, rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- mistakes


EXPERT = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"lm_head.weight": None}, r"lm_head\.weight is missing$", id="shared missing"),
        pytest.param(
            {f"{EXPERT}.2.down_proj.weight": None},
            r"model\.layers\.1\.mlp\.experts\.down_proj \(expert 2\) is missing$",
            id="expert missing",
        ),
        pytest.param(
            {f"{EXPERT}.0.up_proj.weight": None},
            r"experts\.gate_up_proj \(expert 0\) is missing in part$",
            id="half missing",
        ),
        pytest.param(
            {f"{EXPERT}.3.up_proj.weight": torch.zeros(12, 16)},
            r"experts\.3\.up_proj\.weight is not a parameter of the run's model$",
            id="one expert too many",
        ),
        pytest.param({"model.norm.bias": torch.zeros(16)}, r"model\.norm\.bias is not a parameter", id="unexpected"),
        pytest.param(
            {"model.norm.weight": torch.zeros(4, 4)},
            r"model\.norm\.weight has the shape \(4, 4\), but the run's model has \(16,\)",
            id="shape",
        ),
        pytest.param(
            {f"{EXPERT}.0.gate_proj.weight": torch.zeros(16, 12)},
            r"gate_proj\.weight has the shape \(16, 12\), but the run's model has \(12, 16\)",
            id="transposed expert",
        ),
        pytest.param(
            {f"{EXPERT}.down_proj": torch.zeros(3, 16, 12)}, r"appears twice, stacked and per expert", id="twice"
        ),
        pytest.param(
            {"model.norm.weight": torch.full((16,), torch.inf)},
            r"model\.norm\.weight has NaN or infinite values",
            id="infinite",
        ),
        pytest.param(
            {"model.norm.weight": torch.zeros(16, dtype=torch.float8_e4m3fn)},
            r"model\.norm\.weight is stored as F8_E4M3, expected F32, BF16, F16",
            id="quantised",
        ),
    ],
)
def test_mistakes_name_the_tensor(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    model = build("olmoe")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = {name: value for name, value in (load_file(path) | changes).items() if value is not None}
    save_file(state, path)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, layout_of(model))


def test_weights_that_contradict_tied_embeddings(tmp_path: Path) -> None:
    model = build("qwen3_moe")
    layout = layout_of(model)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, path)
    np.testing.assert_array_equal(load(tmp_path, layout)[0], flat_from_model(model, layout))
    state["lm_head.weight"][-1, -1] += 1
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(tmp_path, layout)


def test_one_tensor_in_two_files(tmp_path: Path) -> None:
    model = build("olmoe")
    model.save_pretrained(tmp_path, max_shard_size="3KB")
    one, other = sorted(tmp_path.glob("*.safetensors"))[:2]
    save_file(load_file(one) | load_file(other), one)
    with pytest.raises(CheckpointError, match="is also in another file"):
        load(tmp_path, layout_of(model))


def test_a_vector_of_another_size_is_a_programming_error(tmp_path: Path) -> None:
    layout = layout_of(build("olmoe"))
    with pytest.raises(ValueError, match="expected float32"):
        load_initial_reference(tmp_path, layout, np.zeros(layout.num_elements + 1, dtype=np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"bits": 4}}, r"config\.json: the weights are quantised \(how is unknown\): quant"),
        ({"model_type": "olmoes"}, r"transformers 5\.\S+ has no model type 'olmoes'.*: upgrade transformers"),
    ],
)
def test_what_a_swarm_does_not_accept(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    build("olmoe").config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    assert ModelConfig(**model_section(tmp_path)).num_experts == 3
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        model_section(tmp_path)


def test_what_transformers_does_not_use_is_left_out(tmp_path: Path) -> None:
    """Published configurations name code that comes with them, and settings of other implementations."""
    build("olmoe").config.save_pretrained(tmp_path)
    wanted, path = model_section(tmp_path), tmp_path / "config.json"
    others = {"auto_map": {"AutoModel": "evil.Model"}, "number_of_heads": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | others))
    assert model_section(tmp_path) == wanted


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        model_section(tmp_path / "nowhere")
    for content in ("[1]", "{}", "{", '{"model_type": 3}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(
            CheckpointError, match=r"config\.json (cannot be read|has no model_type|is not a JSON object)"
        ):
            model_section(tmp_path)
