"""Exports the reference of a peer's newest checkpoint as a plain `transformers` model.

    python -m spes_swarm.export OUTPUT_DIR DESTINATION

The destination loads with `AutoModelForCausalLM.from_pretrained` without spes_swarm, and can be published as it is
(`python -m spes_swarm.publish DESTINATION --to ...`). The weight files of a round are byte-identical, whichever peer
exports it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from spes_swarm.base.arguments import MAX_SHARD_SIZE, OneLineParser, shard_bytes
from spes_swarm.base.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
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
        from spes_swarm.base.user_paths import check_is_new
        from spes_swarm.storage.run_directory import RunDirectory

        check_is_new(options.destination)
        RunDirectory(options.output_dir).require_run()
        # Everything below imports torch and transformers, which takes seconds.
        from spes_swarm.publishing.pack import RunFacts, pack
        from spes_swarm.publishing.snapshot import newest_snapshot

        snapshot = newest_snapshot(options.output_dir, on_complaint=_say_passed_over)
        pack(snapshot, options.destination, RunFacts(), options.max_shard_size)
    except UserError as exc:
        print(f"export: {exc}", file=sys.stderr)
        return 2
    except OSError as exc:  # an impossible path, or a limit of the machine
        print(f"export: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("export: interrupted; the destination is complete if it exists", file=sys.stderr)
        return 130
    print(f"round {snapshot.round} of {snapshot.manifest.run_id} written to {options.destination}")
    return 0


def _say_passed_over(complaint: str) -> None:
    print(f"export: skipping a checkpoint: {complaint}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
