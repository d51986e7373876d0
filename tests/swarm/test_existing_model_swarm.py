"""Runs that start from an existing model: founded from it alone, trained, and exported to plain transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from scripts.testing.local_peer import LocalPeer
from spes_swarm.config.file import continued_config_path
from spes_swarm.data.tokenizer import train_bpe
from spes_swarm.export import export_model
from tests.helpers.chat_tokenizer import save_chat_tokenizer
from tests.helpers.hub_join import launch_at
from tests.helpers.hub_server import HubServer
from tests.helpers.moe_models import save_moe
from tests.helpers.repository import ROOT
from tests.helpers.swarm import Swarm

pytestmark = pytest.mark.swarm


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Swarm]:
    with Swarm(tmp_path) as swarm:
        yield swarm


def text(path: Path) -> Path:
    path.write_text((ROOT / "docs/architecture.md").read_text(encoding="utf-8"), encoding="utf-8")
    return path


def founded(running: Swarm, model: object, *arguments: object) -> LocalPeer:
    """The founder of a run with the packaged configuration: no --config."""
    return running.start("peer0", "--initial-weights", model, "--batch-size", 2, *arguments)


def check_export(destination: Path, original: PreTrainedModel) -> PreTrainedModel:
    """Loads an export: a plain model of the same architecture, with trained weights."""
    exported: PreTrainedModel = AutoModelForCausalLM.from_pretrained(destination)
    assert type(exported) is type(original)
    weights, before = exported.state_dict(), original.state_dict()
    assert weights.keys() == before.keys()
    for name, values in before.items():
        assert weights[name].shape == values.shape
        distance = (weights[name] - values).abs().max()
        # Every tensor has moved, and none far: 50 steps of at most the learning rate, 2e-5.
        assert 0 < distance < 50 * 2e-5 * 1.1, name
    return exported


def test_a_model_is_trained_further_from_its_directory(tmp_path: Path, running: Swarm) -> None:
    original = save_moe(tmp_path / "My Model", "olmoe")
    data = text(tmp_path / "text.txt")
    founder = founded(running, tmp_path / "My Model", "--data", data, "--wait-for-peers", 2, "--max-rounds", 2)
    other = running.join("--data", data, "--wait-for-peers", 2, "--batch-size", 2, "--max-rounds", 2)
    assert [founder.wait(), other.wait()] == [0, 0]
    (joined,) = founder.events("join")
    assert joined["run_id"].startswith("my-model-")
    assert joined["experts"] == [0, 1, 2, 3]
    assert founder.rounds()[1]["digest"] == other.rounds()[1]["digest"]
    export_model(founder.output_dir, tmp_path / "exported")
    exported = check_export(tmp_path / "exported", original)
    with torch.no_grad():
        assert torch.isfinite(exported(input_ids=torch.arange(16)[None]).logits).all()
    assert founder.events("step")[0]["loss"] > 0


def test_a_model_is_trained_further_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = save_moe(tmp_path / "model", "qwen3_moe", max_shard_size="100KB")
    train_bpe([text(tmp_path / "text.txt").read_text(encoding="utf-8")], 270).save(tmp_path / "model")
    with HubServer(tmp_path / "hub") as hub:
        (tmp_path / "model" / "modeling_evil.py").write_text("raise SystemExit('code of a model was run')")
        first = hub.upload(tmp_path / "model", "user/Tiny-MoE")
        with Swarm(tmp_path) as running:
            running.launch = launch_at(hub)
            founder = founded(running, f"user/Tiny-MoE@{first}", "--data", tmp_path / "text.txt", "--max-rounds", 2)
            assert founder.wait() == 0, founder.text()
            # The files are in the library's cache; only safetensors, configuration and tokenizer were fetched.
            assert list((tmp_path / "hub" / "home").rglob("*.safetensors"))
            assert not list((tmp_path / "hub" / "home").rglob("*.py"))
            hub.use(monkeypatch, tmp_path / "hub" / "home" / "hub")
            export_model(founder.output_dir, tmp_path / "exported")
    check_export(tmp_path / "exported", original)
    (joined,) = founder.events("join")
    assert joined["run_id"].startswith("tiny-moe-")
    assert f"weight files of user/Tiny-MoE@{first}, commit {first[:7]}" in founder.text()


def generated(directory: Path, question: str, answer: str) -> str:
    """How an exported model continues the beginning of an answer, with plain transformers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) + answer
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :]))


def test_a_model_is_fine_tuned_on_conversations(tmp_path: Path, running: Swarm) -> None:
    """Questions are random letters and answers always the same: only the answers can be learned, and they are."""
    save_moe(tmp_path / "model", "qwen3_moe")
    save_chat_tokenizer(tmp_path / "model")
    rng = random.Random(0)
    with (tmp_path / "chat.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(300):
            question = "".join(rng.choices("abcdefghijklmnop", k=20))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "the sky is blue"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    settings = yaml.safe_load(continued_config_path().read_text(encoding="utf-8"))
    settings["run"] |= {"experts_per_peer": 4}
    settings["run"]["training"] |= {"sequence_length": 64, "learning_rate": 1e-2, "warmup_steps": 5}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    arguments = ["--config", tmp_path / "mine.yaml", "--data", tmp_path / "chat.jsonl", "--max-rounds", 4]
    founder = founded(running, tmp_path / "model", *arguments)
    assert founder.wait() == 0, founder.text()
    assert "300 conversations tokenised" in founder.text()
    # With a loss on the questions, too, it would stay above 1.5: two thirds of the tokens, log(16) nats for most.
    assert founder.rounds()[4]["eval_loss"] < 0.3
    assert founder.events("step")[0]["loss"] > 3
    export_model(founder.output_dir, tmp_path / "exported")
    template = (tmp_path / "model" / "chat_template.jinja").read_text(encoding="utf-8")
    assert (tmp_path / "exported" / "chat_template.jinja").read_text(encoding="utf-8") == template
    # The end of the answer, which is not the tokenizer's end of text; it would go on to the limit.
    assert generated(tmp_path / "exported", question, "the sky is blue") == "<|im_end|>"
    # A run that continues needs neither the section nor the settings of the model again.
    assert founded(running, tmp_path / "model", *arguments[:4], "--max-rounds", 1).wait() == 0
