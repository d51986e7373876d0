"""Compares ways of training together: N virtual peers in one process, arms as YAML, paired seeds, a table with errors.

    .venv/bin/python scripts/study.py scripts/study/table.yaml --jobs 2

Every peer has its own model, optimiser and data, and rounds go through the statements, plan, codec, merge and ownership
of real swarms (scripts/testing/sequential_swarm.py). All arms of a seed start from the same weights, and peer i
reads the same sequences in each of them. scripts/testing/study/arm.py describes the file.

Writes one file for each finished run, so the same command continues after an interruption, and files of arms that are
in the same directory share their runs. Then writes table.md, table.json and, if matplotlib is installed, figures.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from scripts.testing.study.arm import Arm, read_study
from scripts.testing.study.course import Outcome
from scripts.testing.study.plots import can_plot, write_plots
from scripts.testing.study.results import Results, settings_of
from scripts.testing.study.running import open_stream, run_missing
from scripts.testing.study.table import make_table, to_markdown
from spes_swarm.base.arguments import show_any_text
from spes_swarm.base.errors import DataError, UserError, os_errors_as
from spes_swarm.config.data_source import STDLIB


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="YAML file of arms")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/study"), help="of runs, table and figures")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--data", default=STDLIB, help="stdlib, token files or text")
    parser.add_argument("--table-only", action="store_true", help="make no runs; the table of those that are finished")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    return options


def study(options: argparse.Namespace) -> None:
    """Makes the runs and writes the table.

    Raises:
        UserError: a setting, the data or a file is unusable.
    """
    questions = read_study(options.file)
    if not options.table_only:
        run_missing(questions, options.data, options.output_dir, options.jobs, lambda text: print(text, flush=True))
    results = Results(options.output_dir)
    digest = open_stream(questions.arms[0], options.data).digest

    def lookup(arm: Arm, seed: int) -> Outcome | None:
        return results.get(settings_of(arm, seed, digest, questions.config.evaluations))

    rows = make_table(questions, lookup)
    table = to_markdown(rows)
    print(table, end="")
    target = options.output_dir / options.file.stem
    with os_errors_as(DataError, f"{target} cannot be written"):
        target.mkdir(exist_ok=True)
        (target / "table.md").write_text(table, encoding="utf-8")
        content = {"file": str(options.file), "data": digest, "rows": [asdict(row) for row in rows]}
        (target / "table.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if can_plot():
        write_plots(questions, rows, lookup, target)
    else:
        print("no figures: they need matplotlib (pip install 'spes-swarm[plot]')")


def main(argv: Sequence[str] | None = None) -> int:
    show_any_text()
    options = parse_arguments(argv)
    try:
        study(options)
    except UserError as exc:
        print(f"study: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("study: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
