"""Measures time and memory of exports and upcyclings, and how exactly an upcycled model reproduces the logits.

    .venv/bin/python scripts/bench_export.py --size-mb 400 --json runs/bench_export.json

Export: `python -m spes_swarm.export` on the checkpoint of a peer that holds half of the experts of an OLMoE of about
this size, in files of the default size and in small ones. Its time includes verifying the checkpoint (in the page
cache) and hashing the output, but not the start of Python. It is compared with the mean of two plain writes of as many
bytes to the same disk, one right before and one right after it; all include fsync. Medians of --repeats.

Upcycling: random dense models become mixtures of 8 experts, top 2, as in `spes_swarm.upcycle DENSE OUT --check`, once
with exact copies and once with the paper's noise. Its memory is bounded by 1.5 times the largest file of the output
plus the largest tensor of the input. Exit code 1 if it needs more, or if exact copies change a logit beyond rounding.

Every measurement runs in a fresh process, which does the same with a tiny model first. "private" is the peak of
anonymous memory (RssAnon, sampled every millisecond) above that at the start: it excludes pages of mapped files, which
the system can drop at any time. "resident" is the peak that includes them (VmHWM), which the kernel records exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from scripts.testing.benchmark import reset_peak, status_bytes
from spes_swarm import export
from spes_swarm.base.arguments import MAX_SHARD_SIZE
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.manifest import found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.convert.recipes import RECIPES, UpcyclingOptions
from spes_swarm.convert.upcycling import compare, upcycle
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.publishing.plain import split_blocks
from spes_swarm.publishing.snapshot import take_snapshot
from spes_swarm.storage.checkpoint import CheckpointMeta
from spes_swarm.storage.checkpoint_writing import PeerState, save_checkpoint
from spes_swarm.storage.run_directory import RunDirectory

SHARD_SIZES = (MAX_SHARD_SIZE, "50MB")
NOISE_STDS = (0.0, 0.02)  # exact copies, and the paper's
_SAMPLE_S = 0.001
_PIECE_BYTES = 8 << 20
_HELD = [0, 1, 2, 3]
_OLMOE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
_DENSE = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
Figures = dict[str, Any]


@contextlib.contextmanager
def observed(pipe: Connection) -> Iterator[None]:
    """Measures the code inside, together with the process at the other end of the pipe."""
    gc.collect()
    reset_peak()
    before = status_bytes("VmRSS")
    pipe.send(None)
    pipe.recv()
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    pipe.send({"seconds": seconds, "peak_resident_bytes": status_bytes("VmHWM") - before})


def measured(task: Callable[..., None], *arguments: Any) -> Figures:
    """Runs a task in a fresh process; returns what it reports, and its peak of private memory."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=task, args=(there, *arguments))
    process.start()
    there.close()
    try:
        here.recv()
        before = peak = status_bytes("RssAnon", process.pid or 0)
        times = [time.perf_counter()]
        here.send(None)
        while not here.poll(_SAMPLE_S):
            peak = max(peak, status_bytes("RssAnon", process.pid or 0))
            times.append(time.perf_counter())
        figures: Figures = here.recv() | here.recv()
    except EOFError:
        raise SystemExit(f"{task.__name__} failed") from None
    process.join()
    return {**figures, "peak_private_bytes": peak - before, "longest_sampling_gap_s": float(np.diff(times).max())}


# ------------------------------------------------------------------------------------------------------ export


def make_checkpoint(output_dir: Path, geometry: dict[str, int], size_bytes: int) -> None:
    """Creates a peer's output directory, with random weights of about this size."""
    run = load_config(default_config_path()).run
    assert run is not None
    content = run.to_dict()
    settings = content["model"]["settings"] | geometry
    hidden = settings["hidden_size"]
    layer_bytes = 4 * hidden * (4 * hidden + 3 * settings["num_experts"] * settings["intermediate_size"])
    content["model"]["settings"] = settings | {"num_hidden_layers": max(1, round(size_bytes / layer_bytes))}
    run = RunConfig.from_dict(content, "bench_export")
    layout = layout_of(build_model(run.model.type, run.model.settings, seed=0, device="cpu", on_meta=True))
    identity = Identity.load_or_create(output_dir / "identity.key")
    manifest = found_run(run, layout.digest, identity)
    reference_N = np.random.default_rng(0).standard_normal(layout.num_elements, dtype=np.float32)
    versions = [1] * len(layout.blocks)
    snapshot = take_snapshot(manifest, 1, versions, split_blocks(layout, reference_N))
    directory = RunDirectory(output_dir)
    directory.checkpoints.mkdir()
    directory.remember(manifest)
    meta = CheckpointMeta(
        run_id=manifest.run_id, peer_id=identity.peer_id, layout_digest=layout.digest, round=1, versions=versions,
        reference_digest=snapshot.digest, held=_HELD, step=1, tokens=0, steps_in_round=0,
        routed=[0] * layout.num_experts, cursor={}, commits=[], marks="",
    )  # fmt: skip
    trained_N = reference_N[: layout.blocks[1 + _HELD[-1]].stop]
    state = PeerState(
        meta=meta,
        layout=layout,
        reference_N=reference_N,
        digests=snapshot.digests,
        live={},
        optimiser={"exp_avg": trained_N, "exp_avg_sq": trained_N},
    )
    save_checkpoint(directory.checkpoints, state, keep=1)


def run_export(pipe: Connection, tiny: Path, output_dir: Path, destination: Path, shard_size: str) -> None:
    """Exports, in a process of its own."""
    with contextlib.redirect_stdout(io.StringIO()):
        code = export.main([str(tiny), str(destination.with_name("warm-up"))])
        with observed(pipe):
            code |= export.main([str(output_dir), str(destination), "--max-shard-size", shard_size])
    if code:
        raise SystemExit(code)
    started = time.perf_counter()
    for path in destination.iterdir():
        with path.open("rb") as file:
            os.fsync(file)
    pipe.send({"fsync_s": time.perf_counter() - started})


