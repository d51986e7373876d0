"""A script's directory is emptied only where the script has filled it."""

from __future__ import annotations

import errno
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testing.output_directory import remake_directory
from spes_swarm.base.errors import UserError
from tests.helpers.repository import ROOT


def test_what_an_earlier_call_has_left_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        remake_directory(tmp_path / "runs" / "demo", "demo")
        assert [path.name for path in (tmp_path / "runs" / "demo").iterdir()] == [".demo"]
        (tmp_path / "runs" / "demo" / "model").mkdir()


@pytest.mark.parametrize("program", ["demo", "chaos"])
def test_what_somebody_else_has_left_stays(tmp_path: Path, program: str) -> None:
    (tmp_path / ".another").touch()
    with pytest.raises(UserError, match=f"contains files that {program} did not create"):
        remake_directory(tmp_path, program)
    assert [path.name for path in tmp_path.iterdir()] == [".another"]


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (Path("/proc/demo"), tmp_path / "file"):
        with pytest.raises(UserError, match="cannot be written"):
            remake_directory(place, "demo")


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    remake_directory(tmp_path / "demo", "demo")
    (tmp_path / "demo" / "link").symlink_to(tmp_path / "mine")
    remake_directory(tmp_path / "demo", "demo")
    assert not (tmp_path / "demo" / "link").is_symlink()
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_removal_that_breaks_off_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    remake_directory(tmp_path / "demo", "demo")
    (tmp_path / "demo" / "model").mkdir()
    monkeypatch.setattr("shutil.rmtree", fail)
    with pytest.raises(UserError, match="Input/output error"):
        remake_directory(tmp_path / "demo", "demo")
    monkeypatch.undo()
    remake_directory(tmp_path / "demo", "demo")
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".demo"]


def _refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("the script starts a peer")


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Restores what a script changes in its process, and starts no peer; a subprocess would import torch again."""
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    monkeypatch.setattr("scripts.testing.local_peer.LocalPeer.__init__", _refuse)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield monkeypatch
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("command", [["demo.py", "--output"], ["chaos.py", "--output-dir"]])
def test_the_scripts_keep_to_it(
    tmp_path: Path, process: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    script = str(ROOT / "scripts" / command[0])
    process.setattr("sys.argv", [script, *command[1:], str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    err = capsys.readouterr().err
    assert ended.value.code == 2, err
    assert f"{tmp_path} contains files" in err
    assert (tmp_path / "thesis.tex").exists()
