"""Two ranks, real processes connected by gloo, train as one: the same bits, and no rank outlives the other."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from scripts.testing.forked_peer import ForkedPeer, ForkServer
from spes_swarm import join
from tests.helpers import rank_trainer
from tests.helpers.lone_trainer import read_events
from tests.helpers.rank_trainer import INNER_STEPS, OTHERS, ROUNDS
from tests.helpers.swarm import REASONABLE_S

pytestmark = pytest.mark.slow


@dataclass
class Rank:
    """One process. What it writes, on stdout and stderr, comes through a pipe."""

    process: ForkedPeer
    output: TextIO

    def end(self) -> tuple[int, str]:
        """Waits until it has ended; returns its exit code and the rest of its output."""
        rest = self.output.read()
        return self.process.wait(REASONABLE_S), rest


@contextmanager
def two_ranks(
    directory: Path, rounds: int = ROUNDS, form: str = "fp32", precision: str = "fp32"
) -> Iterator[list[Rank]]:
    """Rank 0 trains in a directory; rank 1 is what torchrun starts. `form` is that of others' experts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = [(rank_trainer.main, [str(directory), str(rounds), form, precision]), (join.main, [])]
    ranks: list[Rank] = []
    with ExitStack() as stack:
        for number, (main, arguments) in enumerate(commands):
            environment = {
                **os.environ,
                "RANK": str(number),
                "LOCAL_RANK": str(number),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "test",
            }
            pipe = directory.with_name(f"output{number}")
            os.mkfifo(pipe)
            process = ForkServer(main=main, environment=environment)(arguments, pipe)
            stack.callback(process.wait, REASONABLE_S)
            stack.callback(process.kill)
            ranks.append(Rank(process, stack.enter_context(pipe.open(encoding="utf-8"))))
        yield ranks


def wait_for_a_round(ranks: list[Rank]) -> None:
    assert ranks[0].output.readline() == "committed\n"


@pytest.mark.parametrize(("form", "precision"), [("fp32", "fp32"), ("int8", "bf16")])
def test_two_ranks_train_to_the_bits_of_one(tmp_path: Path, form: str, precision: str) -> None:
    """Through merges, a change of experts and evaluations, and through signals, which torchrun sends to all ranks."""
    with two_ranks(tmp_path / "two", form=form, precision=precision) as ranks:
        wait_for_a_round(ranks)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            ranks[1].process.send_signal(number)
        alone = rank_trainer.train(tmp_path / "one", form=form, precision=precision)
        (code, output), other = [rank.end() for rank in ranks]
    assert code == 0, output
    assert other == (0, "")
    *committed, outcome = output.splitlines()
    assert committed == ["committed"] * (ROUNDS - 1)
    together = json.loads(outcome)
    assert together.pop("losses") == pytest.approx(alone.pop("losses"), rel=1e-6)
    assert together == alone
    assert [loss is not None for loss in together["evaluated"]] == [True, True, False, True, True]
    assert len(set(together["digests"])) == ROUNDS
    assert together["merged"] == [2, 4]
    assert together["held"] == list(OTHERS)
    assert together["tokens"] == [2 * 64] * ROUNDS * INNER_STEPS


@pytest.mark.parametrize("killed", [0, 1])
def test_the_other_rank_ends_with_one_line(tmp_path: Path, killed: int) -> None:
    with two_ranks(tmp_path / "two", rounds=10**6) as ranks:
        wait_for_a_round(ranks)
        ranks[killed].process.kill()
        code, output = ranks[1 - killed].end()
        assert code == 1
    if killed == 1:  # rank 0 has left gracefully: with a checkpoint of its last step
        assert [event["kind"] for event in read_events(tmp_path / "two" / "metrics.jsonl", "fault")] == ["rank"]
        (checkpoint,) = (tmp_path / "two" / "checkpoints").glob("round-*")
        steps = read_events(tmp_path / "two" / "metrics.jsonl", "step")
        assert json.loads((checkpoint / "meta.json").read_text(encoding="utf-8"))["step"] == steps[-1]["step"]
    errors = output.replace("committed\n", "")
    assert errors == ("rank 0: " if killed else "join: rank 1 ends: ") + "another rank of this peer has ended\n"
