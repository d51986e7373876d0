"""Measures the memory of a step with other peers' experts in different places, on a CPU.

    .venv/bin/python scripts/bench_storage.py --hidden 512 --layers 8 --forms fp32 int8

Each case runs in a separate process: it builds the model without weights, writes random ones, takes two steps on a
small batch, and reports its anonymous memory, its resident pages of mapped files, and a digest of its gradients. The
digest must not depend on where the experts are. Prints a table.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from spes_swarm.base.errors import UserError
from spes_swarm.model.foreign.frozen_stack import FORMS
from spes_swarm.model.foreign.storage import new_storage
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_empty_model

NUM_EXPERTS, SEQUENCE_LENGTH, BATCH_SIZE, STEPS = 16, 64, 2, 2


def resident_bytes(kind: str) -> int:
    """Returns the resident bytes of this process: `kind` is Anon, File or Shmem."""
    found = re.search(rf"^Rss{kind}:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return 1024 * int(found[1])


def measure(hidden: int, layers: int, form: str, storage: str, directory: Path) -> None:
    """Takes the steps and prints one line of results."""
    torch.set_num_threads(1)
    settings = {
        "vocab_size": 256,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "max_position_embeddings": SEQUENCE_LENGTH,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    place = new_storage(storage, torch.device("cpu"), directory)
    model = SparseModel(build_empty_model("olmoe", settings), (0,), "torch", form, place)
    rng = np.random.default_rng(0)
    for block in model.layout.blocks:
        model.write_block(block.index, rng.standard_normal(block.size, dtype=np.float32) * np.float32(0.02))
    ids_BS = torch.from_numpy(rng.integers(0, 256, (BATCH_SIZE, SEQUENCE_LENGTH)))
    for _ in range(STEPS):
        model.module.zero_grad()
        torch.autograd.backward(language_model_loss(model.module, ids_BS, LossWeights(), model.held, 0.0).total)
    digest = blake3()
    for _, parameter in model.trainable_parameters():
        if parameter.grad is not None:
            digest.update(parameter.grad.numpy().tobytes())
    stored = sum(buffer.nbytes for name, buffer in model.module.named_buffers() if ".foreign." in name)
    print(stored, resident_bytes("Anon"), resident_bytes("File"), digest.hexdigest()[:12])


def main() -> int:
    """Prints the table; returns 1 if gradients differ."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["fp32", "int8"])
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to use")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.case:
            form, storage = options.case
            measure(options.hidden, options.layers, form, storage, options.directory)
            return 0
    except UserError as exc:
        print(f"bench_storage: {exc}", file=sys.stderr)
        return 2
    print(f"{'form':<5} {'storage':<8} {'stored':>9} {'anonymous':>10} {'files':>9}  gradients")
    same = True
    for form in options.forms:
        digests = set()
        for storage in ("device", "disk"):
            arguments = ["--hidden", options.hidden, "--layers", options.layers, "--directory", options.directory]
            command = [sys.executable, __file__, *map(str, arguments), "--case", form, storage]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            stored, anonymous, files, digest = done.stdout.split()
            megabytes = [int(size) / 1e6 for size in (stored, anonymous, files)]
            print(
                f"{form:<5} {storage:<8} {megabytes[0]:6.0f} MB {megabytes[1]:7.0f} MB {megabytes[2]:6.0f} MB  {digest}"
            )
            digests.add(digest)
        same = same and len(digests) == 1
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
