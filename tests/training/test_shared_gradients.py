"""Two ranks, real processes connected by gloo, train as one: the same bits, and no rank outlives the other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.lone_trainer import read_events
from tests.helpers.rank_trainer import INNER_STEPS, OTHERS, ROUNDS, train
from tests.helpers.repository import ROOT
from tests.helpers.swarm import REASONABLE_S

pytestmark = pytest.mark.slow


@contextmanager
def two_ranks(directory: Path, storage: str, rounds: int = ROUNDS) -> Iterator[list[subprocess.Popen[str]]]:
    """Rank 0 trains in a directory, rank 1 is started as a user does; `storage` is that of others' experts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = ["tests.helpers.rank_trainer", str(directory), str(rounds), storage]
    commands = [trainer, ["spes_swarm.join", "--unknown-flag"]]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def wait_for_a_round(ranks: list[subprocess.Popen[str]]) -> None:
    output = ranks[0].stdout
    assert output is not None
    assert output.readline() == "committed\n"


@pytest.mark.parametrize("storage", ["device", "ranks"])
def test_two_ranks_train_to_the_bits_of_one(tmp_path: Path, storage: str) -> None:
    """Through merges, a change of experts and evaluations, and through signals, which torchrun sends to all ranks."""
    with two_ranks(tmp_path / "two", storage) as ranks:
        wait_for_a_round(ranks)
        for number in (signal.SIGTERM, signal.SIGINT):
            ranks[1].send_signal(number)
        alone = train(tmp_path / "one", storage=storage)
        ends = [process.communicate(timeout=REASONABLE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], ends
    together = json.loads(ends[0][0].splitlines()[-1])
    assert together.pop("losses") == pytest.approx(alone.pop("losses"), rel=1e-6)
    assert 2 * together.pop("foreign_bytes") == (2 if storage == "device" else 1) * alone.pop("foreign_bytes")
    assert together == alone
    assert [loss is not None for loss in together["evaluated"]] == [True, True, False, True, True]
    assert len(set(together["digests"])) == ROUNDS
    assert together["merged"] == [2, 4]
    assert together["held"] == list(OTHERS)
    assert together["tokens"] == [2 * 64] * ROUNDS * INNER_STEPS
    assert ends[1] == ("", "")


@pytest.mark.parametrize("storage", ["device", "ranks"])
@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_rank_ends_with_one_line(tmp_path: Path, killed: int, storage: str) -> None:
    with two_ranks(tmp_path / "two", storage, rounds=10**6) as ranks:
        wait_for_a_round(ranks)
        ranks[killed].kill()
        _, errors = ranks[1 - killed].communicate(timeout=REASONABLE_S)
        assert ranks[1 - killed].returncode == 1
    if killed == 1:  # rank 0 has left in order: with a checkpoint of its last step
        assert [event["kind"] for event in read_events(tmp_path / "two" / "metrics.jsonl", "fault")] == ["rank"]
        (checkpoint,) = (tmp_path / "two" / "checkpoints").glob("round-*")
        steps = read_events(tmp_path / "two" / "metrics.jsonl", "step")
        assert json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))["step"] == steps[-1]["step"]
    assert errors == ("rank 0: " if killed else "join: rank 1 ends: ") + "another rank of this peer has ended\n"
