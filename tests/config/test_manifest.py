"""The run's description: whose it is can be checked by everybody, and what was changed is noticed."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import CheckpointError, LeftEarlyError, ManifestError, SwarmError, UserError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.manifest import FORMAT, MAX_MANIFEST_BYTES, Manifest, found_run, open_manifest
from spes_swarm.config.run import RunConfig
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.rounds import identity

Content = dict[str, Any]


def run_config() -> RunConfig:
    run = load_config(default_config_path()).run
    assert run is not None
    return run


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return found_run(run_config(), "layout digest", identity(0))


def signed(data: bytes, signer: int = 0) -> dict[str, bytes]:
    """What `signer` sends as a manifest, whatever it says; the signed bytes are written out here."""
    return {"manifest": data, "signature": identity(signer).sign(b"spes_swarm/1\0manifest\0" + data)}


def changed(manifest: Manifest, change: Callable[[Content], object], signer: int = 0) -> dict[str, bytes]:
    """A manifest that the founder itself signed, with other content."""
    content = json.loads(manifest.data)
    change(content)
    return signed(json.dumps(content).encode(), signer)


@pytest.mark.slow
def test_what_the_founder_wrote_is_what_others_read(manifest: Manifest) -> None:
    received = open_manifest(manifest.to_wire(), "peer", expected_run_id=manifest.run_id)
    assert received == manifest
    assert received.run == run_config()
    assert received.founder == identity(0).peer_id
    assert received.layout_digest == "layout digest"


def test_the_run_id_names_the_signed_bytes(manifest: Manifest) -> None:
    assert manifest.run_id == f"{run_config().name}-{blake3(manifest.data).hexdigest()[:24]}"
    assert json.loads(manifest.data)["founder"] == base64.b64encode(identity(0).public_key_der).decode()


def test_another_founder_or_layout_is_another_run(manifest: Manifest) -> None:
    assert found_run(run_config(), "layout digest", identity(0)).run_id == manifest.run_id
    assert found_run(run_config(), "layout digest", identity(1)).run_id != manifest.run_id
    assert found_run(run_config(), "other digest", identity(0)).run_id != manifest.run_id


def test_a_changed_byte_is_noticed(manifest: Manifest) -> None:
    wire = manifest.to_wire()
    for position in range(0, len(manifest.data), 11):
        data = bytearray(manifest.data)
        data[position] ^= 1
        with pytest.raises(ManifestError):
            open_manifest({**wire, "manifest": bytes(data)}, "peer")


def test_another_signature_is_noticed(manifest: Manifest) -> None:
    wire = manifest.to_wire()
    for signature in (b"", b"\0" * 256, identity(1).sign(manifest.data), signed(manifest.data, signer=1)["signature"]):
        with pytest.raises(ManifestError, match="not signed by its founder: do not join"):
            open_manifest({**wire, "signature": signature}, "peer")


def test_only_the_founder_can_sign(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="not signed by its founder"):
        open_manifest(changed(manifest, lambda content: None, signer=1), "peer")


def test_another_run_is_not_the_expected_one(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match=rf"describes run {manifest.run_id}, not quickstart-0000"):
        open_manifest(manifest.to_wire(), "peer", expected_run_id="quickstart-0000")
    other = changed(manifest, lambda content: content["run"]["training"].update(seed=99))
    assert open_manifest(other, "peer").run.training.seed == 99  # a run of its own, honestly signed
    with pytest.raises(ManifestError, match="another run"):
        open_manifest(other, "peer", expected_run_id=manifest.run_id)


def test_a_manifest_names_the_version_of_its_founder(manifest: Manifest) -> None:
    assert json.loads(manifest.data)["protocol"] == [7, 0]
    newer = changed(manifest, lambda content: content.update(protocol=[7, 9], surprise=1))
    assert open_manifest(newer, "peer").run == run_config()


def test_the_runs_of_earlier_versions_go_on(manifest: Manifest) -> None:
    """Those of version 1 name none in their manifests."""
    for change in (
        lambda content: content.pop("protocol"),
        lambda content: content.update(protocol=[2, 1]),
        lambda content: content.update(protocol=[4, 0]),
        lambda content: content.update(protocol=[6, 0]),
    ):
        assert open_manifest(changed(manifest, change), "peer").run == run_config()


def model_settings(**values: Any) -> Callable[[Content], object]:
    """Gives the model other settings; an alias in place of the setting itself."""

    def change(content: Content) -> None:
        content["run"]["model"]["settings"].pop("num_experts")
        content["run"]["model"]["settings"].update(values)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda content: content.update(format=FORMAT + 1), rf"format {FORMAT + 1}; .* supports format {FORMAT}"),
        (
            lambda content: content.update(protocol=[8, 1], format="another"),
            r"from peer cannot be used: its founder speaks protocol 8\.1, this side 7\.0: upgrade this side$",
        ),
        (
            lambda content: content.update(protocol=[1, 5]),
            r"its founder speaks protocol 1\.5, this side 7\.0: upgrade its founder$",
        ),
        (lambda content: content.update(protocol="2.0"), "the version of its founder is not a list of two"),
        (lambda content: content.update(protocol=[2, -1]), "the version of its founder is not a list of two"),
        (lambda content: content["run"].update(surprise=1), r"run\.surprise: unknown key"),
        (lambda content: content["run"]["round"].update(inner_steps=0), r"run\.round\.inner_steps"),
        (lambda content: content["run"]["model"]["settings"].update(trust_remote_code=True), "not allowed"),
        (model_settings(num_local_experts="x"), "found 'x' as num_experts, expected a whole number"),
        (model_settings(num_local_experts=[]), "found a list as num_experts"),
        (model_settings(num_local_experts=True), "found true as num_experts"),
        (lambda content: content["run"].pop("model"), r"run\.model: missing"),
        (lambda content: content.update(run=[]), "run: found a list"),
        (lambda content: content.pop("format"), "malformed"),
        (lambda content: content.pop("run"), "malformed"),
        (lambda content: content.pop("layout"), "malformed"),
        (lambda content: content.pop("founder"), "malformed"),
        (lambda content: content.update(founder=5), "malformed"),
        (lambda content: content.update(founder="?"), "malformed"),
        (lambda content: content.update(founder=""), "not signed by its founder"),
    ],
)
def test_a_signed_manifest_that_cannot_be_used_is_refused(
    manifest: Manifest, change: Callable[[Content], object], why: str
) -> None:
    with pytest.raises(ManifestError, match=why):
        open_manifest(changed(manifest, change), "peer")


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError, RecursionError])
def test_whatever_transformers_makes_of_a_manifest_is_one_error(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("spes_swarm.config.run.config_from_settings", fail)
    with pytest.raises(ManifestError, match="the manifest from peer is malformed"):
        open_manifest(manifest.to_wire(), "peer")


def test_a_founders_words_are_shown_as_data(manifest: Manifest) -> None:
    """A hostile founder must not write lines or colours of its own into somebody's terminal."""
    hostile = "1\njoin: all is well\x1b[2J" + "x" * 10_000
    with pytest.raises(ManifestError) as error:
        open_manifest(changed(manifest, lambda content: content.update(format=hostile)), "peer")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff", b"[" * 100_000], ids=len)
def test_what_is_no_manifest_is_refused(content: bytes) -> None:
    with pytest.raises(ManifestError):
        open_manifest(signed(content), "peer")


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(["manifest", "signature", "error"]), st.none() | st.integers() | st.binary()))
def test_no_answer_fails_in_another_way(wire: dict[str, Any]) -> None:
    with pytest.raises(ManifestError, match="peer 7"):
        open_manifest(wire, "peer 7")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=50)
