"""Writes the reference of a checkpoint in the plain `transformers` layout.

    python -m spes_swarm.export OUTPUT_DIR DESTINATION

The destination loads with `AutoModelForCausalLM.from_pretrained` where spes_swarm is not installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from spes_swarm.checkpoint import load_newest
from spes_swarm.codec import FloatArray
from spes_swarm.errors import CheckpointError, UserError
from spes_swarm.identity import Identity
from spes_swarm.manifest import Manifest
from spes_swarm.model import build_model, layout_of, plain_state_dict
from spes_swarm.run_directory import RunDirectory
from spes_swarm.tokenizer import load_tokenizer


def export_reference(manifest: Manifest, reference_N: FloatArray, destination: Path, round_number: int) -> None:
    """Saves model, configuration and tokenizer.

    Raises:
        UserError: the destination exists and is not empty.
    """
    if destination.exists() and any(destination.iterdir()):
        raise UserError(f"{destination} exists and is not empty; choose another destination")
    run = manifest.run
    model = build_model(run.model.type, run.model.settings, seed=0, device="cpu")
    model.load_state_dict(plain_state_dict(model, layout_of(model), reference_N, include_tied=True))
    tokenizer = load_tokenizer(run.tokenizer.name)
    model.config.eos_token_id = tokenizer.end_of_text
    model.generation_config.eos_token_id = tokenizer.end_of_text
    disable_progress_bar()
    model.save_pretrained(destination)
    tokenizer.save(destination)
    note = f"Round {round_number} of run {manifest.run_id}.\n"
    (destination / "RUN.txt").write_text(note, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Command line entry point."""
    parser = argparse.ArgumentParser(prog="python -m spes_swarm.export", description=__doc__.splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="the --output-dir of a peer")
    parser.add_argument("destination", type=Path, help="a new or empty directory")
    options = parser.parse_args(arguments)
    try:
        directory = RunDirectory(options.output_dir)
        manifest = directory.manifest()
        if manifest is None:
            raise CheckpointError(f"{options.output_dir} is not the output directory of a run")
        layout = layout_of(build_model(manifest.run.model.type, manifest.run.model.settings, 0, "meta", on_meta=True))
        identity = Identity.load_or_create(directory.identity)
        checkpoint, complaints = load_newest(directory.checkpoints, manifest.run_id, identity.peer_id, layout)
        if checkpoint is None:
            raise CheckpointError("; ".join(complaints) or f"{directory.checkpoints} has no checkpoint yet")
        reference_N = np.empty(layout.num_elements, dtype=np.float32)
        checkpoint.reference(layout, reference_N)
        with torch.no_grad():
            export_reference(manifest, reference_N, options.destination, checkpoint.meta.round)
    except UserError as exc:
        print(f"export: {exc}", file=sys.stderr)
        return 2
    print(f"round {checkpoint.meta.round} of {manifest.run_id} written to {options.destination}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
