"""Writes the reference of a peer's newest checkpoint in the plain `transformers` layout.

    python -m spes_swarm.export OUTPUT_DIR DESTINATION

The destination loads with `AutoModelForCausalLM.from_pretrained` where spes_swarm is not installed; it can be published
as it is (`python -m spes_swarm.publish DESTINATION --to ...`). Whichever peer exports a round, the weight files are the
same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spes_swarm.arguments import OneLineParser
from spes_swarm.codec import FloatArray
from spes_swarm.errors import UserError
from spes_swarm.hub.pack import RunFacts, pack
from spes_swarm.hub.plain import MAX_SHARD_SIZE, empty_model, new_directory, shard_bytes, write_export
from spes_swarm.hub.snapshot import newest_snapshot
from spes_swarm.hub.weights import split_blocks
from spes_swarm.manifest import Manifest
from spes_swarm.model import layout_of


def export_reference(
    manifest: Manifest, reference_N: FloatArray, destination: Path, max_shard_size: str = MAX_SHARD_SIZE
) -> None:
    """Saves model, configuration and tokenizer, without card and publication manifest.

    Args:
        manifest: of the run.
        reference_N: the flat reference (N,).
        destination: a new or empty directory; complete when it exists.
        max_shard_size: see `write_export`.

    Raises:
        UserError: the destination is not empty or cannot be written, or the tokenizer cannot be loaded.
    """
    model = empty_model(manifest.run)
    blocks = split_blocks(layout_of(model), reference_N)
    with new_directory(destination) as directory:
        write_export(manifest, model, blocks, directory, max_shard_size)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry point."""
    parser = OneLineParser(prog="python -m spes_swarm.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="the --output-dir of a peer")
    parser.add_argument("destination", type=Path, help="a new or empty directory")
    parser.add_argument(
        "--max-shard-size",
        default=MAX_SHARD_SIZE,
        metavar="SIZE",
        help="largest weight file, e.g. 500MB (default: %(default)s)",
    )
    try:
        options = parser.parse_args(arguments)
        shard_bytes(options.max_shard_size)
        snapshot = newest_snapshot(options.output_dir, on_complaint=_say_passed_over)
        pack(snapshot, options.destination, RunFacts(), options.max_shard_size)
    except UserError as exc:
        print(f"export: {exc}", file=sys.stderr)
        return 2
    print(f"round {snapshot.round} of {snapshot.manifest.run_id} written to {options.destination}")
    return 0


def _say_passed_over(complaint: str) -> None:
    print(f"export: passing over a checkpoint: {complaint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
