"""`python -m spes_swarm.logs`: what it packs, and what it leaves out."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from spes_swarm import logs
from spes_swarm.config.manifest import found_run
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.lone_trainer import run_config
from tests.helpers.rounds import identity
from tests.helpers.tiny_model import tiny_layout

TOKEN = "hf_thisTokenMustNotBeSeen123456"


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """An output directory as a session leaves it."""
    directory = tmp_path / "peer"
    directory.mkdir()
    (directory / "log.txt").write_text(f"new, with {TOKEN}\n")
    (directory / "log.1.txt").write_text("old\n")
    (directory / "metrics.jsonl").write_text('{"event": "join"}\n')
    (directory / "identity.key").write_bytes(b"secret")
    RunDirectory(directory).remember(found_run(run_config(), tiny_layout().digest, identity(0)))
    return directory


def contents(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as packed:
        files = {entry.name: packed.extractfile(entry) for entry in packed}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_logs_events_manifest_and_versions_are_packed_without_secrets(
    peer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(peer.parent)
    assert logs.main([str(peer)]) == 0
    packed = contents(Path("peer-logs.tar.gz"))
    assert list(packed) == ["log.1.txt", "log.txt", "metrics.jsonl", "manifest.json", "versions.json"]
    assert packed["log.txt"] == "new, with (secret)\n"
    assert json.loads(packed["manifest.json"])["run"]["name"] == "test"
    assert {"python", "system", "torch", "hivemind"} <= json.loads(packed["versions.json"]).keys()
    assert capsys.readouterr().out.startswith("peer-logs.tar.gz: log.1.txt, log.txt, metrics.jsonl, ")


def test_only_the_end_of_long_files_is_packed(peer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MAX_BYTES", 5)
    assert logs.main([str(peer), "--to", str(tmp_path / "x.tar.gz")]) == 0
    assert contents(tmp_path / "x.tar.gz")["metrics.jsonl"] == 'in"}\n'


def test_a_damaged_manifest_is_described(peer: Path, tmp_path: Path) -> None:
    (peer / "manifest.json").write_text("{")
    assert logs.main([str(peer), "--to", str(tmp_path / "x.tar.gz")]) == 0
    assert "is corrupt" in contents(tmp_path / "x.tar.gz")["manifest.json"]


@pytest.mark.parametrize("arguments", [["missing"], ["peer", "--to", "missing/x.tar.gz"]], ids=["source", "target"])
def test_what_cannot_be_packed_is_refused_in_one_line(
    peer: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(peer.parent)
    assert logs.main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("logs: missing")
    assert said.count("\n") == 1
