"""Mistakes that a user can make: one line that says what to do, exit code 2, and nothing left running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import LocalPeer
from spes_swarm.config.manifest import found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.data.tokenizer import ByteTokenizer
from spes_swarm.join import main
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.storage.checkpoint import load_newest
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.moe_models import REFUSED, save_moe
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity
from tests.helpers.small_disk import mounted_disk
from tests.helpers.swarm import REASONABLE_S, TINY_RUN, Swarm, merged, swarm
from tests.helpers.tiny_model import tiny_layout
from tests.helpers.token_files import token_writer

pytestmark = pytest.mark.slow

_MARK = "SPES_TEST_MARK"


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    stderr: str
    left_over: list[str]  # processes that it started and that still run

    def line(self) -> str:
        """The one line on stderr, without its prefix; checks all that holds for every mistake."""
        assert self.code == 2, self.stderr
        assert self.stderr.endswith("\n"), self.stderr
        (line,) = self.stderr.splitlines()
        assert line.startswith("join: "), line
        assert "Traceback" not in line
        assert not self.left_over
        return line.removeprefix("join: ")


def command(*arguments: Any) -> Outcome:
    """Runs `python -m spes_swarm.join` to its end, as a user would."""
    mark = uuid.uuid4().hex  # inherited by everything that the command starts, daemons included
    done = subprocess.run(
        [sys.executable, "-m", "spes_swarm.join", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", _MARK: mark},
        timeout=2 * REASONABLE_S,
        check=False,
    )
    return Outcome(done.returncode, done.stderr.decode(), survivors(lambda p: p.environ().get(_MARK) == mark))


def join(*arguments: Any, out: Path) -> Outcome:
    """The same, spared the seconds of imports (see scripts/testing/forked_peer.py)."""
    every = [*map(str, arguments), "--output-dir", str(out)]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as stderr:
        process = ForkServer(main=partial(run_main, stderr.name))(every, Path(os.devnull))
        try:
            code = process.wait(2 * REASONABLE_S)
        finally:
            process.kill()
        said = stderr.read()

    def belongs(process: psutil.Process) -> bool:
        used = [*process.cmdline(), *(file.path for file in process.open_files())]
        return process.pid != os.getpid() and any(str(out) in text for text in used)

    return Outcome(code, said, survivors(belongs))


def run_main(stderr: str, arguments: list[str]) -> int:
    """What the forked process does; the server has opened its standard output."""
    os.dup2(os.open(stderr, os.O_WRONLY), 2)
    return main(arguments)


def survivors(belongs: Callable[[psutil.Process], bool]) -> list[str]:
    """Those of the command's processes that do not end; they are killed, and so are not in the way of other tests."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if belongs(process):
                found.append(process)
    _, alive = psutil.wait_procs(found, timeout=REASONABLE_S)
    for process in alive:
        process.kill()
    return [str(process) for process in alive]


