"""Rounds of many parameters, or of many peers, without trainers: what their network processes need.

Peers on this machine exchange synthetic differences of a model with --parameters, a fifth of them shared and the rest
in experts, which the peers divide. Each row is one peer in one round:

group, exchange   seconds of the rendezvous and of the exchange, commit included
cpu               processor seconds of the network process, and of its p2pd
per_1e9           of both together, for 10^9 parameters that this peer contributes
encode ... rest   processor seconds of the parts: encoding and signing; decoding and checking; means and their encoding;
                  receiving results; the commit; its digests; and the rest of the network process
block_ms          the longest time for which the event loop ran nothing else
grown_mb          by how much memory of the network process that it does not share grows in the round, at most
sent, received    MB of payload
members, missing  of the round; parts that have not come
tries             until the round was committed
idle_percent      with --idle: of a core, network process and p2pd together, before the first round
answer_ms         the median, and the longest, time in which the first peer answers somebody who asks it for the run's
                  manifest every 10 ms

With --disk the reference and the differences lie on a disk, for machines that are short of memory. With --fault the
last peer is killed, or frozen for 10 seconds, in the middle of the last round but one: when it has averaged half of its
parts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from scripts.testing.benches.round_peer import PATIENCE_S, Task, ask, publish, take_part
from scripts.testing.benchmark import Row
from scripts.testing.forked_peer import ForkedPeer, ForkServer
from scripts.testing.local_peer import LocalPeerError
from spes_swarm.config.run import RoundConfig


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8, help="of the model")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--part-elements", type=int, default=RoundConfig(inner_steps=1).part_elements)
    parser.add_argument("--rounds", type=int, default=3, help="of which the first is not counted")
    parser.add_argument("--disk", type=Path, help="directory for the reference and the differences")
    parser.add_argument("--no-previous", action="store_true", help="peers keep nothing to take commits back")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds in which nothing happens, at first")
    parser.add_argument("--fault", choices=("kill", "freeze"))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each peer and round."""
    with tempfile.TemporaryDirectory(prefix="bench-round-") as name, ExitStack() as stack:
        tasks = [_task(options, index, Path(name)) for index in range(options.peers)]
        processes = []
        for task in tasks:
            task.place.mkdir()
            processes.append(ForkServer(main=take_part)([task.dumps()], task.place / "log"))
            stack.callback(processes[-1].kill)
        asked = tasks[0].place
        asker = ForkServer(main=ask)([str(asked)], asked / "log of the asker")
        stack.callback(asker.kill)
        if options.fault == "kill":
            processes.pop()
        for process, task in zip(processes, tasks, strict=False):
            _wait(process, task.place / "log")
        publish(asked / "over", "")
        _wait(asker, asked / "log of the asker")
        answers = json.loads((asked / "answers.json").read_text())
        for number in range(2, options.rounds + 1):
            for task in tasks[: len(processes)]:
                if not (measured := task.place / f"{number}.json").exists():
                    continue  # it has missed this round
                row = json.loads(measured.read_text())
                begun, ended = row.pop("begun"), row.pop("ended")
                times = sorted(seconds for at, seconds in answers if begun <= at <= ended) if not task.index else []
                row |= {"answer_ms": 1e3 * statistics.median(times), "longest_ms": 1e3 * times[-1]} if times else {}
                yield {"round": number, "peer": task.index, **row}


def _task(options: argparse.Namespace, index: int, directory: Path) -> Task:
    return Task(
        index=index,
        place=directory / str(index),
        first=directory / "0",
        parameters=int(options.parameters),
        num_peers=options.peers,
        num_experts=options.experts,
        codec=options.codec,
        part_elements=options.part_elements,
        num_rounds=options.rounds,
        disk=options.disk,
        keeps_previous=not options.no_previous,
        idle_s=options.idle,
        fault=options.fault if index == options.peers - 1 else None,
    )


def _wait(process: ForkedPeer, log: Path) -> None:
    if process.wait(PATIENCE_S) != 0:
        raise LocalPeerError(log.read_text(encoding="utf-8"))
