"""`python -m spes_swarm.proof`: what it prints, and what it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spes_swarm import proof
from spes_swarm.config.manifest import found_run
from spes_swarm.protocol.admission.acts import Pardon
from spes_swarm.storage.invitations import read_acts
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.lone_trainer import run_config
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity
from tests.helpers.signed_exchange import RUN_ID, hold_exchange, member, proof_against

FOUNDER = identity(0)

# In place of heavy libraries and of the network: importing or using them is an error.
_ALONE = """
import socket, sys
for name in ("torch", "hivemind", "transformers"):
    sys.modules[name] = None
def refuse(*arguments, **named):
    raise AssertionError("a socket")
socket.socket = refuse
from spes_swarm.proof import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """A proof, and what looks like one and is not."""
    lying = hold_exchange(np.random.default_rng(0), lie=lambda mean_N: -mean_N)[1]
    honest = hold_exchange(np.random.default_rng(0))[1]
    paths = [tmp_path / "lie.proof", tmp_path / "none.proof"]
    paths[0].write_bytes(lying.wrong_result())
    paths[1].write_bytes(honest.wrong_result())
    return paths


def line_of(path: Path) -> str:
    where = f"round 7 of {RUN_ID}, part 8"
    what = "the result differs from the mean of its contributions by 2 of its length"
    return f"{path}: peer {member(0).peer_id} lied in {where}: {what}\n"


def test_each_proof_is_one_line(files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert proof.main([str(files[0]), str(files[0])]) == 0
    assert capsys.readouterr().out == 2 * line_of(files[0])


def test_what_is_not_a_proof_is_a_line_and_the_exit_code(
    files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    garbage = tmp_path / "gar\nbage"
    garbage.write_bytes(b"garbage")
    assert proof.main([str(files[1]), str(files[0]), str(garbage)]) == 1
    assert capsys.readouterr().out == (
        f"{files[1]} proves nothing: proof: the result follows from its contributions\n"
        f"{line_of(files[0])}"
        f"{tmp_path}/gar bage proves nothing: malformed: not valid msgpack\n"
    )


def test_a_file_that_cannot_be_read_is_one_line_and_the_others_are_verified(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(101))
    for path, why in (
        (tmp_path / "missing", "cannot be read: No such file or directory"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        assert proof.main([str(path), str(files[0])]) == 1
        assert capsys.readouterr().out == f"{path} {why}\n{line_of(files[0])}"
    monkeypatch.setattr("spes_swarm.protocol.averaging.proof.MAX_PROOF_BYTES", 100)
    assert proof.main([str(large)]) == 1
    assert capsys.readouterr().out == f"{large} is not a proof: it has more than 0 MiB\n"


@pytest.mark.slow
def test_it_needs_no_network_and_no_torch(files: list[Path]) -> None:
    command = [sys.executable, "-c", _ALONE, *map(str, files)]
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0:
        command = [*alone, *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(line_of(files[0]))


# Pardons.


@pytest.fixture
def founder(tmp_path: Path) -> RunDirectory:
    """The founder's directory in an open run."""
    directory = RunDirectory(tmp_path / "founder")
    directory.path.mkdir()
    directory.remember(found_run(run_config(), "layout", FOUNDER))
    directory.identity.write_bytes(FOUNDER.path.read_bytes())
    return directory


def lie_in(directory: RunDirectory, culprit: int, round_number: int) -> str:
    """The path of a proof about the run of a directory."""
    path = directory.path / f"{culprit}-{round_number}.proof"
    path.write_bytes(proof_against(identity(culprit), directory.require_run().run_id, round_number))
    return str(path)


def test_the_founder_pardons_what_the_proofs_show(founder: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    lies = [lie_in(founder, 1, 9), lie_in(founder, 1, 12), lie_in(founder, 2, 4)]
    assert proof.main([*lies, "--pardon", "--output-dir", str(founder.path)]) == 0
    first, second = identity(1).peer_id, identity(2).peer_id
    assert capsys.readouterr().out.splitlines()[3:] == [
        f"pardoned {first} for its lies up to round 12; it takes effect when this peer runs next",
        f"pardoned {second} for its lies up to round 4; it takes effect when this peer runs next",
    ]
    given = read_acts(founder.acts, founder.require_run()).values()
    assert {(act.peer, act.round) for act in given if isinstance(act, Pardon)} == {(first, 12), (second, 4)}


def test_nobody_else_pardons_and_nothing_else_is_pardoned(
    founder: RunDirectory, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    lie = lie_in(founder, 1, 9)
    there = ["--pardon", "--output-dir", str(founder.path)]
    assert proof.main([lie, str(files[1]), *there]) == 1  # the second proves nothing
    assert proof.main([str(files[0]), *there]) == 2
    assert "cannot pardon lies in run" in capsys.readouterr().err
    founder.identity.write_bytes(identity(1).path.read_bytes())
    assert proof.main([lie, *there]) == 2
    assert capsys.readouterr().err == f"proof: only the founder of the run can pardon, peer {FOUNDER.peer_id}\n"
    for wrong in (["--pardon"], ["--output-dir", str(founder.path)], ["--identity", "x"]):
        assert proof.main([lie, *wrong]) == 2
        assert "a pardon takes --pardon and the founder's --output-dir" in capsys.readouterr().err
    assert not founder.acts.exists()
