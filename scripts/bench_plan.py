"""Compares the planned memory of a training step with the memory that it takes.

    .venv/bin/python scripts/bench_plan.py --sizes 3M 30M 120M

Each case trains the real model for a few steps on the CPU, twice, in a separate process. The measured value is the
growth of the resident set in the second round over its size after the first, so what libraries allocate once does not
count. Prints a table and writes JSON. With `--torch-norms`, norms are computed by torch's `rms_norm` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.testing.benchmark import reset_peak, status_bytes, torch_norms
from scripts.testing.tiny_run import tiny_run
from spes_swarm.config.run import RunConfig
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer.memory.step_memory import StepShape, step_memory
from spes_swarm.training.gradients import Gradients, loss_weights

# (hidden size, expert FFN, layers, vocabulary)
SIZES = {"3M": (128, 128, 4, 2048), "30M": (256, 320, 6, 4096), "120M": (512, 512, 8, 8192)}
NUM_EXPERTS, SEQUENCE_LENGTH, BATCH_SIZE = 16, 256, 8
# (held experts, form of the others, activation checkpointing, sequences at a time)
SETTINGS = ((4, "fp32", "none", 8), (4, "int8", "none", 2), (1, "bf16", "layers", 8), (1, "int4", "selective", 4))
STEPS = 3


@dataclass(frozen=True)
class Row:
    """One case; sizes in bytes."""

    size: str
    held: int
    foreign: str
    checkpointing: str
    micro_batch: int
    planned: int
    measured: int


def run_of(size: str) -> RunConfig:
    """Returns a run with a model of this size."""
    hidden, ffn, layers, vocabulary = SIZES[size]
    run = tiny_run(
        "plan",
        hidden_size=hidden,
        intermediate_size=ffn,
        training={
            "sequence_length": SEQUENCE_LENGTH,
            "batch_size": BATCH_SIZE,
            "learning_rate": 1e-4,
            "warmup_steps": 1,
            "total_steps": 100,
        },
        round={"inner_steps": 10},
        merge={"alpha": 0.0, "steps": 0, "interval": 0},
        experts_per_peer=1,
    )
    run["model"]["settings"] |= {
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 4,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 32,
    }
    return RunConfig.from_dict(run, "bench_plan")


def train(size: str, held: int, foreign: str, checkpointing: str, micro_batch: int) -> None:
    """Trains a few steps in this process."""
    run = run_of(size)
    # As a peer does: a whole model in fp32 never exists. The weights are random, so that no expert gets most tokens.
    rng = np.random.default_rng(0)
    model = SparseModel(build_empty_model(run.model.type, run.model.settings), range(held), foreign_form=foreign)
    for block in model.layout.blocks:
        model.write_block(block.index, 0.02 * rng.standard_normal(block.size, dtype=np.float32))
    checkpoint_activations(model.module, checkpointing)
    optimiser = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
    gradients = Gradients(
        model,
        loss_weights(run.training),
        micro_batch,
        device=torch.device("cpu"),
        autocast=contextlib.nullcontext,
        warn=lambda kind, text: print(f"{kind}: {text}", file=sys.stderr),
    )
    batch_BS = np.random.default_rng(0).integers(0, run.model.vocab_size, (BATCH_SIZE, SEQUENCE_LENGTH))
    reset_peak()  # building the model does not count
    for _ in range(STEPS):
        gradients.compute(batch_BS, 0.5)
        optimiser.step()


def serve(size: str, held: str, foreign: str, checkpointing: str, micro_batch: str) -> None:
    """Prints the bytes that a case takes."""
    torch.set_num_threads(1)
    train(size, int(held), foreign, checkpointing, int(micro_batch))
    before = status_bytes("VmRSS")
    train(size, int(held), foreign, checkpointing, int(micro_batch))
    print(status_bytes("VmHWM") - before)


def measure(size: str, held: int, foreign: str, checkpointing: str, micro_batch: int, flags: list[str]) -> Row:
    """Returns one row; `flags` go to the process that is measured."""
    shape = StepShape(
        num_held=held, foreign_experts=foreign, precision="fp32", activation_checkpointing=checkpointing, on_gpu=False
    )
    planned = step_memory(run_of(size), shape, micro_batch).peak
    case = [size, str(held), foreign, checkpointing, str(micro_batch)]
    # glibc keeps a varying amount of freed memory. With this threshold it maps every allocation of four pages or more
    # separately, and returns it at once. With a larger one, up to 10 MB of free heap were resident before a step began,
    # and tensors allocated there did not count.
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    environment = os.environ | dict.fromkeys(names, "16384") | {"MALLOC_TOP_PAD_": "0"}
    command = [sys.executable, __file__, *flags, "--serve", *case]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return Row(size, held, foreign, checkpointing, micro_batch, planned, int(answer.stdout))


def main() -> int:
    """Reads the command line, and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sorted(SIZES), default=["3M", "30M", "120M"])
    parser.add_argument("--output", type=Path, default=Path("bench_plan.json"), metavar="FILE")
    parser.add_argument("--torch-norms", action="store_true")
    parser.add_argument("--serve", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with torch_norms() if options.torch_norms else contextlib.nullcontext():
        if options.serve:
            serve(*options.serve)
        else:
            compare(options)
    return 0


def compare(options: argparse.Namespace) -> None:
    """Measures all cases, prints the table, and writes it."""
    rows: list[Row] = []
    print("size  held  others  checkpointing  at a time  planned MB  measured MB  planned / measured")
    for size in options.sizes:
        for case in SETTINGS:
            row = measure(size, *case, flags=["--torch-norms"] if options.torch_norms else [])
            rows.append(row)
            print(
                f"{row.size:<5} {row.held:4}  {row.foreign:<6}  {row.checkpointing:<13}  {row.micro_batch:9}  "
                f"{row.planned / 1e6:10.1f}  {row.measured / 1e6:11.1f}  {row.planned / row.measured:18.3f}",
                flush=True,
            )
    result: dict[str, Any] = {"torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    options.output.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
