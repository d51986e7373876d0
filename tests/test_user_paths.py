"""A script's directory is emptied only where the script has filled it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spes_swarm.errors import UserError
from spes_swarm.new_directory import remake_directory

ROOT = Path(__file__).parent.parent


def test_what_an_earlier_call_has_left_is_removed(tmp_path: Path) -> None:
    for _ in range(2):
        remake_directory(tmp_path / "runs" / "demo", "demo")
        assert [path.name for path in (tmp_path / "runs" / "demo").iterdir()] == [".demo"]
        (tmp_path / "runs" / "demo" / "model").mkdir()


@pytest.mark.parametrize("program", ["demo", "chaos"])
def test_what_somebody_else_has_left_stays(tmp_path: Path, program: str) -> None:
    (tmp_path / ".another").touch()
    with pytest.raises(UserError, match=f"holds something that {program} has not made"):
        remake_directory(tmp_path, program)
    assert [path.name for path in tmp_path.iterdir()] == [".another"]


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / ".demo").touch()
    (tmp_path / "link").symlink_to("made")
    for place in (Path("/proc/demo"), tmp_path / "file", tmp_path / "link"):
        with pytest.raises(UserError, match="cannot be written"):
            remake_directory(place, "demo")
    assert (tmp_path / "made" / ".demo").exists()


@pytest.mark.parametrize("command", [["demo.py", "--output"], ["chaos.py", "--output-dir"]])
def test_the_scripts_keep_to_it(tmp_path: Path, command: list[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / command[0], *command[1:], tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert f"{tmp_path} holds something" in done.stderr
    assert (tmp_path / "thesis.tex").exists()
