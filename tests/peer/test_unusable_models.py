"""Models that cannot be trained, or are damaged: one line says what the files are, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from spes_swarm.base.errors import UserError
from spes_swarm.config.file import continued_config_path, read_config_file
from spes_swarm.model.initial_weights import load_initial_reference
from spes_swarm.model.sparse_model import layout_of
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.publishing.export import empty_model
from tests.helpers.moe_models import save_moe

pytestmark = pytest.mark.slow
torch.set_num_threads(1)

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
QUANTISED = "quantised weights cannot be trained; use the model's weights in bf16 or fp32, or dequantise it"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "olmoe"
    save_moe(path, "olmoe")
    return path


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of a sound model."""
    shutil.copytree(saved, tmp_path / "model")
    return tmp_path / "model"


def load(directory: Path) -> None:
    """What `join --initial-weights DIRECTORY` does with it."""
    file = read_config_file(continued_config_path(), str(directory))
    assert file.run is not None
    run = InitialModel.find(str(directory)).describe_run(file.run, "test", adapt=True)
    layout = layout_of(empty := empty_model(run))
    load_initial_reference(directory, layout, np.empty(layout.num_elements, np.float32), empty)


def complaint(directory: Path) -> str:
    """The line that a user sees, without the path."""
    with pytest.raises(UserError) as caught:
        load(directory)
    line = str(caught.value)
    assert "\n" not in line
    return line.replace(str(directory), "DIR")


def configured(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def changed(directory: Path, change: Callable[[str, Tensor], Tensor], **more: Tensor) -> None:
    """Changes the projections of the weights."""
    tensors = load_file(directory / WEIGHTS)
    projections = {name: change(name, tensor) for name, tensor in tensors.items() if "proj" in name}
    save_file({**tensors, **projections, **more}, directory / WEIGHTS)


def test_the_sound_model_is_loaded(model: Path) -> None:
    load(model)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX, CONFIG, "tokenizer.json", "tokenizer.model"])
def test_a_pointer_of_git_lfs(model: Path, name: str) -> None:
    (model / name).write_bytes(POINTER)
    assert complaint(model) == f"DIR/{name} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"


@pytest.mark.parametrize(
    ("cut", "advice"),
    [
        (lambda content: content[: len(content) // 2], "it is truncated or damaged at "),
        (lambda content: content[:100], "it is truncated or damaged at 100 bytes: download it again"),
        (lambda content: b"", "it is empty: download it again"),
        (lambda content: b"<!DOCTYPE html><html>404</html>", "it is not a safetensors file: download it again"),
        (lambda content: b"PK\x03\x04" + bytes(100), "it holds pickled weights, which are never loaded: convert them"),
    ],
)
def test_damaged_weights(model: Path, cut: Callable[[bytes], bytes], advice: str) -> None:
    path = model / WEIGHTS
    path.write_bytes(cut(path.read_bytes()))
    line = complaint(model)
    assert line.startswith("DIR/model.safetensors cannot be read: ")
    assert advice in line


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes"])
def test_a_configuration_of_quantised_weights(model: Path, method: str) -> None:
    configured(model, quantization_config={"quant_method": method})
    assert complaint(model).startswith(f"DIR/config.json: the weights are quantised ({method}): {QUANTISED}")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_in_eight_bits(model: Path, dtype: torch.dtype) -> None:
    changed(model, lambda name, tensor: tensor.to(dtype))
    assert f"expected F32, BF16, F16: {QUANTISED}" in complaint(model)


@pytest.mark.parametrize(
    "suffix", ["weight_scale_inv", "weight.absmax", "qweight", "weight.quant_state.bitsandbytes__nf4"]
)
def test_tensors_of_quantised_weights(model: Path, suffix: str) -> None:
    more = {f"model.layers.0.self_attn.q_proj.{suffix}": torch.ones(1)}
    changed(model, lambda name, tensor: tensor, **more)
    assert f"q_proj.{suffix} belongs to quantised weights: {QUANTISED}" in complaint(model)


def test_double_precision(model: Path) -> None:
    changed(model, lambda name, tensor: tensor.double())
    assert complaint(model).endswith(
        "is stored as F64, expected F32, BF16, F16: convert the model to bf16 or fp32 first"
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("pytorch_model.bin", "has pickled weights only, which are never loaded because they can run code: convert"),
        ("model-Q4_K_M.gguf", "has GGUF weights only: use the model that they were made from"),
        ("model-00001-of-00002.safetensors", f"has shards of weights, but no {INDEX} that lists them: download it"),
        ("adapter_config.json", r"is an adapter (LoRA), not a model: merge it into its base model first (peft: merge"),
        ("notes.txt", f"has no weights: neither {WEIGHTS} nor {INDEX}"),
    ],
)
def test_other_files_than_weights(model: Path, name: str, advice: str) -> None:
    (model / WEIGHTS).rename(model / name)
    assert complaint(model).startswith(f"DIR {advice}")


def test_an_adapter_without_a_configuration_and_a_model_below(model: Path) -> None:
    (model / "checkpoint-5").mkdir()
    (model / CONFIG).rename(model / "checkpoint-5" / CONFIG)
    assert complaint(model).endswith("it has no config.json; DIR/checkpoint-5 has one: name that directory")
    (model / "adapter_config.json").write_text("{}")
    assert complaint(model).startswith("DIR is an adapter (LoRA), not a model")


def test_a_shard_that_is_missing(model: Path) -> None:
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    names = sorted(load_file(model / WEIGHTS))
    index = {name: shards[number % 3] for number, name in enumerate(names)}
    (model / INDEX).write_text(json.dumps({"weight_map": index}))
    (model / WEIGHTS).rename(model / shards[0])
    assert complaint(model) == f"DIR lacks 2 of the 3 files that {INDEX} lists, such as {shards[1]}: download them, too"


def test_a_type_that_transformers_does_not_have(model: Path) -> None:
    configured(model, model_type="olmoe9", transformers_version="99.1.0")
    here = f"DIR/config.json: transformers {transformers.__version__} has no model type 'olmoe9' (the model was saved"
    assert complaint(model).startswith(f"{here} by 99.1.0): upgrade transformers if a newer version has it, or use a ")
    configured(model, auto_map={"AutoConfig": "configuration_x.Config"})
    assert "needs code of its own (auto_map), which is never run" in complaint(model)
