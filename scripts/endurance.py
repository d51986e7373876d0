"""Measures whether the memory of a long-lived peer grows while others come and go.

One peer stays. Others join it one after another, train with it, and in turn leave or are killed. After each of them the
private memory (USS) of the trainer, the network process and p2pd of the first peer is read. At the end nothing of the
others may be left: no process, no socket directory.

    python scripts/endurance.py --cycles 60 --json endurance.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import LocalPeer
from scripts.testing.tiny_run import tiny_run

_WARM_UP = 12  # cycles until caches, pools and tables have reached their size
_WINDOW = 5  # cycles whose median is compared, so that one reading does not decide
_LIMIT = 0.05
_TIDY_S = 30.0
_RUN = tiny_run(
    "endurance",
    training={"learning_rate": 3e-3, "warmup_steps": 10, "total_steps": 20000},
    round={
        "inner_steps": 10,
        "window_s": 6.0,
        "stall_timeout_s": 3.0,
        "timeout_s": 30.0,
        "progress_ttl_s": 6.0,
        "lease_s": 12.0,
    },
    merge={"alpha": 0.1, "steps": 400, "interval": 20},
    experts_per_peer=4,
    evaluation={"sequences": 8, "every_rounds": 1},
)


def memory(peer: LocalPeer) -> dict[str, float]:
    """Private memory of each kind of process of a peer in MiB."""
    sizes: dict[str, float] = {}
    for process in peer.tree():
        kind = "p2pd" if process.name() == "p2pd" else "trainer" if process.pid == peer.process.pid else "network"
        sizes[kind] = sizes.get(kind, 0.0) + process.memory_full_info().uss / 2**20
    return sizes


def cycle(number: int, directory: Path, founder: LocalPeer, common: list[str]) -> list[psutil.Process]:
    """Lets one peer join, train and go; returns its processes."""
    arguments = [*common, "--initial-peers", founder.address()]
    with LocalPeer(directory / f"guest{number}", arguments, ForkServer()) as guest:
        first = guest.wait_for("round", lambda event: event["peers"] >= 2, 120)["round"]
        founder.wait_for_round(first + 1, 120)
        tree = guest.tree()
        if number % 2:
            guest.kill()
        else:
            guest.terminate(60)
    return tree


def main() -> int:
    """Command line entry point; exit code 1 if memory has grown too much or anything is left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console()
    readings: list[dict[str, float]] = []
    guests: list[psutil.Process] = []
    with tempfile.TemporaryDirectory(prefix="endurance-") as name:
        directory = Path(name)
        os.environ["TMPDIR"] = name  # what is left in this temporary directory comes from these peers only
        config = directory / "run.yaml"
        config.write_text(yaml.safe_dump({"run": _RUN}), encoding="utf-8")
        common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
        with LocalPeer(directory / "founder", [*common, "--config", str(config)], ForkServer()) as founder:
            founder.wait_for_round(1, 120)
            for number in range(options.cycles):
                guests += cycle(number, directory, founder, common)
                readings.append(memory(founder))
                line = ", ".join(f"{kind} {size:.1f}" for kind, size in sorted(readings[-1].items()))
                console.print(f"{number + 1:3d} of {options.cycles}: MiB {line}")
            own = {f"spes_swarm-{process.pid}-" for process in founder.tree()}
            psutil.wait_procs(guests, timeout=10)
            orphans = [process.pid for process in guests if process.is_running()]
            # Any other peer on the machine removes the directories of killed peers within some seconds.
            deadline = time.monotonic() + _TIDY_S
            while (left := foreign_sockets(directory, own)) and time.monotonic() < deadline:
                time.sleep(0.5)
            rounds = len(founder.rounds())
    result = summary(readings, console)
    result |= {"cycles": options.cycles, "rounds": rounds, "orphans": orphans, "sockets_left": left}
    console.print(f"{rounds} rounds; processes left: {orphans or 'none'}; socket directories left: {left or 'none'}")
    if options.json:
        options.json.write_text(json.dumps(result | {"readings": readings}, indent=1), encoding="utf-8")
    return 1 if result["growth"] > _LIMIT or orphans or left else 0


def foreign_sockets(directory: Path, own: set[str]) -> list[str]:
    """Socket directories whose names begin with none of these prefixes."""
    names = [path.name for path in directory.glob("spes_swarm-*")]
    return [name for name in names if not any(name.startswith(prefix) for prefix in own)]


def summary(readings: list[dict[str, float]], console: Console) -> dict[str, Any]:
    """Prints and returns how much each process has grown since the warm-up."""
    early, late = readings[_WARM_UP : _WARM_UP + _WINDOW], readings[-_WINDOW:]
    table = Table("process", "MiB after warm-up", "MiB at the end", "growth")
    growth = 0.0
    for kind in [*sorted(readings[0]), "together"]:

        def size(reading: dict[str, float], kind: str = kind) -> float:
            return sum(reading.values()) if kind == "together" else reading[kind]

        first, last = median(map(size, early)), median(map(size, late))
        growth = last / first - 1
        table.add_row(kind, f"{first:.1f}", f"{last:.1f}", f"{growth:+.1%}")
    console.print(table)
    return {"growth": growth}


if __name__ == "__main__":
    sys.exit(main())
