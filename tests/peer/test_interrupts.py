"""Ctrl-C while a command imports its libraries, which takes seconds: at most one line, never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.testing.local_peer import PATIENCE_S
from tests.helpers.repository import ROOT

pytestmark = pytest.mark.slow

# In place of a library: says that it is being imported, and never is.
_ENDLESS = "import time\nprint('importing', flush=True)\ntime.sleep(3600)\n"
# As torch, which calls Python in C++ functions that must not throw.
_ABORTING = """import os, time
try:
    print("importing", flush=True)
    time.sleep(3600)
except BaseException:
    os.abort()
"""
BY_SIGNAL = (130, -signal.SIGINT)  # a handler's exit code, or Python's own end


@pytest.mark.parametrize(
    ("command", "library", "codes", "said"),
    [
        (["-m", "spes_swarm.join", "--output-dir", "OUT"], "blake3", (0,), ""),  # of its own modules
        (["-m", "spes_swarm.join", "--output-dir", "OUT"], "torch", (0,), ""),
        (["-m", "spes_swarm.plan"], "torch", BY_SIGNAL, "plan: interrupted"),
        (["-m", "spes_swarm.export", "nowhere", "somewhere"], "safetensors", BY_SIGNAL, "export: interrupted"),
        (["-m", "spes_swarm.publish", "nowhere", "--to", "you/model"], "pydantic", BY_SIGNAL, "publish: interrupted"),
        (["-m", "spes_swarm.tokenize", "text", "--output", "OUT"], "tqdm", BY_SIGNAL, "tokenize: interrupted"),
        (["-m", "spes_swarm.upcycle", "nowhere", "OUT"], "transformers", BY_SIGNAL, "upcycle: interrupted"),
        (["-m", "spes_swarm.evaluate", "nowhere"], "torch", BY_SIGNAL, "evaluate: interrupted"),
        (["-m", "spes_swarm.proof", "nowhere"], "numpy", BY_SIGNAL, "proof: interrupted"),
        (["-m", "spes_swarm.monitor", "--help"], "pydantic", (0,), ""),
        (["scripts/demo.py"], "numpy", BY_SIGNAL, "demo: interrupted"),
        (["scripts/chaos.py"], "yaml", BY_SIGNAL, "chaos: interrupted"),
    ],
)
def test_an_import_that_is_interrupted(
    tmp_path: Path, command: list[str], library: str, codes: tuple[int, ...], said: str
) -> None:
    (tmp_path / f"{library}.py").write_text(_ABORTING if library == "torch" else _ENDLESS, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, *(str(tmp_path / "out") if word == "OUT" else word for word in command)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # it may be ignored here
    ) as process:
        try:
            assert process.stdout is not None
            assert "importing\n" in iter(process.stdout.readline, "")  # waits for it
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode in codes, stderr
    assert len(stderr.splitlines()) == (1 if said else 0), stderr
    assert stderr.startswith(said)
