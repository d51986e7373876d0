"""The shape of the package and of its tests: what imports what, and that each folder says what it is for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

PACKAGE = ROOT / "spes_swarm"
MODULES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in MODULES if path.parent.name != "tasks"})  # data of the evaluation
TESTS = sorted((ROOT / "tests").rglob("*.py"))

_PRIVATE_PART = re.compile(r"httpx|huggingface_hub\.(.*\.)?_")

_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print(sorted({"hivemind", "torch", "transformers"} & set(sys.modules)))
"""


@pytest.mark.parametrize("package", ["spes_swarm.base", "spes_swarm.protocol", "spes_swarm.metrics"])
def test_what_everything_rests_on_loads_no_heavy_library(package: str) -> None:
    command = [sys.executable, "-c", _IMPORT_ALL, package]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("protocol/rounds/plan.py", "import hivemind", "The protocol is pure"),
        ("protocol/rounds/plan.py", "import asyncio", "The protocol is pure"),
        ("network/link/rpc.py", "from hivemind.p2p import P2P", "Only the transport imports hivemind"),
        ("monitor/watcher.py", "import hivemind", "Only the transport imports hivemind"),
        (
            "network/transport/libp2p.py",
            "import spes_swarm.network.link.rpc",
            "Within the network, imports run one way",
        ),
        ("base/arrays.py", "import torch", "What all packages use loads quickly"),
        ("training/rounds/due.py", "import spes_swarm.network.run_services", "Imports run one way"),
    ],
)
def test_an_import_against_the_rules_is_found(tmp_path: Path, file: str, line: str, contract: str) -> None:
    shutil.copytree(PACKAGE, tmp_path / "spes_swarm", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = tmp_path / "spes_swarm" / file
    source = planted.read_text(encoding="utf-8")
    planted.write_text(source.replace("from __future__", f"{line}\nfrom __future__", 1), encoding="utf-8")
    checker = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [checker, "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    # Behind the name and the verdict, there may be the number of imports that a contract ignores.
    assert any(line.startswith(f"{contract} BROKEN") for line in done.stdout.splitlines())


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_module_imports_a_test_module() -> None:
    """What several of them need is in tests/helpers or in a conftest.py."""
    found: list[str] = []
    for path in TESTS:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parent = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                imported = [f"{parent}.{alias.name}" for alias in node.names]
                if any(part.startswith("test_") for name in imported for part in name.split(".")):
                    found.append(f"{path}:{node.lineno} {imported[0]}")
    assert not found


def test_the_hub_is_reached_through_the_public_interface_of_its_library() -> None:
    """The HTTP library below it changed with its version 2, and may change again."""
    found: list[str] = []
    for path in (*MODULES, *TESTS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parent = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [f"{parent}{alias.name}" for alias in node.names]
                found += [f"{path}:{node.lineno} {name}" for name in names if _PRIVATE_PART.match(name)]
    assert not found
