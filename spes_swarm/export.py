"""Exports the reference of a peer's newest checkpoint as a plain `transformers` model.

    python -m spes_swarm.export OUTPUT_DIR DESTINATION

The destination loads with `AutoModelForCausalLM.from_pretrained` without spes_swarm, and can be published as it is
(`python -m spes_swarm.publish DESTINATION --to ...`). The weight files of a round are byte-identical, whichever peer
exports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import MAX_SHARD_SIZE, end_program, exit_code, shard_bytes
from spes_swarm.config.command_line import OneLineParser

if TYPE_CHECKING:
    from spes_swarm.publishing.publication import Publication


def export_model(
    output_dir: str | Path,
    destination: str | Path,
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    on_skipped: Callable[[str], None] = lambda reason: None,
) -> Publication:
    """Writes the reference of a peer's newest checkpoint as a plain `transformers` model.

    Args:
        output_dir: of the peer, which may be running.
        destination: a new or empty directory; complete when it exists.
        max_shard_size: largest weight file, unless a single tensor is larger: "500MB", "1GB" ...
        on_skipped: called for each newer checkpoint that cannot be used, with the reason.

    Returns:
        What was written: `run_id`, `round`, `digest` and more.

    Raises:
        UserError: the directory does not belong to a run, has no usable checkpoint, or the destination is not empty or
            cannot be written.
    """
    shard_bytes(max_shard_size)
    from spes_swarm.base.user_paths import check_is_new
    from spes_swarm.storage.run_directory import RunDirectory

    check_is_new(Path(destination))
    RunDirectory(Path(output_dir)).require_run()
    # Everything below imports torch and transformers, which takes seconds.
    from spes_swarm.publishing.export import export, newest_snapshot

    snapshot = newest_snapshot(Path(output_dir), on_skipped=on_skipped)
    return export(snapshot, Path(output_dir), Path(destination), max_shard_size=max_shard_size)


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    interrupted = "interrupted; the destination is complete if it exists"
    return exit_code("export", lambda: _run(arguments), interrupted=interrupted)


def _run(arguments: list[str] | None) -> None:
    parser = OneLineParser(prog="python -m spes_swarm.export", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output_dir", type=Path, help="the --output-dir of a peer")
    parser.add_argument("destination", type=Path, help="a new or empty directory")
    parser.add_argument(
        "--max-shard-size",
        default=MAX_SHARD_SIZE,
        metavar="SIZE",
        help="largest weight file, e.g. 500MB (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    written = export_model(
        options.output_dir,
        options.destination,
        max_shard_size=options.max_shard_size,
        on_skipped=lambda reason: print(f"export: skipping a checkpoint: {reason}", file=sys.stderr),
    )
    print(f"round {written.round} of {written.run_id} written to {options.destination}")


if __name__ == "__main__":
    end_program(main())
