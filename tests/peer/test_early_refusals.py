"""A command line with a mistake is refused before torch, transformers and hivemind are imported: that takes seconds."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from spes_swarm import __version__
from spes_swarm.config.manifest import found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.data.sharding import write_shards
from spes_swarm.data.token_file import sidecar_path
from spes_swarm.data.tokenizer import load_tokenizer
from spes_swarm.peer.preflight import has_cuda_hardware
from spes_swarm.storage.checkpoint_writing import save_checkpoint
from spes_swarm.storage.run_directory import KnownData, RunDirectory
from tests.helpers.checkpoints import meta, state
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity
from tests.helpers.swarm import TINY_RUN, merged
from tests.helpers.token_files import token_writer

pytestmark = pytest.mark.slow

HEAVY = ("torch", "transformers", "hivemind")
COMMANDS = ("join", "plan", "monitor", "publish", "export", "tokenize", "upcycle", "evaluate", "invite", "proof")
PEER = "/ip4/192.0.2.1/tcp/1/p2p/QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"
# Imports once what the commands import, then forks for each command and runs it as `python -m` does: each has its own
# process, without the second that the imports take.
_SERVER = """
import importlib, json, os, runpy, sys
heavy, *commands = sys.argv[1:]
for name in commands:
    importlib.import_module(name)
for name in commands:
    del sys.modules[name]
from spes_swarm.peer import join_request, preflight  # which `join` imports after it has parsed its command line
sys.exit(f"{name} imports more") if {*heavy.split()} & {*sys.modules} else print("ready", flush=True)

def execute(module, arguments, environment, directory):
    for number, name in (1, "stdout"), (2, "stderr"):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = [module, *arguments]
    code = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        code = exc.code or 0
    finally:
        with open(f"{directory}/report.json", "w") as file:
            json.dump({"code": code, "imported": [name for name in heavy.split() if name in sys.modules]}, file)

for line in sys.stdin:
    if os.fork() == 0:
        try:
            execute(**json.loads(line))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.wait()
    print("done", flush=True)