def config(path: Path, run: dict[str, Any] | None = None, **peer: Any) -> Path:
    """A configuration file of the tests' small run with changes, or with `run={}` of a peer alone."""
    content: dict[str, Any] = {"peer": {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "num_threads": 1, **peer}}
    if run != {}:
        content["run"] = merged(TINY_RUN, run or {})
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output directory."""
    return tmp_path / "out"


# Before anything starts.


def test_a_command_line_that_makes_no_sense(out: Path) -> None:
    assert "--no-such-flag" in command("--no-such-flag").line()
    assert "--max-rounds: invalid int value: 'many'" in join("--max-rounds", "many", out=out).line()
    assert "--publish-every requires --publish-to" in join("--publish-every", "5", out=out).line()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("peer:\n  expertss: auto\n", "peer.expertss: unknown key, did you mean experts?"),
        ("peer:\n  max_rounds: ten\n", "peer.max_rounds: found 'ten', expected a whole number"),
        ("peer: [", "line 1"),
    ],
)
def test_a_configuration_that_cannot_be_read(tmp_path: Path, out: Path, content: str, why: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    line = join("--config", path, out=out).line()
    assert str(path) in line
    assert why in line
    assert not out.exists()


def test_a_configuration_that_is_not_there(tmp_path: Path, out: Path) -> None:
    assert "No such file" in join("--config", tmp_path / "none.yaml", out=out).line()


@pytest.mark.parametrize("experts", ["0,8", "9", "0", "1,1", "some"])
def test_experts_that_the_model_does_not_have(tmp_path: Path, out: Path, experts: str) -> None:
    line = join("--config", config(tmp_path / "run.yaml"), "--experts", experts, out=out).line()
    assert f"experts: found '{experts}', expected " in line
    assert not out.exists()


def test_metrics_that_cannot_be_written(out: Path) -> None:
    (out / "metrics.jsonl").mkdir(parents=True)
    assert "metrics.jsonl cannot be written: Is a directory" in join(out=out).line()


# Before the swarm is reached.


def test_when_nobody_answers_every_address_is_named_with_its_reason(out: Path) -> None:
    closed, unroutable = (
        f"/ip4/{where}/p2p/{identity(i).peer_id}" for i, where in enumerate(("127.0.0.1/tcp/1", "127.1.2.3/tcp/2"))
    )
    line = join("--initial-peers", closed, unroutable, "--bootstrap-timeout", 2, out=out).line()
    assert "none of the 2 initial peers answered within 2 s" in line
    for maddr in (closed, unroutable):
        assert maddr in line
        reason = line.split(maddr)[1].split(";")[0]
        assert "connection refused" in reason
    assert not out.exists()  # not even an identity


def test_what_cannot_be_listened_on_is_said_with_advice(out: Path) -> None:
    line = join("--host-maddrs", "/ip4/203.0.113.7/tcp/31337", out=out).line()
    assert line.endswith("give --host-maddrs /ip4/0.0.0.0/tcp/31337 --announce-maddrs /ip4/203.0.113.7/tcp/31337")
    assert not out.exists()


def test_a_peer_that_nobody_could_join_does_not_go_on_alone(out: Path) -> None:
    out.mkdir()
    run = RunConfig.from_dict(TINY_RUN, "test")
    layout = layout_of(build_model(run.model.type, run.model.settings, 0, "meta", on_meta=True))
    RunDirectory(out).remember(found_run(run, layout.digest, identity(0)))
    line = join("--client-mode", out=out).line()
    assert "no peer of the last session answers, and with --client-mode no peer could join this one" in line


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path, out: Path) -> None:
    from spes_swarm.data.tokenizer import train_bpe

    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 280).save(tmp_path / "bpe")
    changes = {"tokenizer": {"name": str(tmp_path / "bpe" / "tokenizer.json")}}
    line = join("--config", config(tmp_path / "run.yaml", changes), out=out).line()
    assert "280 tokens" in line
    assert "the model's vocabulary has only 272" in line


def test_a_model_without_room_is_refused_before_tokenizer_and_data_are_opened(tmp_path: Path, out: Path) -> None:
    width = {"hidden_size": 8192, "intermediate_size": 32768, "num_hidden_layers": 32}
    changes = {"model": {"settings": width}, "tokenizer": {"name": str(tmp_path / "none.json")}}
    line = join("--config", config(tmp_path / "run.yaml", changes), out=out).line()
    assert line.startswith("training 1 expert needs ")
    assert "GB of this machine's memory, but only " in line
    assert "use a machine with more memory, or found a run with a smaller model" in line


@pytest.mark.parametrize("has_weights", [False, True], ids=["random", "initial weights"])
def test_a_pad_token_that_stands_in_the_data(tmp_path: Path, out: Path, has_weights: bool) -> None:
    from spes_swarm.data.tokenizer import train_bpe

    train_bpe(["the quick brown fox jumps over the lazy dog " * 20], 260).save(tmp_path / "bpe")
    changes = {
        "tokenizer": {"name": str(tmp_path / "bpe" / "tokenizer.json")},
        "model": {"settings": {"pad_token_id": 259}},
    }
    weights = ["--initial-weights", tmp_path] if has_weights else []
    line = join("--config", config(tmp_path / "run.yaml", changes), *weights, out=out).line()
    assert line.startswith("run.model.settings.pad_token_id: found 259, which is a token of tokenizer")


def test_an_existing_model_that_cannot_be_trained(tmp_path: Path, out: Path) -> None:
    save_moe(tmp_path / "model", "gpt_oss")
    line = join("--initial-weights", tmp_path / "model", out=out).line()
    assert re.fullmatch(rf"{tmp_path / 'model'}: .*{REFUSED['gpt_oss'][1]}.*", line), line
    assert not out.exists()


def test_weights_of_another_model(tmp_path: Path, out: Path) -> None:
    save_moe(tmp_path / "model", "olmoe")
    line = join("--config", config(tmp_path / "run.yaml"), "--initial-weights", tmp_path / "model", out=out).line()
    assert "the run's model" in line


def token_file(path: Path) -> Path:
    with token_writer(path, ByteTokenizer()) as writer:
        writer.append(np.arange(50_000) % 256, 1)
    return path


def test_a_token_file_that_is_too_short(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "short.npy"
    with token_writer(path, ByteTokenizer()) as writer:
        writer.append(np.arange(10), 1)
    join("--config", config(tmp_path / "run.yaml"), "--data", path, out=out).line()


# With a live founder.


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalPeer]:
    """One small run that goes on during all the tests that need one."""
    with swarm(tmp_path_factory.mktemp("live")) as running:
        peer = running.found("--experts", 8)
        peer.wait_for("join")
        yield peer


def live_run_id(founder: LocalPeer) -> str:
    return str(founder.wait_for("join")["run_id"])


@pytest.mark.swarm
def test_a_manifest_of_another_run_than_the_expected(founder: LocalPeer, tmp_path: Path, out: Path) -> None:
    peer_only = config(tmp_path / "peer.yaml", run={})
    line = join("--config", peer_only, "--initial-peers", founder.address(), "--run-id", "test-000", out=out).line()
    assert f"describes run {live_run_id(founder)}, not test-000" in line


@pytest.mark.swarm
def test_an_output_directory_of_another_run(founder: LocalPeer, tmp_path: Path, out: Path) -> None:
    with swarm(tmp_path, name="other") as running:
        other = running.start("out", "--config", running.config, "--max-rounds", 1)
        assert other.wait() == 0
        other_run = other.events("join")[0]["run_id"]
    peer_only = config(tmp_path / "peer.yaml", run={})
    arguments = ["--config", peer_only, "--initial-peers", founder.address()]
    for more in ([], ["--run-id", live_run_id(founder)]):
        line = join(*arguments, *more, out=out).line()
        assert f"output directory {out} belongs to run {other_run}" in line
        assert "choose another --output-dir" in line
    # Its own run is the other one, with which it can still go on.
    line = join("--config", config(tmp_path / "changed.yaml", {"round": {"inner_steps": 99}}), out=out).line()
    assert "whose configuration differs from the given one in " in line
    assert "run.round.inner_steps (" in line
    assert ", given 99)" in line


@pytest.mark.swarm
def test_an_output_directory_of_a_live_peer(founder: LocalPeer) -> None:
    assert "in use by another process" in command("--output-dir", founder.output_dir).line()


@pytest.mark.swarm
def test_a_joiner_cannot_change_the_run(founder: LocalPeer, tmp_path: Path, out: Path) -> None:
    changed = config(tmp_path / "changed.yaml", {"round": {"inner_steps": 99}})
    line = join("--config", changed, "--initial-peers", founder.address(), out=out).line()
    assert "run.round.inner_steps (" in line
    assert "leave the section out" in line
    assert not out.exists()


@pytest.mark.swarm
def test_a_wrong_peer_id_at_a_live_address_is_refused_at_once(founder: LocalPeer, out: Path) -> None:
    wrong = founder.address().replace(founder.address().rsplit("/", 1)[-1], identity(5).peer_id)
    line = join("--initial-peers", wrong, "--bootstrap-timeout", 3600, out=out).line()
    assert "no initial peer can be reached" in line
    assert "another peer answers there" in line
    assert not out.exists()


@pytest.mark.swarm
def test_an_address_as_it_was_copied(founder: LocalPeer, tmp_path: Path, out: Path) -> None:
    """It is found; what is wrong here are the data."""
    missing = ["--data", tmp_path / "none.txt", "--initial-peers", f"“{founder.address()}/”,\r\n"]
    line = join(*missing, out=out).line()
    assert "the run trains on the Python standard library, but this peer's data are 'none.txt'" in line
    assert not out.exists()


@pytest.mark.swarm
def test_a_joiners_experts_are_those_of_the_run(founder: LocalPeer, tmp_path: Path, out: Path) -> None:
    peer_only = config(tmp_path / "peer.yaml", run={})
    line = join("--config", peer_only, "--initial-peers", founder.address(), "--experts", "8,", out=out).line()
    assert "experts: found '8,', expected experts from 0 to 7" in line


@pytest.mark.swarm
def test_the_founder_is_unharmed(founder: LocalPeer) -> None:
    """After all those who came and failed."""
    now = max(founder.rounds(), default=0)
    founder.wait_for_round(now + 2)
    assert not founder.events("fault")


# On a small disk.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that is quickly full: a few checkpoints of the small model."""
    with mounted_disk(tmp_path / "disk", 8 << 20) as disk:
        yield disk


