"""Configuration files: YAML means what it looks like, and errors name the key or the line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spes_swarm.base.errors import ConfigError, UserError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.peer import PeerConfig
from tests.helpers.repository import ROOT


def yaml_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "f.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def yaml_error(tmp_path: Path, text: str) -> str:
    path = yaml_file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")


@pytest.mark.slow
@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", ".0001", "1.e-4", "1e-04", "+1e-4"])
def test_every_spelling_of_a_float_is_a_float(tmp_path: Path, text: str) -> None:
    assert load_config(yaml_file(tmp_path, f"peer: {{upload_mbps: {text}}}")).peer.upload_mbps == 1e-4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client_mode: yes", "peer.client_mode: found 'yes', expected true or false"),
        ("client_mode: 0", "peer.client_mode: found 0, expected true or false"),
        ("relay: on", "peer.relay: found 'on', expected auto or off"),
        ("{client_mode: true, assume_reachable: true}", "peer.assume_reachable: found true, expected false in client_"),
        ("keep_checkpoints: 2.0", "peer.keep_checkpoints: found 2.0, expected a whole number, at least 1"),
        ("keep_checkpoints: 1e3", "peer.keep_checkpoints: found 1000.0, "),
        ("keep_checkpoints: true", "peer.keep_checkpoints: found true, "),
        ("keep_checkpoints: 010", "peer.keep_checkpoints: found '010', "),  # not octal 8
        ("max_rounds: 1:30", "peer.max_rounds: found '1:30', "),  # not sexagesimal 90
        ("experts: 2.0", "peer.experts: found 2.0, expected auto, a number of experts, or experts such as 0,3,5"),
        ("micro_batch_size: 0", "peer.micro_batch_size: found '0', expected auto or a number of sequences"),
        ("foreign_storage: cpu", "peer.foreign_storage: found 'cpu', expected device or host"),
        ("optimizer_states: cpu", "peer.optimizer_states: found 'cpu', expected device or host"),
        ("upload_mbps: .inf", "peer.upload_mbps: found inf, expected a number"),
        ("upload_mbps: .nan", "peer.upload_mbps: found nan, expected a number"),
        ("initial_peers: /ip4/1.2.3.4", "peer.initial_peers: found '/ip4/1.2.3.4', expected a list"),
        ("initial_peers: [1]", "peer.initial_peers.0: found 1, expected text"),
        ("device: gpu", "peer.device: found 'gpu', expected auto, cpu, cuda or cuda:N"),
        ("7: 8", "peer.7: unknown key"),
        ("<<: {seed: 1}", "peer.<<: unknown key"),
    ],
)
def test_yaml_traps(tmp_path: Path, text: str, found: str) -> None:
    assert yaml_error(tmp_path, f"peer:\n  {text}\n").startswith(found)


def test_words_stay_words(tmp_path: Path) -> None:
    # YAML 1.1 reads these as a bool and a date.
    text = "peer: {name: no, output_dir: 2024-01-01, experts: '3', identity: null, num_threads: ~}"
    peer = load_config(yaml_file(tmp_path, text)).peer
    assert (peer.name, peer.output_dir, str(peer.experts)) == ("no", "2024-01-01", "3")
    assert (peer.identity, peer.num_threads) == (None, None)


@pytest.mark.parametrize("text", ["peer:\n  seed: 1\n  seed: 2\n", "peer: {}\nrun: {}\npeer: {}\n"])
def test_duplicate_keys_are_refused(tmp_path: Path, text: str) -> None:
    assert yaml_error(tmp_path, text).startswith("line 3: duplicate key ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "found a list, expected the sections run: and peer:"),
        ("peers: {}", "peers: unknown key, did you mean peer?"),
        ("learning_rate: 1", "learning_rate: unknown key, did you mean "),
        ("experts: auto", "experts: unknown key, did you mean peer.experts?"),
        ("round: {}", "round: unknown key, did you mean run.round?"),
        ("peer: [", "line 1: "),
        ("peer: !!python/object/apply:os.system ['true']", "line 1: could not determine a constructor"),
        ("run: {name: x, model: {type: olmoe, settings: &a {b: *a}}}", ""),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    assert yaml_error(tmp_path, text).startswith(message)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml: not UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_sections_are_optional(tmp_path: Path) -> None:
    for text in ("", "peer:\n", "run:\npeer: {}\n"):
        assert load_config(yaml_file(tmp_path, text)) == (None, PeerConfig())
    assert load_config(yaml_file(tmp_path, "peer: {seed: 3}")).peer.seed == 3


def test_default_config_is_the_quickstart() -> None:
    run, peer = load_config(default_config_path())
    assert run is not None
    assert run.name == "quickstart"
    assert peer == PeerConfig()


def test_a_file_may_change_another_one(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(default_config_path().read_text() + "peer: {seed: 3, name: me}\n")
    changes = "base: base.yaml\nrun: {name: mine, round: {inner_steps: 7}}\npeer: {seed: 4}\n"
    run, peer = load_config(yaml_file(tmp_path, changes))
    base = load_config(tmp_path / "base.yaml")
    assert run is not None
    assert base.run is not None
    assert (run.name, run.round.inner_steps, peer.seed, peer.name) == ("mine", 7, 4, "me")
    assert run.model == base.run.model
    assert replace(run.round, inner_steps=base.run.round.inner_steps) == base.run.round


@pytest.mark.parametrize("changes", ["", "run:\n", "run: {}\npeer:\n", "run:\n  training:\n"])
def test_an_empty_section_changes_nothing(tmp_path: Path, changes: str) -> None:
    (tmp_path / "base.yaml").write_text(default_config_path().read_text())
    assert load_config(yaml_file(tmp_path, f"base: base.yaml\n{changes}")) == load_config(default_config_path())


def test_a_base_that_comes_with_the_package_is_found_from_anywhere(tmp_path: Path) -> None:
    assert load_config(yaml_file(tmp_path, "base: quickstart.yaml\n")) == load_config(default_config_path())
    # In a clone, those of configs/ are found, too.
    (run, _), expected = (
        load_config(yaml_file(tmp_path, "base: spes-2b.yaml\n")),
        load_config(ROOT / "configs/spes-2b.yaml"),
    )
    assert run == expected.run
    # A file beside it comes first.
    (tmp_path / "quickstart.yaml").write_text("peer: {seed: 3}")
    assert load_config(yaml_file(tmp_path, "base: quickstart.yaml\n")) == (None, PeerConfig(seed=3))


def test_a_base_may_have_a_base(tmp_path: Path) -> None:
    (tmp_path / "lower.yaml").write_text("base: quickstart.yaml\npeer: {seed: 3, name: lower}\n")
    (tmp_path / "upper.yaml").write_text("base: lower.yaml\nrun: {round: {inner_steps: 7}}\npeer: {name: upper}\n")
    found = load_config(yaml_file(tmp_path, "base: upper.yaml\npeer: {seed: 4}\n"))
    run = load_config(default_config_path()).run
    assert run is not None
    assert found == (replace(run, round=replace(run.round, inner_steps=7)), PeerConfig(seed=4, name="upper"))


def test_a_base_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/base.yaml").write_text("peer: {seed: 3}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for base in ("../shared/base.yaml", str(tmp_path / "shared/base.yaml"), "~/shared/base.yaml"):
        assert load_config(yaml_file(tmp_path / "mine", f"base: {base}\n")) == (None, PeerConfig(seed=3))


def test_a_configuration_of_the_package_that_is_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "quickstart-paper.yaml")
    path = default_config_path().with_name("quickstart-paper.yaml")
    assert str(caught.value).endswith(f"does not exist; the quickstart-paper.yaml of this package is {path}")


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("other.yaml", "f.yaml: base: "),
        ("other.yaml", "other.yaml does not exist; give a path, or one of those that come with the package: continued"),
        ("configs/quickstart.yaml", "configs/quickstart.yaml does not exist"),
        ("~nobody-of-this-name/f.yaml", "there is no such home directory"),
        (".", "cannot be read: Is a directory"),
        ("chained.yaml", "chained.yaml: base: found 'f.yaml', which is this file, or has it as a base"),
        ("quickstart.yaml\nrnu:", "rnu: unknown key, did you mean run?"),
        ("misspelt.yaml", "f.yaml (with its base misspelt.yaml): run.trainig: unknown key"),
        ("3", "f.yaml: base: found 3, expected"),
        ('""', "f.yaml: base: found '', expected"),
        ("f.yaml", "f.yaml: base: found 'f.yaml', which is this file, or has it as a base"),
        ("./f.yaml", "f.yaml: base: found './f.yaml', which is this file, or has it as a base"),
    ],
)
def test_a_base_that_cannot_be_used(tmp_path: Path, base: str, message: str) -> None:
    (tmp_path / "chained.yaml").write_text("base: f.yaml\n")
    (tmp_path / "misspelt.yaml").write_text("run: {trainig: {}}\n")
    (tmp_path / "quickstart.yaml").write_text(default_config_path().read_text())
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(yaml_file(tmp_path, f"base: {base}\n"))


def test_the_papers_quickstart_has_adamw_and_half_as_many_rounds_in_16_bits() -> None:
    fast, paper = (load_config(ROOT / "configs" / f"quickstart{suffix}.yaml").run for suffix in ("", "-paper"))
    assert fast is not None
    assert paper is not None
    assert fast.training.optimiser == "muon"
    training = replace(fast.training, optimiser="adamw", learning_rate=6e-3, muon_momentum=0.95)
    rounds, evaluation = replace(fast.round, inner_steps=10, codec="fp16"), replace(fast.evaluation, every_rounds=5)
    assert paper == replace(fast, name="quickstart-paper", training=training, round=rounds, evaluation=evaluation)