"""


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[subprocess.Popen[str]]:
    names = [f"spes_swarm.{name}" if name != "monitor" else "spes_swarm.monitor.__main__" for name in COMMANDS]
    command = [sys.executable, "-c", _SERVER, " ".join(HEAVY), *names]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_TOKEN_PATH": os.devnull}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        _server[:] = [process]
        yield process
        process.communicate()  # closes its input, which ends it
        assert process.returncode == 0


_server: list[subprocess.Popen[str]] = []


def run(tmp_path: Path, module: str, *arguments: Any, imports: Sequence[str] = ()) -> tuple[int, str, str]:
    """Exit code, standard output and the line on standard error of a command that imports nothing heavy but these."""
    (process,) = _server
    assert process.stdin is not None
    assert process.stdout is not None
    directory = tmp_path / "run"
    directory.mkdir(exist_ok=True)
    request = {
        "module": module,
        "arguments": [str(argument) for argument in arguments],
        "environment": dict(os.environ),
        "directory": str(directory),
    }
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"
    stdout, stderr, report = (directory / name for name in ("stdout", "stderr", "report.json"))
    outcome = json.loads(report.read_text(encoding="utf-8"))
    assert outcome["imported"] == list(imports), stderr.read_text(encoding="utf-8")
    return outcome["code"], stdout.read_text(encoding="utf-8"), stderr.read_text(encoding="utf-8")


def refusal(tmp_path: Path, *arguments: Any, imports: Sequence[str] = ()) -> str:
    """The one line with which `join` refuses; nothing has appeared on disk."""
    out = tmp_path / "out"
    was_there = out.exists()
    code, stdout, stderr = run(tmp_path, "spes_swarm.join", "--output-dir", out, *arguments, imports=imports)
    assert code == 2
    assert all(line.startswith("still importing") for line in stdout.splitlines())  # on a busy machine
    assert out.exists() == was_there
    (line,) = stderr.splitlines()
    return line.removeprefix("join: ")


@pytest.mark.parametrize("module", COMMANDS)
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
        (["--initial-peers", "/ip4/1.2.3.4/tcp/1"], "does not end in a peer id"),
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
        (["--run-id", "quickstart-x"], "--run-id names a run to join, which needs --initial-peers"),
        (["--client-mode"], "--client-mode accepts no connections, so no peer could join this one"),
        (["--client-mode", "--from-hub", "you/model"], "no peer could join this one"),
        (
            ["--batch-size", "1000000"],
            "batch_size: found 1000000, expected at most 131072 with sequences of 128 tokens",
        ),
        (["--initial-weights", "/", "--initial-peers", PEER], "founds a run, but --initial-peers joins one"),
        (["--initial-weights", "/", "--from-hub", "you/model"], "founds a run, but --from-hub resumes one"),
        (["--private", "--initial-peers", PEER], "--private founds a run, but --initial-peers joins one"),
        (["--invitation", "spes1.abc", "--initial-peers", PEER], "this is not an invitation: paste the whole word"),
        (["--invitation", f"SPES1.{'a' * 300}", "--initial-peers", PEER], "paste the whole word that begins with"),
        (["--bootstrap-timeout", "5"], "--bootstrap-timeout is for --initial-peers, of which there are none"),
        (["--data-differs", "--data", "stdlib"], "--data-differs is for joiners"),
        (["--data-differs", "--initial-peers", PEER], "name them with --data"),
        (["--publish-keep", "5"], "--publish-keep requires --publish-to"),
        (
            ["--client-mode", "--initial-peers", PEER, "--announce-maddrs", "/ip4/192.0.2.1/tcp/1"],
            "--announce-maddrs is for a peer that accepts connections: leave out --client-mode",
        ),
        (
            ["--client-mode", "--initial-peers", PEER, "--host-maddrs", "/ip4/0.0.0.0/tcp/0"],
            "--host-maddrs is for a peer that accepts connections: leave out --client-mode",
        ),
        (
            ["--seed", "5", "--data", "hf:you/set", "--initial-peers", PEER],
            "--seed is the order of token files, but --data streams",
        ),
        (["--initial-peers", ""], "initial peer '' is empty"),
        (["--initial-peers", f"join --initial-peers {PEER} --run-id x"], "found '--run-id' in place of an address"),
        (["--publish-to", "file:/proc/version/models"], "to publish to cannot be written"),
        (["--publish-to", "file:/proc/models"], "to publish to cannot be written"),
        (["--from-hub", "file:/nowhere/models"], "nothing was published"),
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
        ({"model": {"type": 7}}, "run.model.type: found 7, expected non-empty text"),
    ],
)
def test_a_run_section_with_a_mistake(tmp_path: Path, run_section: dict[str, Any], why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": merged(TINY_RUN, run_section)}), encoding="utf-8")
    assert why in refusal(tmp_path, "--config", path)


def test_publishing_without_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    line = refusal(tmp_path, "--publish-to", "you/model")
    assert line == "publishing to you/model needs a Hub token: set HF_TOKEN, or run `hf auth login`"


def test_a_model_that_cannot_fit(tmp_path: Path) -> None:
    large = {"hidden_size": 32768, "intermediate_size": 32768, "num_hidden_layers": 2, "num_experts": 64}
    path = tmp_path / "run.yaml"
    run_section = merged(TINY_RUN, {"model": {"settings": large}})
    path.write_text(yaml.safe_dump({"run": run_section}), encoding="utf-8")
    line = refusal(tmp_path, "--config", path, imports=("torch", "transformers"))
    assert re.match(r"training \d+ experts? needs [\d.]+ GB of this machine's memory, but only ", line)
    assert line.endswith("use a machine with more memory, or found a run with a smaller model")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--peers", "0"], "--peers: found 0, expected more than 0"),
        (["--memory", "much"], "--memory: found 'much', expected a size such as 16GB or 16GiB"),
        (["--device", "cpu", "--memory", "16GB"], "--memory is that of a GPU"),
    ],
)
def test_a_plan_with_a_mistake(tmp_path: Path, arguments: list[str], why: str) -> None:
    code, stdout, stderr = run(tmp_path, "spes_swarm.plan", *arguments)
    assert (code, stdout) == (2, "")
    assert why in stderr


def test_a_peer_section_with_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "peer.yaml"
    path.write_text(yaml.safe_dump({"peer": {"devise": "cpu"}}), encoding="utf-8")
    assert "peer.devise: unknown key" in refusal(tmp_path, "--config", path)


def test_a_configuration_that_is_no_yaml(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: [", encoding="utf-8")
    assert "line 1" in refusal(tmp_path, "--config", path)


def test_a_configuration_that_founds_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("", encoding="utf-8")
    assert "needs a configuration with a `run` section" in refusal(tmp_path, "--config", path)


def test_an_identity_that_is_garbage_or_in_use(tmp_path: Path) -> None:
    key = tmp_path / "identity.key"
    key.write_bytes(b"garbage")
    assert f"identity file {key} is not a libp2p RSA key" in (line := refusal(tmp_path, "--identity", key))
    assert "move it away" in line
    key.write_bytes(identity(0).path.read_bytes())
    with key.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"identity file {key} is in use by another process" in refusal(tmp_path, "--identity", key)


def test_an_initial_peer_that_is_this_peer(tmp_path: Path) -> None:
    key = tmp_path / "own.key"
    key.write_bytes(identity(0).path.read_bytes())
    maddr = f"/ip4/127.0.0.1/tcp/1/p2p/{identity(0).peer_id}"
    line = refusal(tmp_path, "--identity", key, "--initial-peers", maddr)
    assert f"initial peer '{maddr}' is this peer's own address" in line


def test_an_output_directory_that_another_peer_uses(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "in use by another process" in refusal(tmp_path)


# Token files.


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be\n" * 100, encoding="utf-8")
    write_shards([text], tmp_path / "corpus", load_tokenizer("bytes"))
    return tmp_path / "corpus"


def test_data_without_text(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no file with a known suffix" in refusal(tmp_path, "--data", tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "left", "why"),
    [
        ("tokens-00000.npy", 0.5, "is truncated"),
        ("tokens-00000.npy.json", 0.5, "is not JSON"),
        ("corpus.json", 0.5, "corpus.json is damaged"),
    ],
)
def test_damaged_token_files(tmp_path: Path, corpus: Path, name: str, left: float, why: str) -> None:
    content = (corpus / name).read_bytes()
    (corpus / name).write_bytes(content[: int(left * len(content))])
    assert why in refusal(tmp_path, "--data", corpus)


def test_a_token_file_with_the_sidecar_of_another(tmp_path: Path, corpus: Path) -> None:
    other = corpus / "other.npy"
    with token_writer(other, load_tokenizer("bytes")) as writer:
        writer.append(np.arange(100), 1)
    sidecar_path(other).replace(sidecar_path(corpus / "tokens-00000.npy"))
    assert "do not belong together" in refusal(tmp_path, "--data", corpus / "tokens-00000.npy")


def test_the_data_of_the_last_stay_are_gone(tmp_path: Path, corpus: Path, output: RunDirectory) -> None:
    output.remember_data(KnownData(str(corpus / "tokens-00000.npy"), differs=False, seed=None))
    (corpus / "tokens-00000.npy").unlink()
    line = refusal(tmp_path)
    assert line.startswith("the data of the last session: token file ")
    assert line.endswith("does not exist; give --data if they have moved")


# The run of an output directory.


@pytest.fixture
def output(tmp_path: Path) -> RunDirectory:
    """Of a run, without a checkpoint."""
    (tmp_path / "out").mkdir()
    directory = RunDirectory(tmp_path / "out")
    directory.remember(found_run(RunConfig.from_dict(TINY_RUN, "test"), "0" * 64, identity(0)))
    return directory


def test_an_output_directory_of_another_run(tmp_path: Path, output: RunDirectory) -> None:
    assert "belongs to run test-" in refusal(tmp_path, "--run-id", "another-run")
    assert "not another-run; choose another --output-dir" in refusal(tmp_path, "--run-id", "another-run")


@pytest.mark.parametrize("more", [[], ["--initial-peers", PEER], ["--data", "stdlib"]])
def test_initial_weights_for_a_run_that_starts_from_none(tmp_path: Path, output: RunDirectory, more: list[str]) -> None:
    """The quickstart, and then a run from an existing model without another --output-dir."""
    line = refusal(tmp_path, "--initial-weights", tmp_path, *more)
    assert line.startswith(f"output directory {output.path} belongs to run test-")
    assert line.endswith(
        f", which does not start from an existing model: choose another --output-dir to found a run from {tmp_path}, "
        "or leave out --initial-weights to continue the run"
    )


def test_initial_weights_for_a_run_that_another_peer_founded(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    directory = RunDirectory(tmp_path / "out")
    started = merged(TINY_RUN, {"model": {"initial_weights": "ab" * 32}})
    directory.remember(found_run(RunConfig.from_dict(started, "test"), "0" * 64, identity(0)))
    directory.identity.write_bytes(identity(1).path.read_bytes())
    line = refusal(tmp_path, "--initial-weights", tmp_path)
    assert "which another peer founded: choose another --output-dir to found a run from" in line


@pytest.mark.parametrize("more", [[], ["--initial-peers", PEER]])
def test_another_identity_than_that_of_the_output_directory(
    tmp_path: Path, output: RunDirectory, more: list[str]
) -> None:
    own, other, new = output.identity, tmp_path / "other.key", tmp_path / "new.key"
    own.write_bytes(identity(0).path.read_bytes())
    other.write_bytes(identity(1).path.read_bytes())
    start = f"output directory {output.path} belongs to peer {identity(0).peer_id}, but identity file "
    for path, problem in ((other, "is that of another peer"), (new, "does not exist")):
        line = refusal(tmp_path, "--identity", path, *more)
        assert line == f"{start}{path} {problem}: leave out --identity, or choose another --output-dir"
    # It has trained with an identity from elsewhere, which is left out now.
    save_checkpoint(output.checkpoints, state(1, meta=meta(1, peer_id=identity(0).peer_id)), keep=2)
    own.unlink()
    advice = "give that peer's file with --identity, or choose another --output-dir"
    assert refusal(tmp_path, *more) == f"{start}{own} does not exist: {advice}"
    assert not new.exists()
    assert not own.exists()


@pytest.mark.parametrize(("before", "said"), [(None, "without --seed"), (5, "with --seed 5")])
def test_another_seed_than_that_of_the_output_directory(
    tmp_path: Path, output: RunDirectory, before: int | None, said: str
) -> None:
    output.remember_data(KnownData("stdlib", differs=False, seed=before))
    for more in ([], ["--data", "stdlib", "--initial-peers", PEER]):
        assert refusal(tmp_path, "--seed", 6, *more) == (
            f"output directory {output.path} goes through its data {said}: leave out --seed 6, or choose another "
            "--output-dir"
        )


def test_a_seed_for_a_run_whose_data_stream(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    streams = merged(TINY_RUN, {"data": {"kind": "hf", "name": "you/set"}})
    path.write_text(yaml.safe_dump({"run": streams}), encoding="utf-8")
    assert "hf:you/set streams: leave it out" in refusal(tmp_path, "--config", path, "--seed", 5)


def test_an_output_directory_with_a_damaged_manifest(tmp_path: Path, output: RunDirectory) -> None:
    (output.path / "manifest.json").write_text("{", encoding="utf-8")
    assert "manifest.json is corrupt (it is not a manifest): copy the manifest.json of another" in refusal(tmp_path)
    (output.path / "manifest.json").write_text("", encoding="utf-8")
    assert "is corrupt (it is empty): copy " in refusal(tmp_path)
    for module in ("export", "publish"):
        to = ["--to", "file:/nowhere"] if module == "publish" else [tmp_path / "model"]
        code, _, stderr = run(tmp_path, f"spes_swarm.{module}", output.path, *to)
        assert code == 2
        assert "is corrupt" in stderr


def test_a_step_that_is_too_large_for_the_run_of_the_output_directory(tmp_path: Path, output: RunDirectory) -> None:
    assert "batch_size: found 1000000, expected at most" in refusal(tmp_path, "--batch-size", "1000000")


# Other commands.


@pytest.mark.parametrize("module", ["export", "publish"])
def test_what_is_no_output_directory(tmp_path: Path, module: str) -> None:
    to = ["--to", "file:/nowhere"] if module == "publish" else [tmp_path / "model"]
    code, stdout, stderr = run(tmp_path, f"spes_swarm.{module}", tmp_path / "missing", *to)
    assert (code, stdout) == (2, "")
    assert "is not the output directory of a run: give the --output-dir of a peer" in stderr


def test_an_export_onto_something(tmp_path: Path, output: RunDirectory) -> None:
    for destination, why in ((tmp_path, "exists and is not empty"), (Path(__file__), "cannot be written")):
        code, _, stderr = run(tmp_path, "spes_swarm.export", output.path, destination)
        assert code == 2
        assert f"{destination} {why}" in stderr


def test_a_monitor_whose_files_or_port_are_taken(tmp_path: Path) -> None:
    peer = ["--initial-peers", f"/ip4/127.0.0.1/tcp/1/p2p/{identity(0).peer_id}"]
    (tmp_path / "notes").write_text("mine", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, why in (
            (["--web", f"127.0.0.1:{port}", "--history", tmp_path / "new.sqlite"], "another program uses this port"),
            (["--history", tmp_path / "notes"], "is not an SQLite file"),
        ):
            code, stdout, stderr = run(tmp_path, "spes_swarm.monitor", *peer, *arguments)
            assert (code, stdout) == (2, "")
            assert why in stderr
    assert not (tmp_path / "new.sqlite").exists()
    assert (tmp_path / "notes").read_text(encoding="utf-8") == "mine"


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
    assert f"device '{device}' was requested, but this machine has no CUDA device" in refusal(
        tmp_path, "--device", device
    )