def fill(path: Path, leave: int) -> None:
    """Uses up the disk but for `leave` bytes."""
    status = os.statvfs(path.parent)
    with suppress(OSError), path.open("wb", buffering=0) as file:  # somebody else may be faster
        file.write(b"\0" * max(0, status.f_bavail * status.f_frsize - leave))


TWO_ROUNDS_LATER = r".*\bround \d+: .*\bround (\d+): "


@pytest.mark.swarm
@pytest.mark.parametrize("leave", [100_000, 0], ids=["full for checkpoints", "full for everything"])
def test_a_disk_that_stays_full_ends_nothing_but_the_last_checkpoint(
    small_disk: Path, tmp_path: Path, leave: int
) -> None:
    out = small_disk / "out"
    out.mkdir()
    (out / "console.log").symlink_to(tmp_path / "console.log")  # what it says must not need room there
    with Swarm(tmp_path) as running:
        peer = running.start("disk/out", "--config", running.config, "--experts", 8)
        peer.wait_for_round(2)
        fill(small_disk / "filler", leave)
        what = "the checkpoint|a checkpoint" if leave else r"metrics\.jsonl cannot be written"
        peer.wait_for_text(rf"({what})[^\n]*{TWO_ROUNDS_LATER}")
        tree = peer.tree()
        assert peer.terminate() == 2
        _, alive = psutil.wait_procs(tree, timeout=REASONABLE_S)
        assert not alive
        assert peer.text().splitlines()[-1].startswith("join: ")
        assert "Traceback" not in peer.text()
        joined = peer.events("join")[0]
    layout = tiny_layout()
    found, complaints = load_newest(out / "checkpoints", joined["run_id"], joined["peer_id"], layout)
    assert found is not None
    assert found.meta.round >= 1
    assert not complaints
    (small_disk / "filler").unlink()
    reference_N = np.empty(layout.num_elements, np.float32)
    found.reference(layout, reference_N)
    assert np.isfinite(reference_N).all()


