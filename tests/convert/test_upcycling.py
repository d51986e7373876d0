"""A dense model becomes a mixture that says the same, in bounded memory, and what cannot be reproduced is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from spes_swarm.base.errors import CheckpointError, ConfigError, UserError
from spes_swarm.config.file import load_config
from spes_swarm.convert.recipes import RECIPES
from spes_swarm.convert.upcycling import compare, upcycle
from spes_swarm.data.tokenizer import ByteTokenizer
from spes_swarm.model.initial_weights import WeightDirectory
from tests.helpers.repository import ROOT
from tests.helpers.upcycling_models import KINDS, dense_model, options, save_dense

torch.set_num_threads(1)

MATRICES = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dense")
    return {kind: save_dense(root / kind, kind) for kind in KINDS}


def tensors(directory: Path) -> dict[str, Tensor]:
    with WeightDirectory(directory) as weights:
        return {name: weights.read(name) for name in weights.names}


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@torch.no_grad()
def logits(directory: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.randint(0, 272, (3, 50), generator=torch.Generator().manual_seed(7))
    result: Tensor = model(ids).logits
    return result


# ------------------------------------------------------------------------------------------------ the function


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("router_std", [0.0, 1.0])
def test_without_noise_the_logits_are_reproduced(
    dense: dict[str, Path], tmp_path: Path, kind: str, router_std: float
) -> None:
    upcycle(dense[kind], tmp_path / "moe", options(noise_std=0.0, router_std=router_std))
    expected = logits(dense[kind])
    assert expected.std() > 0.5  # else the comparison would say little
    torch.testing.assert_close(logits(tmp_path / "moe"), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_check_sees_noise(dense: dict[str, Path], tmp_path: Path, kind: str) -> None:
    exact, noisy = options(noise_std=0.0), options(noise_std=0.05)
    upcycle(dense[kind], tmp_path / "exact", exact)
    upcycle(dense[kind], tmp_path / "noisy", noisy)
    comparison = compare(dense[kind], tmp_path / "exact", exact)
    assert comparison.is_exact
    assert comparison.moe_loss == pytest.approx(comparison.dense_loss, abs=1e-5)
    assert not compare(dense[kind], tmp_path / "noisy", noisy).is_exact


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_those_that_transformers_itself_would_write(
    dense: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    upcycle(dense[kind], tmp_path / "moe", options(max_shard_size="100KB"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "moe").save_pretrained(tmp_path / "again")
    written, again = tensors(tmp_path / "moe"), tensors(tmp_path / "again")
    assert written.keys() == again.keys()
    assert all(torch.equal(written[name], again[name]) for name in again)


@pytest.mark.parametrize("kind", RECIPES)
def test_no_setting_of_the_dense_type_is_forgotten(kind: str) -> None:
    recipe = RECIPES[kind]
    dense_fields, moe_fields, general = (
        {item.name for item in dataclasses.fields(cls)}
        for cls in (CONFIG_MAPPING[kind], CONFIG_MAPPING[recipe.target], PreTrainedConfig)
    )
    assert dense_fields - moe_fields - general - {"head_dim"} == recipe.ignored | recipe.required.keys()


# --------------------------------------------------------------------------------------------------- the noise


def test_the_same_seed_gives_the_same_bytes(dense: dict[str, Path], tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        upcycle(dense["qwen3"], tmp_path / name, options(seed=seed))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    one, other = tensors(tmp_path / "a"), tensors(tmp_path / "c")
    for name in one:
        is_random = ".mlp." in name
        assert torch.equal(one[name], other[name]) is not is_random, name


@pytest.mark.slow
@settings(max_examples=10)
@given(kilobytes=st.integers(1, 400))
def test_the_weights_do_not_depend_on_the_shards(
    dense: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, kilobytes: int
) -> None:
    root = tmp_path_factory.mktemp("shards")
    upcycle(dense["llama"], root / "one", options())
    report = upcycle(dense["llama"], root / "many", options(max_shard_size=f"{kilobytes}KB"))
    assert report.num_shards == len(list((root / "many").glob("*.safetensors")))
    expected, found = tensors(root / "one"), tensors(root / "many")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.slow
def test_noise_is_normal_on_the_wanted_part_and_different_everywhere(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "qwen3", hidden_size=64, intermediate_size=512)
    upcycle(source, tmp_path / "moe", options(noise_std=0.05, noise_fraction=0.25))
    before, after = tensors(source), tensors(tmp_path / "moe")
    noise: dict[tuple[int, str, int], Tensor] = {}
    for layer, matrix, expert in itertools.product(range(2), MATRICES, range(4)):
        mlp = f"model.layers.{layer}.mlp"
        noise[layer, matrix, expert] = (
            after[f"{mlp}.experts.{expert}.{matrix}.weight"] - before[f"{mlp}.{matrix}.weight"]
        ).flatten()
    for values in noise.values():
        changed = values[values != 0]
        assert changed.numel() / values.numel() == pytest.approx(0.25, abs=0.02)
        assert float(changed.std()) == pytest.approx(0.05, rel=0.03)
        assert float(changed.mean()) == pytest.approx(0.0, abs=0.003)
    for one, other in itertools.combinations(noise.values(), 2):
        # Two independent masks of a quarter coincide on a sixteenth, and independent values never agree.
        assert float((one * other != 0).float().mean()) == pytest.approx(1 / 16, abs=0.01)
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("source_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(tmp_path: Path, source_dtype: str, dtype: str) -> None:
    source, moe = tmp_path / "dense", tmp_path / "moe"
    dense_model("llama").to(getattr(torch, source_dtype)).save_pretrained(source)
    chosen = options(noise_std=0.0, dtype=dtype)
    upcycle(source, moe, chosen)
    before, after = tensors(source), tensors(moe)
    assert {tensor.dtype for tensor in after.values()} == {getattr(torch, dtype)}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(after[name], before[name].to(getattr(torch, dtype)))
    expert = after["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    assert torch.equal(expert, before["model.layers.1.mlp.up_proj.weight"].to(getattr(torch, dtype)))
    assert json.loads((moe / "config.json").read_text())["dtype"] == dtype
    assert compare(source, moe, chosen).is_exact


# --------------------------------------------------------------------------------------------------- the files


@pytest.mark.slow
def test_a_source_in_shards_is_the_same_source(tmp_path: Path) -> None:
    one = save_dense(tmp_path / "one", "qwen3")
    many = save_dense(tmp_path / "many", "qwen3", max_shard_size="20KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    for source in (one, many):
        upcycle(source, source.with_suffix(".moe"), options())
    names = {"model.safetensors", "config.json", "generation_config.json"}
    found = [{name: contents(source.with_suffix(".moe"))[name] for name in names} for source in (one, many)]
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_tied_head_becomes_a_copy_of_the_embedding(dense: dict[str, Path], tmp_path: Path) -> None:
    redundant = save_dense(tmp_path / "redundant", "llama")
    weights = load_file(redundant / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)  # old files have it
    save_file(weights, redundant / "model.safetensors", {"format": "pt"})
    for name, source in (("plain", dense["llama"]), ("redundant-moe", redundant)):
        upcycle(source, tmp_path / name, options())
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (
        tmp_path / "redundant-moe/model.safetensors"
    ).read_bytes()
    written = tensors(tmp_path / "plain")
    assert torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    weights["lm_head.weight"][5, 3] += 1
    save_file(weights, redundant / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        upcycle(redundant, tmp_path / "wrong", options())


def test_what_else_is_in_the_directory(tmp_path: Path) -> None:
    source, moe = save_dense(tmp_path / "dense", "qwen3"), tmp_path / "moe"
    ByteTokenizer().save(source)
    (source / "generation_config.json").write_text('{"temperature": 0.25}\n')
    (source / "LICENSE").write_text("Apache-2.0\n")
    (source / "training_args.bin").write_bytes(b"pickle")
    report = upcycle(source, moe, options(max_shard_size="100KB", seed=5))
    files = contents(moe)
    assert files["generation_config.json"] == b'{"temperature": 0.25}\n'
    assert files["LICENSE"] == b"Apache-2.0\n"
    assert "training_args.bin" not in files
    assert AutoTokenizer.from_pretrained(moe)("é")["input_ids"] == list("é".encode())
    assert json.loads(files["model.safetensors.index.json"])["metadata"]["total_size"] == 4 * report.num_parameters
    assert report.num_bytes == sum(len(files[name]) for name in files if name.endswith(".safetensors"))
    provenance = json.loads(files["upcycling.json"])
    digest = hashlib.sha256((source / "model.safetensors").read_bytes()).hexdigest()
    assert provenance["source_sha256"] == {"model.safetensors": digest}
    assert (provenance["source"], provenance["seed"]) == ("someone/dense", 5)
    assert provenance["noise"] == {"distribution": "normal", "std": 0.02, "fraction": 0.5}
    assert not any(str(tmp_path).encode() in content for content in files.values())  # nothing about this machine
    config = json.loads(files["config.json"])
    assert {(moe / name).stat().st_mode & 0o777 for name in files if name.endswith(".safetensors")} == {0o644}
    assert (config["model_type"], config["architectures"]) == ("qwen3_moe", ["Qwen3MoeForCausalLM"])
    assert (config["num_local_experts"], config["num_experts_per_tok"], config["norm_topk_prob"]) == (4, 2, True)


# ------------------------------------------------------------------------------------------------ what is refused


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, **changes: Tensor | None) -> None:
    path = directory / "model.safetensors"
    weights = {name: value for name, value in (load_file(path) | changes).items() if value is not None}
    save_file(weights, path, {"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is true, which mixtral cannot express"),
        ("llama", {"mlp_bias": True}, "mlp_bias is true"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "do not use full attention"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "quantised model"),
        ("qwen3", {"model_type": "olmo"}, "LayerNorms have no weights"),
        ("qwen3", {"model_type": "olmo3"}, "sliding window"),
        ("qwen3", {"model_type": "qwen3_moe"}, "supported types: qwen3, llama, olmo2"),
        ("qwen3", {"hidden_size": "many"}, "transformers refuses it"),
        ("llama", {"num_hidden_layers": 3}, r"model\.layers\.2\.\S+ is missing"),
        ("llama", {"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is not a parameter of a LlamaForCausalLM"),
        ("qwen3", {"intermediate_size": 40}, r"\S+_proj\.weight has the shape \S+ \S+ expected"),
    ],
)
def test_configurations_that_cannot_be_reproduced(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    source = save_dense(tmp_path / "dense", kind)
    edit_config(source, **changes)
    with pytest.raises(UserError, match=message):
        upcycle(source, tmp_path / "moe", options())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": None}, r"lm_head\.weight is missing"),
        ({"model.norm.bias": torch.zeros(32)}, r"model\.norm\.bias is not a parameter"),
        ({"model.norm.weight": torch.zeros(31)}, r"model\.norm\.weight has the shape \(31,\), expected \(32,\)"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}, r"model\.norm\.weight is stored as I8"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, changes: dict[str, Tensor | None], message: str) -> None:
    source = save_dense(tmp_path / "dense", "qwen3")
    edit_weights(source, **changes)
    with pytest.raises(CheckpointError, match=message):
        upcycle(source, tmp_path / "moe", options())


@pytest.mark.slow
def test_directories_that_cannot_be_used(dense: dict[str, Path], tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "qwen3")
    with pytest.raises(CheckpointError, match="no such directory"):
        upcycle(tmp_path / "nowhere", tmp_path / "moe", options())
    with pytest.raises(UserError, match="exists and is not empty"):
        upcycle(dense["qwen3"], source, options())
    with (source / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        upcycle(source, tmp_path / "moe", options())
    torch.save({}, source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickled weights only, which are never loaded"):
        upcycle(source, tmp_path / "moe", options())
    (source / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        upcycle(source, tmp_path / "moe", options())
    for index in ("[]", '{"weight_map": {}}', '{"weight_map": {"a": "../dense/model.safetensors"}}'):
        (source / "model.safetensors.index.json").write_text(index)
        with pytest.raises(CheckpointError, match="is not an index of safetensors"):
            upcycle(source, tmp_path / "moe", options())
    (source / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"it has no config\.json"):
        upcycle(source, tmp_path / "moe", options())
    assert not (tmp_path / "moe").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts: found 0"),
        ({"top_k": 5}, "top_k: found 5, expected at most 4"),
        ({"noise_fraction": 1.5}, "noise_fraction: found 1.5"),
        ({"noise_std": float("nan")}, "noise_std: found nan"),
        ({"source_name": "/home/somebody/model"}, "source_name: found"),
        ({"max_shard_size": "2 GiBs"}, "max_shard_size: found '2 GiBs'"),
    ],
)
def test_impossible_options(dense: dict[str, Path], tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upcycle(dense["qwen3"], tmp_path / "moe", options(**changes))
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_nothing(tmp_path: Path) -> None:
    source = save_dense(tmp_path / "dense", "qwen3")
    (source / "LICENSE").symlink_to("/proc/self/mem")  # a file that cannot be copied, after the weights are written
    (tmp_path / "moe").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        upcycle(source, tmp_path / "moe", options())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "moe"]
    assert not any((tmp_path / "moe").iterdir())


# ---------------------------------------------------------------------------------------- memory, command line

_MEASURE = """
import re, sys
from pathlib import Path
import torch
from spes_swarm.convert.upcycling import upcycle
from tests.helpers.upcycling_models import options

