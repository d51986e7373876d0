"""What the initial model of a run brought is there again in every export, and generation stops where it should."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from spes_swarm.base.errors import CheckpointError, ConfigError, ManifestError
from spes_swarm.config.file import continued_config_path, read_config_file
from spes_swarm.config.manifest import Manifest, found_run, open_manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.data.corpus import open_corpus
from spes_swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from spes_swarm.model.initial_weights import load_initial_reference, with_repeated
from spes_swarm.model.sparse_model import layout_of
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.publishing.export import empty_model, split_blocks, write_model
from tests.helpers.chat_tokenizer import APPENDING, save_chat_tokenizer
from tests.helpers.moe_models import save_moe
from tests.helpers.rounds import identity

END_OF_TEXT, IM_START, IM_END = 0, 260, 261  # of save_chat_tokenizer


def write(path: Path, **changes: Any) -> None:
    """Changes keys of a JSON file, which may not exist."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(content | changes), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def manifest_from(model: Path) -> Manifest:
    """The manifest of the run that `join --initial-weights MODEL` founds, as another peer gets it."""
    file = read_config_file(continued_config_path(), str(model))
    assert file.run is not None
    run = InitialModel.find(str(model)).describe_run(file.run, "test", adapt=True)
    filled, _ = with_repeated(dataclasses.replace(run.model, initial_weights="0" * 64), model)
    layout = layout_of(empty_model(run))
    founded = found_run(dataclasses.replace(run, model=filled), layout.digest, identity(0))
    return open_manifest(founded.to_wire(), source="a peer")


