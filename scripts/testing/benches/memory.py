"""A peer's memory against the estimate made before it starts (spes_swarm/peer/memory/capacity.py).

A lone peer trains OLMoE of 54.8 M weights on the CPU for two rounds, once with each number of experts. What is measured
is the largest sum of its processes' proportional set sizes, less that of a peer with a model of width 32, which is what
Python, torch and hivemind need. What is counted is for a swarm that trains all experts: a lone peer with few of them
gets no results of the others, and keeps none of their previous values.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from scripts.testing.benchmark import Row
from scripts.testing.local_peer import LocalPeer, LocalPeerError
from scripts.testing.tiny_run import tiny_run
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.memory.capacity import Workload

_ROUNDS = 2
_SAMPLE_S = 0.4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 1])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of experts."""
    run = _run_section(hidden_size=512, intermediate_size=1024, num_layers=4, num_heads=8)
    workload = Workload.of(RunConfig.from_dict(run, "benchmark"), PeerConfig(), torch.device("cpu"))
    with tempfile.TemporaryDirectory(prefix="memory-") as name:
        bare = _largest_bytes(Path(name) / "bare", _run_section(32, 32, 2, 2), 8)
        for experts in options.experts:
            measured = _largest_bytes(Path(name) / str(experts), run, experts) - bare
            counted = workload.needed(experts)[1]
            yield {
                "experts": experts,
                "counted_mb": counted / 1e6,
                "measured_mb": measured / 1e6,
                "ratio": measured / counted,
            }


def _run_section(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
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


def _largest_bytes(directory: Path, run: dict[str, Any], experts: int) -> int:
    """The largest sampled sum of proportional set sizes while a peer trains."""
    directory.mkdir()
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
    arguments = ["--config", str(config), "--experts", str(experts), "--max-rounds", str(_ROUNDS), "--num-threads", "1"]
    largest = 0
    with LocalPeer(directory / "peer", [*arguments, "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]) as peer:
        while peer.process.poll() is None:
            sizes = 0
            for process in peer.tree():
                with suppress(psutil.Error):  # it has just ended
                    sizes += process.memory_full_info().pss
            largest = max(largest, sizes)
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(_SAMPLE_S)
        if peer.process.returncode != 0:
            raise LocalPeerError(peer.tail())
    return largest
