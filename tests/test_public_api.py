"""The public interface, as a user's own script sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import spes_swarm
from tests.helpers.repository import ROOT
from tests.helpers.swarm import TINY_RUN, merged

_IMPORT_FOUND_AND_EXPORT = """
import dataclasses
import sys

import spes_swarm

assert {*dir(spes_swarm)} >= {*spes_swarm.__all__}
print(sorted({"torch", "hivemind", "transformers"} & {*sys.modules}))
for name in spes_swarm.__all__:
    getattr(spes_swarm, name)
from spes_swarm import *
print(export_model.__name__, Session.__name__)

config = load_config(sys.argv[1])
peer = PeerConfig(
    output_dir="peer", num_threads=1, host_maddrs=("/ip4/127.0.0.1/tcp/0",), assume_reachable=True, max_rounds=2
)
result = Session(peer, config.run, quiet=True).run()
written = export_model(result.output_dir, "model")
assert (written.run_id, written.round) == (result.run_id, result.round), (written, result)
print(result.round, result.run_is_over, result.loss > 0, result.eval_loss > 0)
resumed = Session(dataclasses.replace(peer, max_rounds=1), quiet=True).run()
print(resumed.run_id == result.run_id, resumed.round)
"""


def run_file(path: Path) -> Path:
    path.write_text(yaml.safe_dump({"run": merged(TINY_RUN, {"round": {"inner_steps": 2}})}), encoding="utf-8")
    return path


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'spes_swarm' has no attribute 'Sesion'"):
        getattr(spes_swarm, "Sesion")  # noqa: B009 - mypy knows that there is none


@pytest.mark.swarm
def test_a_script_and_the_example_in_the_pages(tmp_path: Path) -> None:
    """In one interpreter. The import alone is quick: it loads nothing that takes seconds."""
    page = (ROOT / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    run_file(tmp_path / "my-run.yaml")
    done = subprocess.run(
        [sys.executable, "-c", f"{_IMPORT_FOUND_AND_EXPORT}\nexec({example!r}, {{}})", "my-run.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[]\nexport_model Session\n2 False True True\nTrue 3\n")
    assert "\nround 3 of test-" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.num_experts == 8
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")("spam").input_ids) == 4
    AutoModelForCausalLM.from_pretrained(tmp_path / "my-model")


def test_a_session_that_cannot_work_is_refused_at_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(spes_swarm.ConfigError, match="founding a run needs a configuration with a `run` section"):
        spes_swarm.Session(spes_swarm.PeerConfig(output_dir=str(out)))
    with pytest.raises(spes_swarm.AddressError, match="is not a multiaddress"):
        spes_swarm.Session.from_file(output_dir=str(out), initial_peers=("nowhere",))
    with pytest.raises(spes_swarm.ConfigError, match="expected 1 to 8 experts"):
        spes_swarm.Session.from_file(run_file(tmp_path / "run.yaml"), output_dir=str(out), experts="9")
    with pytest.raises(spes_swarm.UserError, match="out"):
        spes_swarm.export_model(out, tmp_path / "model")
    assert not out.exists()


def test_a_session_that_was_stopped_before_it_ran(tmp_path: Path) -> None:
    session = spes_swarm.Session.from_file(
        run_file(tmp_path / "run.yaml"), output_dir=str(tmp_path / "out"), quiet=True
    )
    session.stop()
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(spes_swarm.LeftEarlyError):
        session.run(handle_signals=True)
    assert signal.getsignal(signal.SIGTERM) is handler
    with pytest.raises(spes_swarm.LeftEarlyError):  # the output directory was given back
        session.run()


def test_signals_are_handled_in_the_main_thread_only(tmp_path: Path) -> None:
    session = spes_swarm.Session.from_file(
        run_file(tmp_path / "run.yaml"), output_dir=str(tmp_path / "out"), quiet=True
    )
    raised: list[Exception] = []

    def run() -> None:
        try:
            session.run(handle_signals=True)
        except ValueError as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [str(exc) for exc in raised] == ["signal only works in main thread of the main interpreter"]
    assert not (tmp_path / "out").exists()
