"""A command line with a mistake is refused before torch, transformers and hivemind are imported: that takes seconds."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spes_swarm import __version__
from spes_swarm.preflight import has_cuda_hardware
from tests.rounds import identity
from tests.swarm import TINY_RUN, merged

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "transformers", "hivemind")
# Runs a command as `python -m` does and reports what it imported.
_RUN = """
import json, runpy, sys
module, report, heavy, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = module
code = 0
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
except SystemExit as exc:
    code = exc.code or 0
finally:
    with open(report, "w") as file:
        json.dump({"code": code, "imported": [name for name in heavy.split() if name in sys.modules]}, file)
"""


def run(tmp_path: Path, module: str, *arguments: Any) -> tuple[int, str, str]:
    """Exit code, standard output and the line on standard error of a command that must not import anything heavy."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-c", _RUN, module, str(report), " ".join(HEAVY), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        timeout=600,
        check=False,
    )
    outcome = json.loads(report.read_text(encoding="utf-8"))
    assert outcome["imported"] == [], done.stderr
    return outcome["code"], done.stdout, done.stderr


def refusal(tmp_path: Path, *arguments: Any) -> str:
    """The one line with which `join` refuses; nothing has appeared on disk."""
    out = tmp_path / "out"
    was_there = out.exists()
    code, stdout, stderr = run(tmp_path, "spes_swarm.join", "--output-dir", out, *arguments)
    assert (code, stdout) == (2, "")
    assert out.exists() == was_there
    (line,) = stderr.splitlines()
    return line.removeprefix("join: ")


@pytest.mark.parametrize("module", ["join", "monitor", "publish", "export"])
@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(tmp_path: Path, module: str, flag: str) -> None:
    code, stdout, stderr = run(tmp_path, f"spes_swarm.{module}", flag)
    assert (code, stderr) == (0, "")
    if flag == "--version":
        assert stdout == f"spes_swarm {__version__}\n"
    else:
        assert stdout.startswith("usage: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--initial-peers", "/ip4/1.2.3.4/tcp/x"], "initial peer '/ip4/1.2.3.4/tcp/x' is not a multiaddress"),
        (["--host-maddrs", "localhost:1"], "host address 'localhost:1' is not a multiaddress"),
        (["--announce-maddrs", "/ip4/1.2.3.4/tcp/0"], "has port 0"),
        (["--data", "/nowhere/tokens.npy"], "token file /nowhere/tokens.npy does not exist"),
        (["--data", "/nowhere/texts"], "data source '/nowhere/texts' does not exist"),
        (["--initial-weights", "/nowhere/model"], "/nowhere/model: no such directory"),
        (["--device", "abacus"], "device: found 'abacus', expected auto, cpu, cuda or cuda:N"),
        (["--batch-size", "0"], "batch_size: found 0"),
        (["--upload-mbps", "-1"], "upload_mbps: found -1.0"),
        (["--experts", "some"], "experts: found 'some', expected "),
        (["--publish-to", "nobody"], "'nobody' is neither USER/REPO nor file:DIRECTORY"),
        (["--from-hub", "you/model@a b"], "revision 'a b'"),
        (["--log", "notebook"], "log: found 'notebook'"),
        (["--output-dir", "/proc/version/out"], "output directory /proc/version/out: Not a directory"),
    ],
)
def test_values_that_cannot_be_meant(tmp_path: Path, arguments: list[str], why: str) -> None:
    assert why in refusal(tmp_path, *arguments)


@pytest.mark.parametrize(
    ("run_section", "why"),
    [
        ({"round": {"inner_stepz": 3}}, "run.round.inner_stepz: unknown key, did you mean inner_steps?"),
        ({"training": {"learning_rate": "high"}}, "run.training.learning_rate: found 'high', expected a number"),
        ({"training": {"warmup_steps": 2000}}, "run.training.warmup_steps: found 2000, expected fewer than"),
        ({"experts_per_peer": 0}, "run.experts_per_peer: found 0, expected a whole number, at least 1"),
        ({"model": {"type": 7}}, "run.model.type: found 7, expected a text"),
    ],
)
def test_a_run_section_with_a_mistake(tmp_path: Path, run_section: dict[str, Any], why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": merged(TINY_RUN, run_section)}), encoding="utf-8")
    assert why in refusal(tmp_path, "--config", path)


def test_a_peer_section_with_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "peer.yaml"
    path.write_text(yaml.safe_dump({"peer": {"devise": "cpu"}}), encoding="utf-8")
    assert "peer.devise: unknown key" in refusal(tmp_path, "--config", path)


def test_a_configuration_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: [", encoding="utf-8")
    assert "line 1" in refusal(tmp_path, "--config", path)


def test_an_identity_that_is_garbage_or_in_use(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    key.write_bytes(b"garbage")
    assert f"identity file {key} is not a libp2p RSA key" in refusal(tmp_path, "--identity", key)
    key.write_bytes(identity(0).path.read_bytes())
    with key.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"identity file {key} is in use by another process" in refusal(tmp_path, "--identity", key)


def test_an_output_directory_that_another_peer_uses(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by another process" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([], False),
        (["null", "dri/card0"], False),
        (["nvidia-uvm", "nvidiactl", "nvidia3"], True),  # not the first card, e.g. in a container
        (["dxg"], True),  # Windows Subsystem for Linux
        (["kfd"], True),  # ROCm, which torch calls cuda
        (["nvhost-gpu"], True),  # Jetson
    ],
)
def test_cuda_hardware_is_known_by_its_device_files(tmp_path: Path, devices: list[str], expected: bool) -> None:
    for name in devices:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert has_cuda_hardware(tmp_path) is expected


@pytest.mark.skipif(has_cuda_hardware(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_device_that_this_machine_lacks(tmp_path: Path, device: str) -> None:
    assert f"device '{device}' was asked for, but this machine has no CUDA device" in refusal(
        tmp_path, "--device", device
    )
