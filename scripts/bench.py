"""Measures what the project promises, each time against a baseline in the same run.

    .venv/bin/python scripts/bench.py NAME [options]

`scripts/bench.py NAME --help` says what is measured. Prints a line for each measurement and writes all of them as JSON.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.testing.benches import codecs, memory, monitor, publish, round, rounds, step, transfer
from scripts.testing.benchmark import Row, save, shown
from spes_swarm.base.errors import SwarmError


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for module in (codecs, memory, monitor, publish, round, rounds, step, transfer):
        name, text = module.__name__.rpartition(".")[2], module.__doc__ or ""
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_options(command)
        command.add_argument("--json", type=Path, default=Path(f"runs/{name}.json"))
        command.set_defaults(measure=module.measure)
    return parser.parse_args()


def main() -> int:
    """Runs one benchmark; returns the exit code."""
    options = parse_arguments()
    rows: list[Row] = []
    try:
        for row in options.measure(options):
            widths = {key: max(9, len(key)) for key in row}
            if not rows:
                print(*(f"{key:>{width}}" for key, width in widths.items()))
            print(*(f"{shown(row[key]):>{width}}" for key, width in widths.items()), flush=True)
            rows.append(row)
            save(options.json, {"benchmark": options.name, "rows": rows})
    except SwarmError as exc:
        print(f"bench: {exc}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
