"""Measures what seeing inside a peer costs: its log and the names of its parts in traces.

    .venv/bin/python scripts/bench_logging.py

Two figures are multiplied: how long one log line, or one named part, takes in this process, and how many of them there
are per step and per round in a real swarm of the quickstart on this machine. A difference of two swarms, with and
without a log, would be far below its noise. Prints a table and writes JSON, with the bytes that ten days at this pace
would add: `log.txt` is bounded, metrics.jsonl, which has every step, is not.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from scripts.testing.local_peer import LocalPeer
from spes_swarm.base import log
from spes_swarm.training.profiling import span

CONFIG = Path("configs/quickstart.yaml")
NUM_PEERS = 3
PROFILED_STEPS = 10
SETTLED = 3  # rounds after which a swarm has nothing to say about its beginning
DAY_S = 86_400
_LINE = (
    "round %d: group of %d, from %s; %d of %d parts; exchange %.3f s, led by QmSomePeerOfTheSwarmWithAnIdOfThisLength"
)


def cpu_seconds(action: Callable[[], object], repeats: int) -> float:
    """The CPU time of one call."""
    begun = time.process_time()
    for _ in range(repeats):
        action()
    return (time.process_time() - begun) / repeats


def cost_of_line(repeats: int) -> float:
    """CPU seconds of a line, with rotation."""
    logger = logging.getLogger("spes_swarm.bench")
    with tempfile.TemporaryDirectory() as directory, log.writing(Path(directory) / log.NAME, "info", "trainer"):
        return cpu_seconds(lambda: logger.info(_LINE, 3, 0, 351, 0.02, 0.25, 64 * "0"), repeats)


def cost_of_span(repeats: int) -> float:
    """CPU seconds of a named part while nothing is recorded."""

    def part() -> None:
        with span("part"):
            pass

    return cpu_seconds(part, repeats)


def run_swarm(directory: Path, num_rounds: int) -> dict[str, float]:
    """What the founder of a quickstart swarm writes per step and round; times are medians in seconds."""
    common = ["--num-threads", "1", "--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--wait-for-peers", str(NUM_PEERS)]
    peers = [LocalPeer(directory / "0", [*common, "--config", str(CONFIG), "--profile", str(PROFILED_STEPS)])]
    try:
        address = peers[0].wait_for("listening")["maddrs"][0]
        peers += [
            LocalPeer(directory / str(number), [*common, "--initial-peers", address]) for number in range(1, NUM_PEERS)
        ]
        peers[0].wait_for_round(num_rounds)
    finally:
        for peer in peers:
            peer.__exit__()
    output_dir, steps = peers[0].output_dir, peers[0].events("step")
    commits = [event["time"] for event in peers[0].events("round")][SETTLED:]
    first, last = commits[0], commits[-1]
    with gzip.open(output_dir / "trace.json.gz", "rt", encoding="utf-8") as trace:
        names = [event["name"] for event in json.load(trace)["traceEvents"] if event.get("cat") == "user_annotation"]
    parts = [name for name in names if name.startswith("spes/")]
    written = (output_dir / log.NAME).read_text(encoding="utf-8")
    lines = [line for line in written.splitlines(keepends=True) if settled(line, first, last)]
    events = (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    num_events = [len(line) for line in events if first < json.loads(line)["time"] <= last]
    within = [event["time"] for event in steps if first < event["time"] <= last]
    return {
        "round_s": statistics.median(after - before for before, after in pairwise(commits)),
        "step_s": statistics.median(after - before for before, after in pairwise(within)),
        "lines_per_round": len(lines) / (len(commits) - 1),
        "parts_per_step": len(parts) / sum(name == "spes/optimiser" for name in parts),
        "log_bytes_per_day": sum(map(len, lines)) / (last - first) * DAY_S,
        "metrics_bytes_per_day": sum(num_events) / (last - first) * DAY_S,
    }


def settled(line: str, first: float, last: float) -> bool:
    """True for a line of the log that was written in that time; lines of a traceback have none."""
    at = re.match(r"(\S+)Z ", line)
    return at is not None and first < datetime.fromisoformat(f"{at[1]}+00:00").timestamp() <= last


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the swarm")
    parser.add_argument("--repeats", type=int, default=20_000, help="lines and parts of which one is timed")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    if arguments.rounds <= 2 * SETTLED:
        parser.error(f"--rounds: more than {2 * SETTLED}")
    with tempfile.TemporaryDirectory() as directory:
        figures = run_swarm(Path(directory), arguments.rounds)
    figures["line_s"], figures["part_s"] = cost_of_line(arguments.repeats), cost_of_span(arguments.repeats)
    figures["share_of_step"] = figures["parts_per_step"] * figures["part_s"] / figures["step_s"]
    figures["share_of_round"] = figures["lines_per_round"] * figures["line_s"] / figures["round_s"]
    bound = log.MAX_BYTES * log.NUM_FILES
    log_mb, metrics_mb = (10 * figures[f"{name}_bytes_per_day"] / 1e6 for name in ("log", "metrics"))
    table = [
        ("one log line, us of CPU", 1e6 * figures["line_s"]),
        ("log lines per round", figures["lines_per_round"]),
        ("a round, s", figures["round_s"]),
        ("share of the log in a round, %", 100 * figures["share_of_round"]),
        ("one named part, us of CPU", 1e6 * figures["part_s"]),
        ("named parts per step", figures["parts_per_step"]),
        ("a step, ms", 1e3 * figures["step_s"]),
        ("share of named parts in a step, %", 100 * figures["share_of_step"]),
        ("log.txt written in ten days, MB", log_mb),
        ("log.txt kept after ten days, MB", min(log_mb, bound / 1e6)),
        ("metrics.jsonl after ten days, MB", metrics_mb),
    ]
    for name, value in table:
        print(f"{name:42}{value:12.3f}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