def exported(manifest: Manifest, weights: Path, destination: Path) -> Path:
    """The export of a peer that has only the manifest and the weights."""
    empty = empty_model(manifest.run)
    layout = layout_of(empty)
    reference_N = np.empty(layout.num_elements, dtype=np.float32)
    load_initial_reference(weights, layout, reference_N, empty)
    destination.mkdir()
    write_model(manifest, empty, split_blocks(layout, reference_N), destination)
    return destination


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that generates IM_END first, with a chat tokenizer whose end of text is another token."""
    made = save_moe(tmp_path / "model", "olmoe", eos_token_id=END_OF_TEXT)
    with torch.no_grad():
        made.lm_head.weight.zero_()
        made.lm_head.weight[IM_END] = 1.0
        made.model.norm.weight.fill_(1.0)
        made.model.embed_tokens.weight.abs_()
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.experts.down_proj.zero_()
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    return save_chat_tokenizer(tmp_path / "model")


def test_an_export_stops_at_the_end_of_an_answer(model: Path, tmp_path: Path) -> None:
    directory = exported(manifest_from(model), model, tmp_path / "exported")
    assert read(directory / "config.json")["eos_token_id"] == [END_OF_TEXT, IM_END]
    assert read(directory / "generation_config.json")["eos_token_id"] == [END_OF_TEXT, IM_END]
    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "what is the colour of the sky?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (ids,) = loaded.generate(**inputs, max_new_tokens=9, do_sample=False).tolist()
    assert ids[inputs["input_ids"].shape[1] :] == [IM_END]
    # Before it was exported, it ran on to the limit.
    before = AutoModelForCausalLM.from_pretrained(model)
    assert before.generate(**inputs, max_new_tokens=9, do_sample=False).shape[1] == len(ids) + 8


ENDS: dict[str, tuple[Any, Any, str | None, Any]] = {  # config.json, generation_config.json, template -> export
    "a list": ([256, 257], None, None, [256, 257, END_OF_TEXT]),
    "a list with the end of text": ([257, END_OF_TEXT], None, None, [257, END_OF_TEXT]),
    "generation only": (None, [257, 256], None, [257, 256, END_OF_TEXT]),
    "both": (256, [257], None, [257, 256, END_OF_TEXT]),
    "none": (None, None, None, END_OF_TEXT),
    "the template's": (END_OF_TEXT, [IM_END, END_OF_TEXT], APPENDING, [IM_END, END_OF_TEXT]),
    "outside the vocabulary": (END_OF_TEXT, [-1, 10**6, None, "x"], None, END_OF_TEXT),
}


@pytest.mark.parametrize("case", ENDS)
def test_every_end_token_is_kept(tmp_path: Path, case: str) -> None:
    of_config, of_generation, template, expected = ENDS[case]
    save_moe(tmp_path / "model", "olmoe")
    (tmp_path / "model" / "generation_config.json").unlink()
    write(tmp_path / "model" / "config.json", eos_token_id=of_config)
    if of_generation is not None:
        write(tmp_path / "model" / "generation_config.json", eos_token_id=of_generation)
    save_chat_tokenizer(tmp_path / "model", template)
    directory = exported(manifest_from(tmp_path / "model"), tmp_path / "model", tmp_path / "exported")
    assert read(directory / "config.json")["eos_token_id"] == expected
    assert GenerationConfig.from_pretrained(directory).eos_token_id == expected


def test_ends_of_settings_for_another_tokenizer_are_left_out(tmp_path: Path) -> None:
    """A run from random weights, copied from one with the bytes tokenizer: 256 is a pair of letters here."""
    save_moe(tmp_path / "model", "olmoe", eos_token_id=256)
    save_chat_tokenizer(tmp_path / "model", None)
    manifest = manifest_from(tmp_path / "model")
    run = dataclasses.replace(manifest.run, model=dataclasses.replace(manifest.run.model, initial_weights=None))
    random = found_run(run, manifest.layout_digest, identity(0))
    directory = exported(random, tmp_path / "model", tmp_path / "exported")
    assert read(directory / "config.json")["eos_token_id"] == END_OF_TEXT


def test_what_the_initial_model_brought_is_there_again(model: Path, tmp_path: Path) -> None:
    """Also where its directory is not: a peer elsewhere has the manifest and, in a cache, the tokenizer."""
    # Some of these are invalid together, as published ones sometimes are.
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": False, "eos_token_id": [IM_END, 257], "my_own": [1]}
    write(model / "generation_config.json", **generation, _from_model_config=True, transformers_version="4.40.0")
    write(model / "config.json", pad_token_id=END_OF_TEXT, license_note="mine", my={"nested": [1, 2.5, None]})
    (model / "tokenizer.model").write_bytes(b"\0sentencepiece")
    write(model / "special_tokens_map.json", eos_token="<|endoftext|>")
    manifest = manifest_from(model)
    for name in ("config.json", "generation_config.json"):
        (model / name).unlink()
    directory = exported(manifest, model, tmp_path / "exported")
    found = read(directory / "generation_config.json")
    assert found.pop("eos_token_id") == [IM_END, 257, END_OF_TEXT]
    assert found.pop("transformers_version")
    assert found == {key: value for key, value in generation.items() if key != "eos_token_id"}
    config = read(directory / "config.json")
    assert (config["license_note"], config["my"]) == ("mine", {"nested": [1, 2.5, None]})
    assert config["pad_token_id"] == END_OF_TEXT  # null in the run, which trains every token of the text
    assert (directory / "tokenizer.model").read_bytes() == b"\0sentencepiece"
    assert read(directory / "special_tokens_map.json") == {"eos_token": "<|endoftext|>"}
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    assert (loaded.config.my, loaded.generation_config.temperature) == ({"nested": [1, 2.5, None]}, 0.6)
    # And once more.
    again = exported(manifest_from(directory), directory, tmp_path / "again")
    for path in directory.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("form", ["config", "files"])
def test_all_chat_templates_are_kept(model: Path, tmp_path: Path, form: str) -> None:
    """In one file: a publication has no subfolders."""
    templates = {"default": APPENDING, "tool_use": "{{ tools }}" + APPENDING}
    if form == "config":
        (model / "chat_template.jinja").unlink()
        entries = [{"name": name, "template": template} for name, template in templates.items()]
        write(model / "tokenizer_config.json", chat_template=entries)
    else:
        (model / "additional_chat_templates").mkdir()
        (model / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"], encoding="utf-8")
    assert AutoTokenizer.from_pretrained(model).chat_template == templates
    directory = exported(manifest_from(model), model, tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(directory).chat_template == templates
    assert read(directory / "config.json")["eos_token_id"] == [END_OF_TEXT, IM_END]
    assert all(path.is_file() for path in directory.iterdir())


@pytest.mark.parametrize("key", ["chat_template", "padding_side"])
def test_files_of_a_bytes_tokenizer_are_kept(tmp_path: Path, key: str) -> None:
    """The run's own `bytes` has neither templates nor such settings."""
    values = {"chat_template": [{"name": name, "template": APPENDING} for name in ("default", "tool_use")]}
    save_moe(tmp_path / "model", "olmoe", eos_token_id=256)
    ByteTokenizer().save(tmp_path / "model")
    write(tmp_path / "model" / "tokenizer_config.json", **{key: values.get(key, "left")})
    brought = AutoTokenizer.from_pretrained(tmp_path / "model")
    found = AutoTokenizer.from_pretrained(
        exported(manifest_from(tmp_path / "model"), tmp_path / "model", tmp_path / "exported")
    )
    assert getattr(found, key) == getattr(brought, key)


