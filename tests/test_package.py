"""The wheel: what a user gets who has no clone of the repository."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spes_swarm.__main__ import main
from tests.helpers.repository import ROOT


@pytest.mark.parametrize("name", ["quickstart.yaml", "quickstart-paper.yaml"])
def test_the_quickstart_in_the_package_is_the_one_in_configs(name: str) -> None:
    in_configs = ROOT / "configs" / name
    assert (ROOT / "spes_swarm" / "default_config" / name).read_bytes() == in_configs.read_bytes()
    assert not in_configs.is_symlink()  # wheels do not carry links


def test_python_m_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = re.findall(r"^python -m (\S+)  +\w", capsys.readouterr().out, re.MULTILINE)
    modules = {path.stem for path in (ROOT / "spes_swarm").glob("*.py")} - {"__init__", "__main__"}
    assert set(listed) == {f"spes_swarm.{name}" for name in modules | {"monitor"}}
    for name in listed:
        assert importlib.util.find_spec(name) is not None
    assert main(["join", "now"]) == 2
    assert "use python -m spes_swarm.join" in capsys.readouterr().err


def test_the_threat_model_names_tests_that_exist() -> None:
    model = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
    table = model.split("\n\n")[2].splitlines()
    assert table[0] == "| attacker | aim | defence | residual | test |"
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    existing = {
        name for source in sources for name in re.findall(r"^(?:async )?def (test_\w+)\(", source, re.MULTILINE)
    }
    for row in table[2:]:
        *cells, tests = row.strip("| ").split(" | ")
        assert len(cells) == 4, row
        named = re.findall(r"`(test_\w+)`", tests)
        assert ", ".join(f"`{name}`" for name in named) == tests or tests == "none", row
        assert set(named) <= existing, row


def copy_repository(destination: Path) -> None:
    """What is built is built from a copy, because setuptools leaves files beside the sources."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in files:
        target = destination / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())


_PEER = "/ip4/192.0.2.1/tcp/1/p2p/QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"
# What the extra `monitor` installs. With this as sitecustomize.py on its path, a process and its children lack it.
_WITHOUT_MONITOR = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("prometheus_client", "starlette", "uvicorn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
_IMPORT_ALL_BUT_THE_PAGE_AND_JOIN = """
import importlib, pkgutil, sys, spes_swarm
page = ("spes_swarm.monitor.views.web", "spes_swarm.monitor.views.prometheus")
names = {module.name for module in pkgutil.walk_packages(spes_swarm.__path__, "spes_swarm.", lambda name: None)}
for name in sorted(name for name in names if not name.startswith(page)):
    importlib.import_module(name)
sys.exit(spes_swarm.join.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_in_the_folder_that_holds_a_clone_the_package_is_imported_and_not_the_clone(tmp_path: Path) -> None:
    clone, site = tmp_path / "spes_swarm", tmp_path / "site"
    copy_repository(clone)
    site.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_editable({str(site)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = site.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Without this environment's own site-packages.
    code = f"import site; site.addsitedir({str(site)!r}); import spes_swarm; print(spes_swarm.__file__)"
    for folder in (tmp_path, clone, site):
        done = subprocess.run([sys.executable, "-ESc", code], cwd=folder, capture_output=True, text=True)
        assert done.stdout == f"{clone}/spes_swarm/__init__.py\n", done.stderr


@pytest.mark.swarm
def test_a_wheel_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Only the page of the monitor needs its extra."""
    source, unpacked, empty = tmp_path / "source", tmp_path / "unpacked", tmp_path / "empty"
    copy_repository(source)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    (unpacked / "sitecustomize.py").write_text(_WITHOUT_MONITOR, encoding="utf-8")
    empty.mkdir()
    join = [sys.executable, "-P", "-c", _IMPORT_ALL_BUT_THE_PAGE_AND_JOIN, "--max-rounds", "1", "--num-threads", "1"]
    # PYTHONPATH comes before site-packages, where the repository itself is installed for development.
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    done = subprocess.run(
        [*join, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "round 1: 1 peer, " in done.stdout
    assert (empty / "runs" / "peer" / "metrics.jsonl").exists()
    monitor = [sys.executable, "-P", "-m", "spes_swarm.monitor", "--initial-peers", _PEER, "--web", "127.0.0.1:0"]
    done = subprocess.run(monitor, cwd=empty, env=environment, capture_output=True, text=True, timeout=600)
    needed = "starlette, uvicorn and prometheus-client"
    assert done.stderr == f"monitor: --web needs {needed}: pip install 'spes-swarm[monitor]'\n"
    assert done.returncode == 2
    (empty / "text.txt").write_text("spam", encoding="utf-8")
    for command in (["tokenize", "text.txt", "--output", "tokens"], ["evaluate", "--help"], ["upcycle", "--help"]):
        module = f"spes_swarm.{command[0]}"
        subprocess.run([sys.executable, "-P", "-m", module, *command[1:]], cwd=empty, env=environment, check=True)
    assert (empty / "tokens" / "tokens-00000.npy").exists()
    tasks = Path("spes_swarm", "convert", "tasks")
    assert {path.name for path in (unpacked / tasks).iterdir()} == {path.name for path in (ROOT / tasks).glob("*.*")}
