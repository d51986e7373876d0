"""Measures the copy, bytes and seconds of a checkpoint, against a blocking write of the whole state.

    .venv/bin/python scripts/bench_checkpoint.py --parameters 30 300 --json runs/checkpoint.json

A peer holds a quarter of 16 experts; a third of the parameters are shared. Weights and moments are random. Each round
changes either all blocks of the reference ("all", as in a swarm that trains every expert), or only the shared one and
those of this peer ("own", as in a swarm that trains a quarter of them), and this peer's live weights either equal the
reference, as after a commit, or not, as after an expert merge or with overlapping rounds ("live differs").

The baseline writes the same state as earlier versions did, while training waits: the reference, the live weights and
the moments as three safetensors files by the safetensors library, their digests from reading them again, fsync, rename.
Both write to --directory; the page cache is synced before each measurement. All kinds take turns; medians of --repeats.
"copy" is what training waits for at most: a peer copies during the forward and backward pass of its next step.
"reference read" is when the next round may change the reference.

Then a lone peer trains 2 of 8 experts of an OLMoE of 54.8 M parameters on one thread, in rounds of --inner-steps, and
writes a checkpoint after each: the pauses that it reports, as a share of its rounds (without the first and the last).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from blake3 import blake3
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from scripts.testing.local_peer import LocalPeer
from scripts.testing.tiny_run import tiny_run
from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.user_paths import sync_to_disk
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.storage.checkpoint import CheckpointMeta
from spes_swarm.storage.checkpoint_files import Array
from spes_swarm.storage.checkpoint_writing import PeerState, save_checkpoint

NUM_EXPERTS, NUM_HELD = 16, 4
PEER_ROUNDS = 7
ARMS = (("all", False), ("all", True), ("own", False), ("own", True))  # blocks that change, live differs
Figures = dict[str, Any]


class Peer:
    """The state of a peer without a model: what a checkpoint is made from."""

    def __init__(self, num_parameters: int) -> None:
        expert = num_parameters * 2 // 3 // NUM_EXPERTS
        shared = num_parameters - expert * NUM_EXPERTS
        self.layout = Layout.build({"shared": (shared,)}, {"experts": (NUM_EXPERTS, expert)})
        self.rng = np.random.default_rng(0)
        self.reference = Reference(self.layout, self.random(num_parameters))
        self.held = list(range(NUM_HELD))
        self.own = self.layout.trained_blocks(self.held)
        self.moments: dict[str, Array] = {
            f"{block.name}/{key}": self.random(block.size) for block in self.own for key in ("exp_avg", "exp_avg_sq")
        }
        self.live = {block.index: self.random(block.size) for block in self.own}
        self.round = 0

    def random(self, size: int) -> FloatArray:
        """Normally distributed values, which do not compress."""
        return self.rng.standard_normal(size, dtype=np.float32)

    def change(self, which: str, *, live_differs: bool) -> None:
        """Commits a round."""
        self.round += 1
        blocks = self.layout.blocks if which == "all" else self.own
        for block in blocks:
            self.reference.values_N[block.start : block.stop] += np.float32(0.01)
        self.reference.finish(self.round, [(block.index, self.round) for block in blocks])
        for block in self.own:
            self.live[block.index][:] = self.reference.values_N[block.start : block.stop]
            self.live[block.index] += np.float32(0.01 * live_differs)

    @property
    def meta(self) -> CheckpointMeta:
        """The metadata of the round."""
        return CheckpointMeta(
            run_id="run", peer_id="peer", layout_digest=self.layout.digest, round=self.round,
            versions=list(self.reference.versions), reference_digest=self.reference.digest.hex(), held=self.held,
            step=self.round, tokens=0, steps_in_round=0, routed=[0] * NUM_EXPERTS, cursor={}, commits=[], marks="",
        )  # fmt: skip

    def copy(self) -> PeerState:
        """The same comparison and copies as in spes_swarm/training/saving.py."""
        live: dict[int, FloatArray] = {}
        for block in self.own:
            copy_N = self.live[block.index].copy()
            reference_N = self.reference.values_N[block.start : block.stop]
            if not np.array_equal(copy_N.view(np.uint32), reference_N.view(np.uint32)):
                live[block.index] = copy_N
        return PeerState(
            meta=self.meta,
            layout=self.layout,
            reference_N=self.reference.values_N,
            digests=self.reference.digests,
            live=live,
            optimiser={name: moments.copy() for name, moments in self.moments.items()},
        )


def measure(peer: Peer, directory: Path) -> Figures:
    """One checkpoint in the background."""
    started = time.perf_counter()
    state = peer.copy()
    copy_s = time.perf_counter() - started
    read: list[float] = []
    written = save_checkpoint(directory, state, 2, lambda: read.append(time.perf_counter() - started))
    return {
        "copy_s": copy_s,
        "reference_read_s": read[0],
        "seconds": time.perf_counter() - started,
        "bytes_written": written.bytes_written,
        "bytes_linked": written.bytes_linked,
    }


def measure_before(peer: Peer, directory: Path) -> Figures:
    """One checkpoint as earlier versions wrote it; training waits for all of it."""
    started = time.perf_counter()
    temporary, final = directory / ".temporary", directory / f"whole-{peer.round:08d}"
    temporary.mkdir(parents=True)
    reference_N = peer.reference.values_N
    save_file({b.name: reference_N[b.start : b.stop] for b in peer.layout.blocks}, temporary / "reference.safetensors")
    save_file({block.name: peer.live[block.index] for block in peer.own}, temporary / "live.safetensors")
    save_file(peer.moments, temporary / "optimiser.safetensors")
    digests = {path.name: blake3().update_mmap(path).hexdigest() for path in temporary.iterdir()}
    (temporary / "meta.json").write_text(json.dumps(digests), encoding="utf-8")
    num_bytes = sum(path.stat().st_size for path in temporary.iterdir())
    for path in temporary.iterdir():
        sync_to_disk(path)
    sync_to_disk(temporary)
    temporary.rename(final)
    sync_to_disk(directory)
    for old in sorted(directory.glob("whole-*"))[:-2]:
        shutil.rmtree(old)
    seconds = time.perf_counter() - started
    return {"copy_s": seconds, "seconds": seconds, "bytes_written": num_bytes, "bytes_linked": 0}


def medians(rows: list[Figures]) -> Figures:
    """The median of each figure."""
    return {key: median(row[key] for row in rows) for key in rows[0]}


def bench(num_parameters: int, repeats: int, directory: Path) -> Figures:
    """All arms at one size."""
    peer = Peer(num_parameters)

    def timed(task: Callable[[Peer, Path], Figures], name: str) -> Figures:
        (directory / name).mkdir(parents=True, exist_ok=True)
        os.sync()
        return task(peer, directory / name)

    before: list[Figures] = []
    rows: dict[tuple[str, bool], list[Figures]] = {arm: [] for arm in ARMS}
    for _ in range(repeats + 1):
        before.append(timed(measure_before, "whole"))
        for changed, live_differs in ARMS:
            peer.change(changed, live_differs=live_differs)
            rows[changed, live_differs].append(timed(measure, "blocks"))
    # The first of each is not counted: a virtual machine may have to allocate the memory first.
    whole = medians(before[1:])
    arms: list[Figures] = []
    for changed, live_differs in ARMS:
        row = medians(rows[changed, live_differs][1:])
        ratios = {f"{key}_ratio": row[key] / whole[key] for key in ("copy_s", "seconds", "bytes_written")}
        arms.append({"changed": changed, "live_differs": live_differs, **row, **ratios})
    shutil.rmtree(directory)
    trained = sum(block.size for block in peer.own)
    return {"parameters": num_parameters, "trained": trained, "whole": whole, "arms": arms}


def measure_peer(directory: Path, inner_steps: int) -> Figures:
    """Pauses and rounds of a real peer, which writes a checkpoint after each round."""
    run = tiny_run(
        "checkpoint",
        hidden_size=512,
        intermediate_size=1024,
        training={"learning_rate": 1e-3, "warmup_steps": 2, "total_steps": 1000, "batch_size": 8},
        round={"inner_steps": inner_steps, "window_s": 5.0, "stall_timeout_s": 4.0, "timeout_s": 60.0},
        merge={"alpha": 0.0, "steps": 0, "interval": 0},
        experts_per_peer=2,
        evaluation={"sequences": 8, "every_rounds": 0},
    )
    run["model"]["settings"] |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({"run": run}), encoding="utf-8")
    arguments = ["--config", str(config), "--max-rounds", str(PEER_ROUNDS), "--num-threads", "1"]
    arguments += ["--checkpoint-minutes", "0", "--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
    with LocalPeer(directory / "peer", arguments) as peer:
        if peer.wait() != 0:
            raise SystemExit(peer.tail())
        checkpoints = {event["round"]: event for event in peer.events("checkpoint")}
        rounds, steps = peer.rounds(), peer.events("step")
    rows: list[Figures] = []
    for number in range(2, PEER_ROUNDS):
        step_s = [b["time"] - a["time"] for a, b in pairwise(steps) if a["round"] == b["round"] == number]
        row = {"round_s": rounds[number + 1]["time"] - rounds[number]["time"], "step_s": median(step_s)}
        row |= {key: checkpoints[number][key] for key in ("pause_s", "seconds", "bytes_written", "bytes_linked")}
        rows.append(row | {"pause_share": row["pause_s"] / row["round_s"]})
    return {"inner_steps": inner_steps, **medians(rows), "largest_pause_share": max(r["pause_share"] for r in rows)}


def table_of(result: Figures) -> Table:
    """One line for each arm, and one for the baseline."""
    title = f"{result['parameters'] / 1e6:,.0f} M parameters, {result['trained'] / 1e6:,.0f} M of them trained"
    table = Table(title=title, title_justify="left")
    table_columns = ("checkpoint", "copy, s", "ratio", "reference read, s", "seconds", "ratio", "written, MB", "ratio")
    for name in (*table_columns, "linked, MB"):
        table.add_column(name, justify="left" if name == "checkpoint" else "right")
    whole = result["whole"]
    size = f"{whole['bytes_written'] / 1e6:,.0f}"
    table.add_row("whole, blocking", f"{whole['copy_s']:.3f}", "1", "", f"{whole['seconds']:.2f}", "1", size, "1", "0")
    for arm in result["arms"]:
        table.add_row(
            f"{arm['changed']} blocks{', live differs' if arm['live_differs'] else ''}",
            f"{arm['copy_s']:.3f}",
            f"{arm['copy_s_ratio']:.3f}",
            f"{arm['reference_read_s']:.2f}",
            f"{arm['seconds']:.2f}",
            f"{arm['seconds_ratio']:.2f}",
            f"{arm['bytes_written'] / 1e6:,.0f}",
            f"{arm['bytes_written_ratio']:.2f}",
            f"{arm['bytes_linked'] / 1e6:,.0f}",
        )
    return table


def main() -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, nargs="+", default=[30, 300], metavar="M", help="sizes in millions")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each kind")
    parser.add_argument("--inner-steps", type=int, default=20, metavar="N", help="steps in a round of the real peer")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="directory on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: expected at least 1")
    results: list[Figures] = []
    with tempfile.TemporaryDirectory(prefix="spes-bench-", dir=options.directory) as name:
        for millions in options.parameters:
            results.append(bench(10**6 * millions, options.repeats, Path(name) / str(millions)))
            Console(width=120).print(table_of(results[-1]))
        peer = measure_peer(Path(name), options.inner_steps)
    print("\na real peer: " + ", ".join(f"{key} {value:,.4g}" for key, value in peer.items()))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"load": os.getloadavg(), "results": results, "peer": peer}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