def test_an_export_tokenises_chats_as_they_were_in_training(model: Path, tmp_path: Path) -> None:
    """A tokenizer made here splits special tokens in text, which would split the marks of a template."""
    assert read(model / "tokenizer_config.json")["split_special_tokens"]
    directory = exported(manifest_from(model), model, tmp_path / "exported")
    chat = [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sky"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat}) + "\n", encoding="utf-8")
    (file,) = open_corpus(str(tmp_path / "chat.jsonl"), load_tokenizer(model), tmp_path / "cache")
    trained = np.where(file.tokens < 0, ~file.tokens, file.tokens).tolist()
    ids = AutoTokenizer.from_pretrained(directory).apply_chat_template(chat, return_dict=False)
    assert [*ids, END_OF_TEXT] == trained
    assert trained.count(IM_START) == trained.count(IM_END) == 2


def test_a_template_in_the_configuration_is_kept(model: Path, tmp_path: Path) -> None:
    (model / "chat_template.jinja").unlink()
    write(model / "tokenizer_config.json", chat_template=APPENDING)
    directory = exported(manifest_from(model), model, tmp_path / "exported")
    assert AutoTokenizer.from_pretrained(directory).chat_template == APPENDING
    brought = read(model / "tokenizer_config.json")
    del brought["split_special_tokens"]
    assert read(directory / "tokenizer_config.json") == brought


def test_what_could_run_code_or_break_the_export_is_left_out(model: Path, tmp_path: Path) -> None:
    write(model / "config.json", auto_map={"AutoModel": "evil.Model"}, _own=1, long="x" * 20_000, small="y")
    write(model / "generation_config.json", validate=0, long=list(range(9999)), infinite=float("inf"), top_k=7)
    write(model / "tokenizer_config.json", auto_map={"AutoTokenizer": "evil.Tokenizer"})
    manifest = manifest_from(model)
    assert manifest.run.model.extra_settings == {"small": "y"}
    assert manifest.run.model.generation == {"top_k": 7}
    _, left_out = with_repeated(dataclasses.replace(manifest.run.model, extra_settings={}, generation={}), model)
    assert left_out == ["auto_map", "infinite", "long", "validate"]
    directory = exported(manifest, model, tmp_path / "exported")
    assert "evil" not in "".join(path.read_text(encoding="utf-8") for path in directory.glob("*.json"))
    assert AutoModelForCausalLM.from_pretrained(directory).generation_config.top_k == 7


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("extra_settings", {"auto_map": {"AutoModel": "evil.Model"}}),
        ("extra_settings", {"to_dict": 1}),
        ("extra_settings", {"hidden_size": 1}),
        ("generation", {"validate": 1}),
        ("generation", {"trust_remote_code": True}),
        ("generation", {"long": "x" * 20_000}),
    ],
)
def test_a_founder_cannot_send_it_either(model: Path, section: str, values: dict[str, Any]) -> None:
    manifest = manifest_from(model)
    content = manifest.run.to_dict()
    content["model"][section] = values
    with pytest.raises(ConfigError, match=rf"run\.model\.{section}\.{min(values)}: not allowed"):
        RunConfig.from_dict(content, "f")
    wire = signed(manifest, content)
    with pytest.raises(ManifestError, match="not allowed"):
        open_manifest(wire, source="a peer")


def signed(manifest: Manifest, run: dict[str, Any]) -> dict[str, bytes]:
    """The manifest of a founder that does not check what it signs."""
    content = {**json.loads(manifest.data), "run": run}
    data = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return {"manifest": data, "signature": identity(0).sign(b"spes_swarm/1\0manifest\0" + data)}


def test_a_damaged_generation_config_is_named(model: Path) -> None:
    (model / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"generation_config\.json cannot be read"):
        manifest_from(model)


# Keys by which transformers 4 knows what transformers 5 calls otherwise.
OLDER = {
    "olmoe": {"rope_theta": 777.0, "num_experts": 4},
    "qwen3_moe": {"rope_theta": 777.0, "num_experts": 4},
    "mixtral": {"rope_theta": 777.0, "num_local_experts": 4},
    "deepseek_v2": {"rope_theta": 777.0, "n_routed_experts": 4},
    "ernie4_5_moe": {"rope_theta": 777.0, "moe_num_experts": 4, "moe_k": 2},
}


@pytest.mark.parametrize("family", OLDER)
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}])
def test_exports_have_the_keys_of_transformers_4(tmp_path: Path, family: str, scaling: dict[str, Any] | None) -> None:
    rope = {**(scaling or {"rope_type": "default"}), "rope_theta": 777.0}
    save_moe(tmp_path / "model", family, rope_parameters=rope)
    directory = exported(manifest_from(tmp_path / "model"), tmp_path / "model", tmp_path / "exported")
    config = read(directory / "config.json")
    assert OLDER[family].items() <= config.items()
    assert config.get("rope_scaling") == scaling
    assert AutoModelForCausalLM.from_pretrained(directory).config.rope_parameters == rope


def test_rope_parameters_are_kept_where_the_type_does_not_declare_them(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 777.0}
    save_moe(tmp_path / "model", "cohere2_moe", rope_parameters=rope)
    manifest = manifest_from(tmp_path / "model")
    assert empty_model(manifest.run).config.rope_parameters == rope
    directory = exported(manifest, tmp_path / "model", tmp_path / "exported")
    assert AutoModelForCausalLM.from_pretrained(directory).config.rope_parameters == rope