def write_seconds(path: Path, num_bytes: int) -> float:
    """Time to write this many bytes to a file, fsync included. The file is removed."""
    piece = np.random.default_rng(0).bytes(_PIECE_BYTES)
    started = time.perf_counter()
    with path.open("wb") as file:
        for start in range(0, num_bytes, _PIECE_BYTES):
            file.write(piece[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    path.unlink()
    return seconds


def measure_export(tiny: Path, output_dir: Path, shard_size: str, repeats: int) -> Figures:
    """Measures exports of one checkpoint, each between two plain writes of as many bytes."""
    rows: list[Figures] = []
    reference = output_dir.glob("checkpoints/*/reference-*.safetensors")
    plain, num_bytes = output_dir.with_name("plain"), sum(path.stat().st_size for path in reference)
    write_seconds(plain, num_bytes)  # not counted: a virtual machine may have to allocate the memory first
    for _ in range(repeats):
        before_s = write_seconds(plain, num_bytes)
        with tempfile.TemporaryDirectory(dir=output_dir.parent) as name:
            row = measured(run_export, tiny, output_dir, Path(name) / "export", shard_size)
            sizes = {path.name: path.stat().st_size for path in (Path(name) / "export").iterdir()}
        row["write_s"] = (before_s + write_seconds(plain, num_bytes)) / 2
        row["time_ratio"] = (row["seconds"] + row["fsync_s"]) / row["write_s"]
        rows.append(row)
    shards = [size for file_name, size in sizes.items() if file_name.endswith(".safetensors")]
    total = {key: median(row[key] for row in rows) for key in rows[0]}
    total |= {f"time_ratio_{end.__name__}": end(row["time_ratio"] for row in rows) for end in (min, max)}
    total["peak_private_bytes"] = max(row["peak_private_bytes"] for row in rows)
    total |= {"num_bytes": sum(sizes.values()), "num_shards": len(shards), "largest_shard_bytes": max(shards)}
    ratio = total["peak_private_bytes"] / max(shards)
    return {"shard_size": shard_size, **total, "memory_ratio": ratio, "runs": rows}


# --------------------------------------------------------------------------------------------------- upcycling


@torch.no_grad()
def save_dense(directory: Path, kind: str, geometry: dict[str, int]) -> int:
    """Saves a dense model with random, scale-preserving matrices; returns the bytes of its largest tensor."""
    common = {"vocab_size": 1024, "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 64}
    config = CONFIG_MAPPING[kind](**common, **geometry, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = AutoModelForCausalLM.from_config(config)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:  # norms stay as they are
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    return max(int(parameter.nbytes) for parameter in model.parameters())


def run_upcycling(pipe: Connection, directory: Path, kind: str, noise_std: float) -> None:
    """Upcycles, in a process of its own."""
    disable_progress_bar()
    save_dense(directory / "tiny", kind, _TINY)
    options = UpcyclingOptions(experts=8, top_k=2, noise_std=noise_std, max_shard_size="50MB", source_name="dense")
    upcycle(directory / "tiny", directory / "warm-up", options)
    with observed(pipe):
        report = upcycle(directory / kind, directory / "moe", options)
    comparison = compare(directory / kind, directory / "moe", options)
    pipe.send({**asdict(report), **asdict(comparison), "is_exact": comparison.is_exact})


def measure_upcycling(root: Path, kind: str, noise_std: float) -> Figures:
    """Measures one upcycling against the bound on its memory."""
    with tempfile.TemporaryDirectory(dir=root) as name:
        largest_tensor_bytes = save_dense(Path(name) / kind, kind, _DENSE)
        row = measured(run_upcycling, Path(name), kind, noise_std)
    bound_bytes = 3 * row["largest_shard"] // 2 + largest_tensor_bytes
    ratio = max(row["peak_private_bytes"], row["peak_resident_bytes"]) / bound_bytes
    return {"model": kind, "noise_std": noise_std, **row, "bound_bytes": bound_bytes, "memory_ratio": ratio}


def table_of(title: str, rows: list[Figures]) -> Table:
    """One column for each measurement."""
    table = Table(title=title, title_justify="left", show_header=False)
    for key in rows[0]:
        values = [row[key] for row in rows]
        if isinstance(values[0], float):
            table.add_row(key, *(f"{value:,.4g}" for value in values))
        elif key != "runs":
            table.add_row(key, *(f"{value:,}" if type(value) is int else str(value) for value in values))
    return table


def main() -> int:
    """Command line entry point; exit code 1 if upcycling is not exact or needs too much memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=400, metavar="MB", help="approximate size of the weights")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="measurements of each export")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="directory on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: expected at least 1")
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="spes-bench-", dir=options.directory) as name:
        root = Path(name)
        make_checkpoint(root / "tiny", _TINY, 0)
        make_checkpoint(root / "peer", _OLMOE, 10**6 * options.size_mb)
        exports = [measure_export(root / "tiny", root / "peer", size, options.repeats) for size in SHARD_SIZES]
        upcyclings = [measure_upcycling(root, kind, std) for kind in RECIPES for std in NOISE_STDS]
    Console(width=120).print(table_of("Export", exports), table_of("Upcycling", upcyclings))
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        content = {"load": os.getloadavg(), "export": exports, "upcycling": upcyclings}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    is_right = all(row["memory_ratio"] <= 1 and (row["noise_std"] > 0 or row["is_exact"]) for row in upcyclings)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
