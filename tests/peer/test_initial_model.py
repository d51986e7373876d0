"""A run that starts from an existing model: what is written about the model, and which architectures work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import CheckpointError, ConfigError, UserError
from spes_swarm.config.file import continued_config_path, read_config_file
from spes_swarm.config.manifest import found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.data.run_tokenizer import run_tokenizer
from spes_swarm.data.tokenizer import ByteTokenizer, train_bpe
from spes_swarm.model.initial_weights import load_initial_reference
from spes_swarm.model.losses import language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_empty_model, layout_of
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.peer.join_request import draft_request
from spes_swarm.publishing.export import empty_model, split_blocks, write_model
from spes_swarm.storage.run_directory import RunDirectory
from spes_swarm.training.gradients import loss_weights
from tests.helpers.moe_models import BUFFERED, FAMILIES, REFUSED, save_moe
from tests.helpers.published_configs import PUBLISHED
from tests.helpers.rounds import identity

torch.set_num_threads(1)

IDS_BS = torch.arange(24).view(2, 12) * 11 % 256


def run_from(directory: Path, **settings: Any) -> RunConfig:
    """The run that `join --initial-weights DIRECTORY` founds."""
    file = read_config_file(continued_config_path(), str(directory))
    assert file.run is not None
    return InitialModel.find(str(directory)).describe_run({**file.run, **settings}, "test", adapt=True)


def reference_from(directory: Path, run: RunConfig) -> FloatArray:
    model = empty_model(run)
    layout = layout_of(model)
    reference_N = np.full(layout.num_elements, np.nan, dtype=np.float32)
    load_initial_reference(directory, layout, reference_N, model)
    return reference_N


def sparse_model(run: RunConfig, reference_N: FloatArray) -> SparseModel:
    """What a peer trains that holds two of the experts."""
    sparse = SparseModel(build_empty_model(run.model.type, run.model.settings), held=[0, 2])
    for block, values_N in zip(sparse.layout.blocks, split_blocks(sparse.layout, reference_N), strict=True):
        sparse.write_block(block.index, values_N)
    return sparse


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    values_BSV: torch.Tensor = model.eval()(input_ids=IDS_BS, use_cache=False).logits
    return values_BSV


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_loaded_trained_and_exported(tmp_path: Path, family: str) -> None:
    original = save_moe(tmp_path / "model", family)
    run = run_from(tmp_path / "model")
    reference_N = reference_from(tmp_path / "model", run)
    sparse = sparse_model(run, reference_N)
    torch.testing.assert_close(logits(sparse.module), logits(original), rtol=1e-4, atol=1e-5)

    loss = language_model_loss(sparse.module.train(), IDS_BS, loss_weights(run.training), sparse.held, progress=0.0)
    loss.total.backward()  # type: ignore[no-untyped-call]
    unmoved = [n for n, p in sparse.trainable_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]
    assert not [name for name in unmoved if "experts" in name]

    changed_N = reference_N + np.float32(0.01)
    manifest = found_run(run, sparse.layout.digest, identity(0))
    write_model(manifest, empty_model(run), split_blocks(sparse.layout, changed_N), _new(tmp_path / "exported"))
    exported: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert type(exported) is type(original)
    parameters = dict(exported.named_parameters())
    for name, values in original.named_parameters():
        torch.testing.assert_close(parameters[name], values + 0.01, rtol=0, atol=1e-7)


def _new(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize("family", REFUSED)
def test_another_layout_is_refused_before_its_weights_are_read(tmp_path: Path, family: str) -> None:
    save_moe(tmp_path / "model", family)
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=REFUSED[family][1]) as caught:
        run_from(tmp_path / "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", BUFFERED)
def test_a_trained_buffer_is_refused_by_name(tmp_path: Path, family: str) -> None:
    """Peers do not exchange it, so it would be lost."""
    model = save_moe(tmp_path / "model", family)
    run = run_from(tmp_path / "model")
    reference_from(tmp_path / "model", run)  # zeros are what a new model has
    dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"][2] = 0.5
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias is a buffer with values other than zero"):
        reference_from(tmp_path / "model", run)


@pytest.mark.slow
@pytest.mark.parametrize("repository", PUBLISHED)
def test_a_published_configuration_gives_the_model_whose_weights_were_published(
    tmp_path: Path, repository: str
) -> None:
    """To the last parameter, and with every setting that transformers itself takes from the file."""
    num_parameters, content = PUBLISHED[repository]
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    run = run_from(tmp_path)
    model = empty_model(run)
    assert layout_of(model).num_elements == num_parameters
    ours, theirs = model.config.to_dict(), CONFIG_MAPPING[content["model_type"]].from_dict(dict(content)).to_dict()
    differing = {key for key in ours if ours[key] != theirs[key]}
    assert differing <= {"architectures", "dtype", "pad_token_id"}


def test_what_is_written_about_a_model(tmp_path: Path) -> None:
    save_moe(tmp_path / "My_Model 7B", "olmoe", max_position_embeddings=48, pad_token_id=256)
    run = run_from(tmp_path / "My_Model 7B")
    assert run.name == "my-model-7b"
    assert (run.model.type, run.model.num_experts, run.experts_per_peer) == ("olmoe", 4, 4)
    assert run.training.sequence_length == 48
    assert run.tokenizer.name == "bytes"
    # Documents end with it, and torch does not train the embedding of a pad token.
    assert run.model.pad_token_id is None


def test_its_own_tokenizer_is_the_runs(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe", pad_token_id=7)
    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 260).save(tmp_path / "model")
    run = run_from(tmp_path / "model")
    assert run.tokenizer.name == str(tmp_path / "model")
    assert run_tokenizer(run).decode(run_tokenizer(run).encode("the fox")) == "the fox"
    assert run.model.pad_token_id is None  # 7 is a byte
    assert run_from(tmp_path / "model", tokenizer={"name": "bytes"}).tokenizer.name == "bytes"


def test_a_misspelt_directory_is_not_taken_for_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such directory in models; .* write models/mien@main"):
        InitialModel.find("models/mien")
    assert InitialModel.find("models/mine").location.path == Path("models/mine")
    assert InitialModel.find("models/mien@main").location.repo_id == "models/mien"
    assert InitialModel.find("elsewhere/model").location.repo_id == "elsewhere/model"


def test_the_bytes_tokenizer_of_an_export_needs_no_path(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe")
    ByteTokenizer().save(tmp_path / "model")
    assert run_from(tmp_path / "model").tokenizer.name == "bytes"
    # Chats need the template, and `bytes` has none.
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert run_from(tmp_path / "model").tokenizer.name == str(tmp_path / "model")


def test_bytes_need_room_in_the_vocabulary(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe", vocab_size=256, eos_token_id=None)
    with pytest.raises(ConfigError, match="vocab_size: found 256, expected at least 257"):
        run_from(tmp_path / "model")


def test_settings_of_the_user_are_not_adapted(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe")
    file = read_config_file(continued_config_path(), str(tmp_path / "model"))
    assert file.run is not None
    with pytest.raises(ConfigError, match=r"experts_per_peer: found 4096, expected 1 to 4 experts"):
        InitialModel.find(str(tmp_path / "model")).describe_run(file.run, "mine.yaml", adapt=False)


def test_a_model_section_of_the_user_is_kept(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe")
    settings = {**run_from(tmp_path / "model").model.settings, "attention_dropout": 0.1}
    run = run_from(tmp_path / "model", model={"type": "olmoe", "settings": settings})
    assert run.model.settings["attention_dropout"] == 0.1


def own_config(path: Path, **changes: Any) -> Path:
    """A configuration of the user: the packaged one with a name, and without a model unless given."""
    content = yaml.safe_load(continued_config_path().read_text(encoding="utf-8"))
    content["run"] |= {"name": "mine", "experts_per_peer": 2, **changes}
    content["run"]["training"]["sequence_length"] = 32
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def requested(directory: Path, config: Path, weights: Path | None) -> RunConfig | None:
    """What `join --config CONFIG [--initial-weights WEIGHTS] --output-dir DIRECTORY` founds or expects."""
    changes: dict[str, Any] = {"output_dir": str(directory), "initial_weights": weights and str(weights)}
    draft = draft_request(config, changes["initial_weights"], lambda peer: dataclasses.replace(peer, **changes))
    return draft.build_run()


def test_a_configuration_of_the_user_may_leave_the_model_out(tmp_path: Path) -> None:
    save_moe(tmp_path / "model", "olmoe")
    config = own_config(tmp_path / "mine.yaml")
    run = requested(tmp_path / "out", config, tmp_path / "model")
    assert run is not None
    assert (run.name, run.model.type, run.training.sequence_length, run.experts_per_peer) == ("mine", "olmoe", 32, 2)
    with pytest.raises(ConfigError, match=r"run\.model: missing"):
        requested(tmp_path / "out", config, None)
    own_config(config, experts=3)
    with pytest.raises(ConfigError, match=r"run\.experts: unknown key"):
        requested(tmp_path / "out", config, tmp_path / "model")


def test_a_run_that_continues_takes_the_model_from_its_manifest(tmp_path: Path) -> None:
    """Not from config.json, which may have changed or gone."""
    save_moe(tmp_path / "model", "olmoe")
    config = own_config(tmp_path / "mine.yaml")
    founded = requested(tmp_path / "out", config, tmp_path / "model")
    assert founded is not None
    manifest = found_run(founded, layout_of(empty_model(founded)).digest, identity(0))
    (tmp_path / "out").mkdir()
    RunDirectory(tmp_path / "out").remember(manifest)
    (tmp_path / "model" / "config.json").unlink()
    assert requested(tmp_path / "out", config, tmp_path / "model") == founded
    changed = requested(tmp_path / "out", own_config(config, name="other"), tmp_path / "model")
    assert changed == dataclasses.replace(founded, name="other")  # the finder refuses it


@pytest.mark.parametrize("pad", [-1, 272, 10**6])
def test_a_pad_token_outside_the_vocabulary_is_dropped(tmp_path: Path, pad: int) -> None:
    save_moe(tmp_path / "model", "olmoe")
    change_config(tmp_path / "model", "pad_token_id", pad)
    assert run_from(tmp_path / "model").model.pad_token_id is None


WRONG = [None, -1, 0, 10**6, 2**70, 0.5, -0.5, float("nan"), True, "x", [], [1], {"a": 1}]


def change_config(directory: Path, key: str, *values: Any) -> None:
    """Replaces a key of config.json; without a value, removes it."""
    path = directory / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content.pop(key, None)
    if values:
        content[key] = values[0]
    path.write_text(json.dumps(content), encoding="utf-8")


def attempt(directory: Path) -> str | None:
    """Everything up to the end of the first forward pass; returns what the user is told, or None if that worked."""
    try:
        run = run_from(directory)
        assert run_tokenizer(run).vocab_size <= run.model.vocab_size
        if run.model.num_parameters > 1e8:  # the plan of its memory refuses it
            return None
        sparse = sparse_model(run, reference_from(directory, run))
        language_model_loss(sparse.module.train(), IDS_BS, loss_weights(run.training), sparse.held, progress=0.0)
    except UserError as exc:
        return str(exc)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_a_broken_config_json_gives_a_run_or_one_line(tmp_path: Path, family: str) -> None:
    """Every key in turn, those that families share for the first: removed, and with nonsensical values."""
    save_moe(tmp_path, family)
    before = (tmp_path / "config.json").read_text(encoding="utf-8")
    shared = {} if family == "olmoe" else CONFIG_MAPPING["olmoe"]().to_dict()
    keys = [*json.loads(before), "quantization_config", "num_local_experts", "rope_theta", "sliding_window"]
    refused = 0
    for key in (key for key in keys if key not in shared):
        for values in ((), *((value,) for value in WRONG)):
            change_config(tmp_path, key, *values)
            said = attempt(tmp_path)
            (tmp_path / "config.json").write_text(before, encoding="utf-8")
            if said is not None:
                refused += 1
                assert "\n" not in said, (key, values)
                assert str(tmp_path) in said or "run.model" in said or "tokenizer" in said, (key, values, said)
    assert refused


@pytest.mark.parametrize("content", ["", "[]", "null", "{", '{"model_type": 3}', '{"model_type": "x"}', "[" * 10**5])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json"):
        run_from(tmp_path)
