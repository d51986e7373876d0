"""Measures a peer's memory against the estimate made before it starts (spes_swarm/peer/memory/capacity.py).

    .venv/bin/python scripts/bench_memory.py --experts 8 1

A lone peer trains OLMoE of 54.8 M weights on the CPU for two rounds, once with each number of experts. The result is
the largest sum of its processes' proportional set sizes, less that of a peer with a model of width 32, which is what
Python, torch and hivemind need. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from scripts.testing.local_peer import LocalPeer
from scripts.testing.tiny_run import tiny_run
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory.capacity import Workload

ROUNDS = 2
SAMPLE_S = 0.4


@dataclass(frozen=True)
class Reading:
    """The memory of one peer."""

    experts: int
    counted_bytes: int
    measured_bytes: int  # beyond those of a peer with a tiny model


def run_section(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """The `run` section for an OLMoE on bytes."""
    run = tiny_run(
        "memory",
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        training={"learning_rate": 1e-3, "warmup_steps": 2, "total_steps": 100},
        round={"inner_steps": 3, "codec": "fp32", "window_s": 5.0, "stall_timeout_s": 4.0, "timeout_s": 60.0},
        merge={"alpha": 0.0, "steps": 0, "interval": 0},
        experts_per_peer=8,
        evaluation={"sequences": 8, "every_rounds": 1},
    )
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
    run["model"]["settings"] |= {"num_hidden_layers": num_layers, **heads}
    return run


def largest_bytes(directory: Path, run: dict[str, Any], experts: int) -> int:
    """The largest sampled sum of proportional set sizes while a peer trains."""
    directory.mkdir()
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
    arguments = ["--config", str(config), "--experts", str(experts), "--max-rounds", str(ROUNDS), "--num-threads", "1"]
    largest = 0
    with LocalPeer(directory / "peer", [*arguments, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]) as peer:
        while peer.process.poll() is None:
            sizes = 0
            for process in peer.tree():
                try:
                    sizes += process.memory_full_info().pss
                except psutil.Error:  # it has just ended
                    continue
            largest = max(largest, sizes)
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(SAMPLE_S)
        if peer.process.returncode != 0:
            raise SystemExit(peer.tail())
    return largest


def main() -> int:
    """Measures each number of experts."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--json", type=Path, default=Path("runs/memory.json"))
    options = parser.parse_args()
    run = run_section(hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=8)
    workload = Workload.of(RunConfig.from_dict(run, "benchmark"), PeerConfig(), torch.device("cpu"))
    readings: list[Reading] = []
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        bare = largest_bytes(Path(name) / "bare", run_section(32, 32, 2, 2), 8)
        print(f"{workload.layout.num_elements / 1e6:.1f} M weights; {bare / 1e6:,.0f} MB with a tiny model")
        print(f"{'experts':>7} {'counted, MB':>12} {'measured, MB':>13} {'ratio':>6}")
        for experts in options.experts:
            measured = largest_bytes(Path(name) / str(experts), run, experts) - bare
            counted = workload.needed(experts)[1]
            readings.append(Reading(experts, counted, measured))
            print(
                f"{experts:>7} {counted / 1e6:>12,.0f} {measured / 1e6:>13,.0f} {measured / counted:>6.2f}", flush=True
            )
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps([asdict(reading) for reading in readings], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
