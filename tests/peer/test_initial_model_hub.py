"""A model on a Hub as the beginning of a run: what is fetched from there, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from spes_swarm import plan
from spes_swarm.base.errors import CheckpointError, HubError
from spes_swarm.config.file import continued_config_path, read_config_file
from spes_swarm.config.run import RunConfig
from spes_swarm.data.tokenizer import load_tokenizer, train_bpe
from spes_swarm.peer.initial_model import InitialModel
from tests.helpers.hub_server import HubServer
from tests.helpers.moe_models import save_moe
from tests.helpers.repository import ROOT
from tests.helpers.swarm import REASONABLE_S

pytestmark = pytest.mark.slow
torch.set_num_threads(1)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        server.use(monkeypatch, tmp_path / "cache")
        yield server


def described(name: str) -> RunConfig:
    file = read_config_file(continued_config_path(), name)
    assert file.run is not None
    return InitialModel.find(name).describe_run(file.run, "test", adapt=True)


def fetched(directory: Path) -> set[str]:
    """Names of the files in the library's cache."""
    return {path.name for path in (directory / "cache").rglob("snapshots/*/*")}


def test_the_weights_are_fetched_after_the_run_is_described(tmp_path: Path, hub: HubServer) -> None:
    model = save_moe(tmp_path / "model", "mixtral", max_shard_size="100KB")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"pickled")
    (tmp_path / "model" / "modeling_evil.py").write_text("raise SystemExit", encoding="utf-8")
    commit = hub.upload(tmp_path / "model", "user/described")
    run = described("user/described")
    assert (run.name, run.model.type, run.model.num_experts) == ("described", "mixtral", 4)
    assert fetched(tmp_path) == {"config.json"}
    hub.fail_next("cut", match=".safetensors", fraction=0.5)  # a connection that breaks is tried again
    said: list[str] = []
    directory = InitialModel.find(f"user/described@{commit}").weights(said.append)
    names = {path.name for path in (tmp_path / "model").glob("model[-.]*")}
    assert fetched(tmp_path) == names | {"config.json"}
    configuration = InitialModel.find(f"user/described@{commit}").configuration()
    assert fetched(tmp_path) == names | {"config.json", "generation_config.json"}
    expected = (tmp_path / "model" / "generation_config.json").read_bytes()
    assert (configuration / "generation_config.json").read_bytes() == expected
    stored = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    torch.testing.assert_close(stored["lm_head.weight"], model.state_dict()["lm_head.weight"], rtol=0, atol=0)
    assert said[0] == f"fetching {len(names) - 1} weight files of user/described@{commit}, commit {commit[:7]}"


def test_its_tokenizer_is_pinned_to_the_commit(tmp_path: Path, hub: HubServer) -> None:
    """Every peer gets the founder's, though the repository's has changed since."""
    save_moe(tmp_path / "model", "olmoe")
    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 260).save(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (tmp_path / "model" / "additional_chat_templates").mkdir()
    (tmp_path / "model" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}", encoding="utf-8")
    commit = hub.upload(tmp_path / "model", "user/pinned")
    run = described("user/pinned")
    load_tokenizer(InitialModel.find("user/pinned").description()).save(tmp_path / "saved")
    templates = AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template
    assert templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert run.tokenizer.name == f"user/pinned@{commit}"
    founders = load_tokenizer(tmp_path / "model").digest
    train_bpe(["a tokenizer of other text " * 20], 262).save(tmp_path / "model")
    hub.upload(tmp_path / "model", "user/pinned")
    assert described(f"user/pinned@{commit}").tokenizer.name == run.tokenizer.name
    names = [run.tokenizer.name, "user/pinned"]
    assert digests_elsewhere(hub, names) == [founders, load_tokenizer(tmp_path / "model").digest]


def digests_elsewhere(hub: HubServer, names: list[str]) -> list[str]:
    """Digests of tokenizers as another machine loads them."""
    code = "import sys; from spes_swarm.data.tokenizer import load_tokenizer as load\n"
    code += "for name in sys.argv[1:]: print(load(name).digest)"
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        cwd=ROOT,
        env=hub.environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=REASONABLE_S,
        check=True,
    )
    return done.stdout.split()


def test_a_plan_fetches_the_configuration_only(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    save_moe(tmp_path / "model", "mixtral")
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    hub.upload(tmp_path / "model", "user/planned")
    assert plan.main(["--initial-weights", "user/planned", "--device", "cpu"]) == 0
    assert "--experts                   4\n" in capsys.readouterr().out
    assert fetched(tmp_path) == {"config.json"}


def test_pickled_weights_are_refused_before_anything_is_fetched(tmp_path: Path, hub: HubServer) -> None:
    save_moe(tmp_path / "model", "olmoe")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    hub.upload(tmp_path / "model", "user/pickled")
    with pytest.raises(CheckpointError, match="user/pickled has pickled weights only, which are never loaded"):
        described("user/pickled")
    assert fetched(tmp_path) == set()


def test_an_unknown_repository(hub: HubServer) -> None:
    with pytest.raises(HubError, match=r"user/unknown: there is no such repository.*; nor is .* a directory here"):
        described("user/unknown")


def test_an_unknown_revision(tmp_path: Path, hub: HubServer) -> None:
    save_moe(tmp_path / "model", "olmoe")
    hub.upload(tmp_path / "model", "user/revisions")
    with pytest.raises(HubError, match="user/revisions has no such revision"):
        described("user/revisions@v7")


def test_a_path_is_never_looked_up_on_the_hub() -> None:
    with pytest.raises(CheckpointError, match=r"^\./user/model: no such directory$"):
        InitialModel.find("./user/model")
