"""Which run a peer takes part in: what the user asks for must agree with the run of the output directory."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from spes_swarm.base.errors import BootstrapError, ManifestError, UserError, VersionError
from spes_swarm.base.strict import differences
from spes_swarm.config.manifest import Manifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.initial_model import InitialModel
from spes_swarm.peer.joining.run_finder import RunFinder
from spes_swarm.port.commands import Commands
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.joining import joining_context
from tests.helpers.lone_trainer import run_config
from tests.helpers.moe_models import save_moe
from tests.helpers.publications import manifest_of, packed
from tests.helpers.rounds import identity


def no_network(*command: Any, **arguments: Any) -> Any:
    raise AssertionError("nobody else is asked")


def find(
    directory: Path, run: RunConfig | None = None, *, ask: Callable[..., Any] = no_network, **settings: Any
) -> Manifest:
    """The run that a peer finds, by default alone; the directory then belongs to it."""
    directory.mkdir(exist_ok=True)
    kept = RunDirectory(directory)
    peer = PeerConfig(output_dir=str(directory), **settings)
    manifest = RunFinder(joining_context(kept, ask, identity(0), peer, run)).find().manifest
    kept.remember(manifest)
    return manifest


def test_differences_are_named_with_both_values() -> None:
    run = run_config()
    assert differences(run.to_dict(), run.to_dict(), "run") == ""
    given = run_config(round={"inner_steps": 99}, training={"learning_rate": 0.5}).to_dict()
    named = "run.training.learning_rate (0.003, given 0.5), run.round.inner_steps (10, given 99)"
    assert differences(given, run.to_dict(), "run") == named
    assert differences({"a": [1], "b": "x" * 99, "c": {"d": 1}}, {"a": [2], "b": None, "c": None}, "k", most=2) == (
        f'k.a ([2], given [1]), k.b (null, given "{"x" * 56}...), and 1 other'
    )


@pytest.fixture
def published(tmp_path: Path) -> str:
    export, publication = packed(tmp_path, 5)
    DirectoryTarget(tmp_path / "models").publish(export, publication)
    return f"file:{tmp_path / 'models'}"


def test_the_configuration_of_a_publication_may_not_be_another(tmp_path: Path, published: str) -> None:
    run = manifest_of().run
    assert find(tmp_path / "out", run, from_hub=published).run == run
    changed = dataclasses.replace(run, round=dataclasses.replace(run.round, inner_steps=99))
    for directory in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(UserError, match=r"in run\.round\.inner_steps \(10, given 99\)"):
            find(directory, changed, from_hub=published)


def test_a_publication_of_another_run_than_the_directory(tmp_path: Path, published: str) -> None:
    (tmp_path / "out").mkdir()
    other = manifest_of(name="other")
    RunDirectory(tmp_path / "out").remember(other)
    with pytest.raises(UserError, match="choose another --output-dir, or leave out --from-hub") as error:
        find(tmp_path / "out", from_hub=published)
    assert str(error.value).startswith(f"output directory {tmp_path / 'out'} belongs to run {other.run_id}, but --from")


def test_a_peer_that_comes_back_does_not_continue_alone_beside_a_swarm_that_has_upgraded(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    kept, manifest = RunDirectory(tmp_path / "out"), manifest_of()
    kept.remember(manifest)
    kept.remember_peers([f"/ip4/127.0.0.1/tcp/1/p2p/{identity(1).peer_id}"])

    def find_again(answer: Exception | None) -> str:
        def ask(command: Any, wait_s: float, **arguments: Any) -> Any:
            if command is Commands.bootstrap:
                return [identity(1).peer_id]
            assert command is Commands.fetch_manifest
            assert arguments["peers"] == [identity(1).peer_id]
            if answer is not None:
                raise answer
            return manifest

        return find(tmp_path / "out", ask=ask).run_id

    for harmless in (None, BootstrapError("not yet"), ManifestError("another run")):
        assert find_again(harmless) == manifest.run_id
    with pytest.raises(VersionError, match="upgrade"):
        find_again(VersionError("upgrade"))


@pytest.mark.slow
def test_initial_weights_are_those_of_the_run_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    save_moe(model, "olmoe")
    text.write_text("to be or not to be\n" * 500, encoding="utf-8")
    settings = {key: value for key, value in run_config().to_dict().items() if key not in ("model", "tokenizer")}
    run = InitialModel.find(str(model)).describe_run(settings, "test", adapt=True)
    founded = find(out, run, data=str(text), initial_weights=str(model))
    assert founded.run.model.initial_weights is not None

    copy, other = tmp_path / "copy", tmp_path / "other"
    shutil.copytree(model, copy)
    shutil.copytree(model, other)
    weights = load_file(other / "model.safetensors")
    weights["lm_head.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    foreign = tmp_path / "foreign"
    save_moe(foreign, "mixtral")
    assert find(out, initial_weights=str(copy)).run_id == founded.run_id
    for wrong in (other, foreign):
        with pytest.raises(UserError, match="choose another --output-dir to found a run from this model") as error:
            find(out, initial_weights=str(wrong))
        assert str(error.value).startswith(f"output directory {out} belongs to run {founded.run_id}, but ")
        assert str(wrong) in str(error.value)
    # Another model at the same path.
    shutil.copy(other / "model.safetensors", copy / "model.safetensors")
    with pytest.raises(UserError, match="does not have the weights that the run starts from"):
        find(out, initial_weights=str(copy))
    shutil.copy(model / "model.safetensors", copy / "model.safetensors")
    assert find(out, initial_weights=str(copy)).run_id == founded.run_id
    # A supervisor gives the same command again, also from another directory: the weights need not be read.
    (copy / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    for same in (str(copy), "copy", "./copy"):
        assert find(out, initial_weights=same).run_id == founded.run_id
