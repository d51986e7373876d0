"""A run with a tokenizer that its founder made: others need neither its folder nor the Hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from spes_swarm import publish, tokenize
from spes_swarm.data.tokenizer import load_tokenizer, train_bpe
from spes_swarm.export import export_model
from tests.helpers.hub_join import launch_without_hub
from tests.helpers.repository import ROOT
from tests.helpers.swarm import Swarm

pytestmark = pytest.mark.swarm


def test_a_tokenizer_made_by_the_founder_travels_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text((ROOT / "docs/architecture.md").read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("founder", "friend", "copy"):
        (tmp_path / name).mkdir()
    own = tmp_path / "founder" / "my-bpe"
    options = ["--tokenizer", "bpe", "--bpe-vocab-size", "270", "--output", str(own), "--processes", "1"]
    assert tokenize.main([str(tmp_path / "text.txt"), *options]) == 0
    # Other peers get its files in pieces of 1 MiB.
    template = "{# " + "x" * (5 << 18) + " #}{{ messages[0].content }}"
    (own / "tokenizer" / "chat_template.jinja").write_text(template, encoding="utf-8")
    for path in own.glob("*.*"):
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())  # the shards, without the tokenizer
    train_bpe(["other words"], 260).save(tmp_path / "friend" / "my-bpe" / "tokenizer")
    expected = load_tokenizer(own / "tokenizer").digest
    settings = {"tokenizer": {"name": "my-bpe/tokenizer"}, "model": {"settings": {"vocab_size": 272}}}
    with Swarm(tmp_path, settings) as running:
        running.launch = launch_without_hub(tmp_path / "founder")
        founder = running.found("--data", "my-bpe", "--wait-for-peers", 2, "--max-rounds", 2)
        running.launch = launch_without_hub(tmp_path / "friend")
        friend = running.join("--data", tmp_path / "copy", "--wait-for-peers", 2, "--max-rounds", 2)
        assert [founder.wait(), friend.wait()] == [0, 0], founder.text() + friend.text()
        assert "other peers get" in founder.text()
        assert (friend.output_dir / "tokenizer.msgpack").stat().st_size > len(template)
        monkeypatch.chdir(tmp_path)
        assert publish.main([str(friend.output_dir), "--to", f"file:{tmp_path / 'published'}"]) == 0
        later = running.start(
            "later", "--from-hub", f"file:{tmp_path / 'published'}", "--data", tmp_path / "copy", "--max-rounds", 1
        )
        assert later.wait() == 0, later.text()
    export_model(later.output_dir, tmp_path / "exported")
    assert load_tokenizer(tmp_path / "exported").digest == expected
    loaded = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert loaded.chat_template == template
    assert loaded.decode(loaded("Train one model")["input_ids"]) == "Train one model"
