"""The data of a run, between real processes: what the founder prints, pasted as it is, never trains on other data."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.testing.local_peer import LocalPeer
from tests.helpers.repository import ROOT
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import REASONABLE_S, Swarm, swarm
from tests.helpers.token_files import save_headerless

pytestmark = pytest.mark.swarm


def text_file(path: Path, words: str) -> Path:
    """Enough text for some windows of 64 bytes, held-out ones included."""
    path.write_text("\n".join(f"{words} {i}" for i in range(2000)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A founder that trains on a text of its own."""
    directory = tmp_path_factory.mktemp("data")
    with swarm(directory) as started:
        started.launch = launch_slow(0.3)  # it trains for as long as the tests take
        started.found("--data", text_file(directory / "verses.txt", "to be or not to be"), "--experts", 4)
        yield started


def printed_command(founder: LocalPeer) -> str:
    founder.wait_for("join")
    return next(line for line in founder.text().splitlines() if "-m spes_swarm.join --initial-peers" in line).strip()


def test_the_printed_command_does_not_train_on_other_data(running: Swarm, tmp_path: Path) -> None:
    command = printed_command(running.peers[0])
    assert " --num-threads 1 " in command  # as the founder has it
    out = tmp_path / "pasted"
    # Where it is pasted, no file has the founder's name.
    pasted = subprocess.run(
        f"{command} --max-rounds 1 --output-dir {shlex.quote(str(out))}",
        shell=True,
        capture_output=True,
        cwd=ROOT,
        timeout=2 * REASONABLE_S,
        check=False,
    )
    (line,) = pasted.stderr.decode().splitlines()
    assert pasted.returncode == 2
    assert "'verses.txt' does not exist" in line
    assert not (out / "manifest.json").exists()  # it has not even become part of the run


def test_other_data_are_refused_or_recorded_and_remembered(running: Swarm, tmp_path: Path) -> None:
    founder = running.peers[0]
    other = text_file(tmp_path / "prose.txt", "it was the best of times")
    refused = running.join("--data", other, name="refused")
    assert refused.wait() == 2
    line = refused.text().splitlines()[-1]
    assert line.startswith("join: ")
    for part in ("'verses.txt'", "'prose.txt'", "--data-differs"):
        assert part in line
    assert not refused.events("sync")  # no weights were fetched

    accepted = running.join("--data", other, "--data-differs", "--max-rounds", 1, name="other")
    assert accepted.wait() == 0, accepted.tail()
    (event,) = accepted.events("data")
    assert (event["name"], event["differs"]) == ("prose.txt", True)
    assert event["digest"] != founder.events("data")[0]["digest"]

    # Without a word about data it goes on with the same ones.
    again = running.join("--max-rounds", 1, name="other")
    assert again.wait() == 0, again.tail()
    (event_again,) = again.events("data")
    assert {key: event_again[key] for key in ("name", "digest", "differs")} == {
        key: event[key] for key in ("name", "digest", "differs")
    }


def test_the_files_of_spes_and_olmo_are_trained_on_as_they_are(tmp_path: Path) -> None:
    """Memmaps without a header, in a list that `find` wrote; another peer has a copy in a directory."""
    here, copy = tmp_path / "here", tmp_path / "copy"
    here.mkdir()
    for number, words in enumerate((b"to be or not to be ", b"that is the question ")):
        save_headerless(here / f"0_{number}.npy", [*words * 400, 256], "uint32")
    shutil.copytree(here, copy)
    (here / "file_list.txt").write_text(f"{here}/0_1.npy\n{here}/0_0.npy\n")
    with swarm(tmp_path) as started:
        founder = started.found("--data", here / "file_list.txt", "--experts", 4)
        joiner = started.join("--data", copy, "--max-rounds", 1, name="copy")
        assert joiner.wait() == 0, joiner.tail()
        (event,), (founded,) = joiner.events("data"), founder.events("data")
        assert (founded["name"], founded["shards"]) == ("here", 2)
        assert (event["digest"], event["differs"]) == (founded["digest"], False)
        assert joiner.events("round")

        # ids that are not tokens of this run: one line, before any weights are fetched.
        save_headerless(copy / "0_0.npy", [257] * 5000, "uint32")
        refused = started.join("--data", copy, name="refused")
        assert refused.wait() == 2
        line = refused.text().splitlines()[-1]
        assert line.startswith("join: ")
        assert "0_0.npy has no .npy header and does not hold ids of the run's vocabulary of 257 tokens" in line
        assert not refused.events("sync")