@given(json_values, st.sampled_from(["name", "model", "training", "round", "merge", "experts_per_peer"]))
def test_no_signed_configuration_fails_in_another_way(value: Any, section: str) -> None:
    content = {
        "format": FORMAT,
        "run": {**run_config().to_dict(), section: value},
        "layout": "x",
        "founder": base64.b64encode(identity(0).public_key_der).decode(),
    }
    try:
        received = open_manifest(signed(json.dumps(content).encode()), "peer")
    except ManifestError:
        return
    assert json.loads(received.data) == content


def test_a_large_manifest_is_refused(manifest: Manifest) -> None:
    padded = changed(manifest, lambda content: content.update(padding="x" * MAX_MANIFEST_BYTES))
    with pytest.raises(ManifestError, match="is incomplete or too large"):
        open_manifest(padded, "peer")


# Beside the checkpoints.


def directory(path: Path) -> RunDirectory:
    path.mkdir()
    return RunDirectory(path)


def test_a_directory_remembers_its_run(tmp_path: Path, manifest: Manifest) -> None:
    run = directory(tmp_path / "peer")
    assert run.manifest() is None
    run.remember(manifest)
    assert run.manifest() == manifest
    assert [entry.name for entry in run.path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"run_id": "', '"run_id": "x'),
        lambda text: text.replace('"signature": "', '"signature": "00'),
        lambda text: text.replace('"signature": "', '"signature": "zz'),
    ],
)
def test_a_damaged_memory_is_named(tmp_path: Path, manifest: Manifest, damage: Callable[[str], str]) -> None:
    run = directory(tmp_path / "peer")
    run.remember(manifest)
    path = run.path / "manifest.json"
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        run.manifest()


def test_a_directory_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path / "peer"), RunDirectory(tmp_path / "peer")
    lock = first.prepare()
    with pytest.raises(UserError, match="in use by another process"):
        second.prepare()
    os.close(lock)
    os.close(second.prepare())


@pytest.mark.parametrize("there", [[], [""], ["notes.txt", "identity.key"]], ids=["new", "empty", "with files"])
@pytest.mark.parametrize("error", [UserError, LeftEarlyError])
def test_a_session_that_joins_no_run_leaves_nothing(
    tmp_path: Path, there: list[str], error: type[SwarmError], manifest: Manifest
) -> None:
    run = RunDirectory(tmp_path / "runs" / "peer")
    for name in there:
        run.path.mkdir(parents=True, exist_ok=True)
        if name:
            (run.path / name).write_text("mine")

    elsewhere = tmp_path / "keys" / "own.key"

    def session(joins: bool) -> None:
        with run.held(elsewhere):
            run.identity.touch()
            elsewhere.parent.mkdir()
            elsewhere.touch()
            run.metrics.touch()
            run.remember_port(4001)
            if joins:
                run.remember(manifest)
            raise error("refused")

    with pytest.raises(error, match="refused"):
        session(joins=False)
    assert run.path.parent.exists() == run.path.exists() == bool(there)
    assert not elsewhere.parent.exists()
    assert {path.name for path in run.path.glob("*")} == set(filter(None, there))
    with pytest.raises(error, match="refused"):
        session(joins=True)
    assert run.identity.exists()
    assert elsewhere.exists()
    assert run.manifest() == manifest


def test_a_directory_in_use_is_left_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "peer")
    with run.held(run.identity):
        run.identity.touch()
        with pytest.raises(UserError, match="in use by another process"), RunDirectory(run.path).held(run.identity):
            raise AssertionError("it is in use")
        assert run.identity.exists()


def test_the_check_waits_for_what_is_left_of_a_killed_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path / "peer")
    locks = [directory.prepare()]
    monkeypatch.setattr(time, "sleep", lambda seconds: os.close(locks.pop()))
    directory.check()
    assert not locks
