"""scripts/slurm.sh, with stand-ins for Slurm and for torchrun."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT
from tests.helpers.swarm import REASONABLE_S

SCRIPT = ROOT / "scripts" / "slurm.sh"
# Runs the command that follows srun's own options on two nodes at once; fails if one of them does.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do echo "$1" >>srun-options; shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first; code=$?
wait $second && exit $code
"""
# Notes how it was called. The first node listens; it ends after the second has been called, as peers do.
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@" "threads $OMP_NUM_THREADS" >args-$SLURM_NODEID.new
mv args-$SLURM_NODEID.new args-$SLURM_NODEID
[ ! -e founder-fails ] || exit 1
if [ $SLURM_NODEID = 0 ]; then
    mkdir -p shared/node-0
    echo '{"event": "listening", "maddrs": ["/ip4/127.0.0.1/tcp/9/p2p/Qm1", "/ip4/10.0.0.5/tcp/9/p2p/Qm1"]}' \\
        >>shared/node-0/metrics.jsonl
    until [ -e args-1 ]; do sleep 0.1; done
fi
"""
COMMON = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--shutdown-timeout", "240"]


@pytest.fixture
def submitted(tmp_path: Path) -> Path:
    """The directory that jobs are submitted from."""
    for path, text in ((tmp_path / "bin" / "srun", SRUN), (tmp_path / ".venv" / "bin" / "python", PYTHON)):
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    return tmp_path


def run(directory: Path, *arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    environment = {
        "PATH": f"{directory / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(directory),
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "10",
        **changes,
    }
    return subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=REASONABLE_S,
        check=False,
    )


def called(directory: Path, node: int) -> list[str]:
    return (directory / f"args-{node}").read_text(encoding="utf-8").splitlines()


def join_arguments(directory: Path, node: int, *more: str) -> list[str]:
    output = str(directory / "shared" / f"node-{node}")
    return [*COMMON, "-m", "spes_swarm.join", "--output-dir", output, *more, "threads 2"]


def test_the_first_node_founds_the_run_and_the_others_join_it(submitted: Path) -> None:
    metrics = submitted / "shared" / "node-0" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    earlier = {"event": "listening", "maddrs": ["/ip4/10.0.0.1/tcp/1/p2p/Qm1"]}
    metrics.write_text(json.dumps(earlier) + "\n", encoding="utf-8")  # of an earlier job
    done = run(submitted, "shared", "--name", "two words")
    assert done.returncode == 0, done.stderr
    own = ["--name", "two words"]
    assert called(submitted, 0) == join_arguments(submitted, 0, *own)
    assert called(submitted, 1) == join_arguments(submitted, 1, "--initial-peers", "/ip4/10.0.0.5/tcp/9/p2p/Qm1", *own)
    options = (submitted / "srun-options").read_text(encoding="utf-8").splitlines()
    assert options == ["--ntasks-per-node=1", "--kill-on-bad-exit=0", "--cpus-per-task=10"]


def test_all_nodes_join_peers_that_are_named(submitted: Path) -> None:
    peers = ["--initial-peers", "/ip4/192.0.2.7/tcp/9/p2p/Qm2"]
    done = run(submitted, "shared", *peers)
    assert done.returncode == 0, done.stderr
    for node in (0, 1):
        assert called(submitted, node) == join_arguments(submitted, node, *peers)


def test_nobody_waits_for_a_founder_that_has_failed(submitted: Path) -> None:
    (submitted / "founder-fails").touch()
    done = run(submitted, "shared")
    assert done.returncode != 0
    assert done.stderr == "slurm: node 1: the first node could not found the run\n"


@pytest.mark.parametrize(
    ("arguments", "changes", "why"),
    [
        (["shared"], {"SLURM_JOB_ID": ""}, "not in a Slurm job: submit this script with sbatch"),
        ([], {}, "give a directory that all nodes share, then the arguments of join"),
        (["--config", "x"], {}, "give a directory that all nodes share, then the arguments of join"),
        (
            ["shared"],
            {"SLURM_SUBMIT_DIR": "/"},
            "/ has no .venv: submit from the repository, after bash scripts/setup.sh",
        ),
    ],
)
def test_bad_use(submitted: Path, arguments: list[str], changes: dict[str, str], why: str) -> None:
    done = run(submitted, *arguments, **changes)
    assert done.returncode == 2
    assert done.stderr.startswith(f"slurm: {why}")
    assert done.stderr.count("\n") == 1
    assert not (submitted / "shared").exists()


def test_sbatch_finds_its_options_before_the_first_command() -> None:
    """It stops reading them there."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert options
    assert max(options) < first_command
