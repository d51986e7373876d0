"""The check for machines with a GPU, at small sizes: so that its first run there is not its first run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu_check import main
from tests.helpers.repository import ROOT


def gpu_check(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": python, "CUDA_VISIBLE_DEVICES": ""}
    command = ["bash", "scripts/gpu_check.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_everything_runs_on_a_cpu(tmp_path: Path) -> None:
    result = tmp_path / "gpu.json"
    done = gpu_check("--quick", "--json", str(result))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(result.read_text(encoding="utf-8"))["checks"]
    assert set(checks) == {"kernels", "losses", "storage", "bf16", "steps", "tests"}
    kernels = {row["kernel"]: row for row in checks["kernels"]["rows"]}
    assert all(kernels[name]["relative_error"] < 1e-5 for name in ("torch", "loop"))
    assert "kernel 'megablocks' needs " in kernels["megablocks"]["missing"]
    assert [row["vocabulary"] for row in checks["losses"]["rows"]] == [320, 301]
    assert all(row["ms"] > 0 for row in checks["losses"]["rows"])
    for step in checks["steps"]["rows"]:
        assert step["tokens_per_second"] == pytest.approx(1e3 * step["tokens"] / step["ms"])
        assert step["planned_bytes"] > 0
        assert step["mfu"] is None  # no CPU's peak is known
    assert "skipped" in checks["tests"]["rows"][0]["tests"]


def test_a_machine_without_a_gpu_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert main() == 2
    said = capsys.readouterr().err
    assert said == "gpu_check: torch finds no CUDA device on this machine; --quick runs on a CPU\n"


def test_a_python_without_the_packages_is_refused_in_one_line() -> None:
    done = gpu_check("--quick", python="/bin/false")
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: no Python has all of numpy, torch, ")
    assert done.stderr.count("\n") == 1