@pytest.mark.swarm
def test_a_disk_that_is_full_for_a_while_is_one_fault(small_disk: Path, tmp_path: Path) -> None:
    out = small_disk / "out"
    out.mkdir()
    (out / "console.log").symlink_to(tmp_path / "console.log")
    with Swarm(tmp_path) as running:
        peer = running.start("disk/out", "--config", running.config, "--experts", 8)
        peer.wait_for_round(2)
        fill(small_disk / "filler", leave=0)
        problem = r"metrics\.jsonl cannot be written: No space left on device; training goes on"
        number = int(peer.wait_for_text(problem + TWO_ROUNDS_LATER)[1])
        (small_disk / "filler").unlink()
        lost = peer.wait_for_text(r"metrics\.jsonl is written again; (\d+) events dropped")[1]
        peer.wait_for_round(number + 1)
        assert peer.terminate() == 0
        assert len(re.findall(problem, peer.text())) == 1
        (fault,) = (fault for fault in peer.events("fault") if fault["kind"] == "metrics")
        assert fault["detail"].endswith(
            f"metrics.jsonl cannot be written: No space left on device: {lost} events dropped"
        )
        assert number not in peer.rounds()
        assert peer.events("leave")


@pytest.mark.swarm
def test_a_full_disk_is_said_in_one_line(small_disk: Path, tmp_path: Path) -> None:
    """As much room as the start takes, and not enough for a checkpoint."""
    fill(small_disk / "filler", leave=60_000)
    line = join("--config", config(tmp_path / "run.yaml"), "--experts", 8, out=small_disk / "out").line()
    assert re.search(r"out: .* MB of it for a checkpoint, but only 0\.1 MB are free; free some space", line)
    assert not (small_disk / "out").exists()
    fill(small_disk / "more", leave=0)
    line = join("--config", config(tmp_path / "run.yaml"), out=small_disk / "out").line()
    assert line.startswith(f"output directory {small_disk / 'out'}: No space left on device; free some on the disk")
    assert line.endswith(f"{small_disk}, or choose an --output-dir on another one")
    assert not (small_disk / "out").exists()