def resident(key):
    return 1024 * int(re.search(rf"{key}:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
small, large, out = map(Path, sys.argv[1:])
upcycle(small, out / "small", options(experts=8))  # whatever is loaded late is loaded now
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets the peak: proc_pid_clear_refs(5)
report = upcycle(large, out / "large", options(experts=8, max_shard_size="50MB"))
print(report.num_bytes, report.num_shards, report.largest_shard, resident("VmHWM") - before)
"""


@pytest.mark.slow
def test_memory_is_a_shard_and_a_tensor(dense: dict[str, Path], tmp_path: Path) -> None:
    geometry: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    large = save_dense(tmp_path / "large", "llama", **geometry, head_dim=64)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, dense["llama"], large, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    num_bytes, num_shards, largest_shard, peak = map(int, done.stdout.split())
    largest_input = 512 * 2048 * 4
    assert num_bytes > 200e6
    assert num_shards >= 4
    assert peak < 1.5 * largest_shard + largest_input


@pytest.mark.slow
def test_command_line(tmp_path: Path, command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    source, moe, config = save_dense(tmp_path / "dense", "qwen3"), tmp_path / "My Mixture", tmp_path / "run.yaml"
    ByteTokenizer().save(source)
    capsys.readouterr()
    options = ["--noise-std", "0", "--check", "--write-config", str(config)]
    assert command([str(source), str(moe), *options]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    rows = dict(line.split(maxsplit=1) for line in said.out.splitlines() if not line.startswith("peak"))
    assert rows["model"].startswith("qwen3_moe, ")
    assert rows["tensors"] == "77"
    assert "peak MiB" in said.out
    assert "check: logits differ by at most" in said.out
    run = load_config(config).run
    assert run is not None
    assert (run.name, run.tokenizer.name) == ("my-mixture", "bytes")
    assert (run.model.num_experts, run.model.experts_per_token, run.model.max_sequence_length) == (8, 2, 64)
    assert str(tmp_path) not in config.read_text()
    assert command([str(source), str(moe)]) == 2
    assert capsys.readouterr().err == f"upcycle: {moe} exists and is not empty; choose another destination\n"


def test_command_line_mistakes(
    command: Callable[[list[str]], int], dense: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (
        [dense["qwen3"], tmp_path / "moe", "--router-init", "uniform"],
        [dense["qwen3"], tmp_path / "moe", "--router-init", "normal:wide"],
        [dense["qwen3"], tmp_path / "moe", "--tokenizer", "bytes"],
        [dense["qwen3"], tmp_path / "moe", "--write-config", tmp_path / "run.yaml"],  # which tokenizer?
        [dense["qwen3"], tmp_path / "moe", "--write-config", tmp_path / "nowhere" / "run.yaml"],
        [tmp_path / "nothing", tmp_path / "moe"],
    ):
        assert command([str(argument) for argument in arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("upcycle: ")
    assert list(tmp_path.iterdir()) == []
