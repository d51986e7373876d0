"""Evaluates an export with lm-evaluation-harness.

    python -m spes_swarm.evaluate EXPORT_DIR

Runs the tasks that come with this package, unless --tasks names others: by their name in the harness, or by the path of
a YAML file. Most of those fetch their data from the Hugging Face Hub. Task files may contain code.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.command_line import command_parser

if TYPE_CHECKING:
    from spes_swarm.convert.evaluation import Evaluation

_RANKS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_DEFAULT_TASKS = "python_lines,python_bytes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    return exit_code("evaluate", lambda: _run(_parse(arguments)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_parser("evaluate", __doc__)
    add = parser.add_argument
    add("export", type=Path, metavar="EXPORT_DIR", help="written by spes_swarm.export, or any model")
    add("--tasks", default=_DEFAULT_TASKS, metavar="A,B", help="task names, or paths of YAML files")
    add("--include-path", type=Path, action="append", default=[], metavar="DIR", help="directory with more tasks")
    add("--limit", type=int, metavar="N", help="only the first N samples of each task")
    add("--batch-size", type=int, default=8, metavar="N", help="sequences at a time")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--output", type=Path, metavar="FILE", help="also write the results as JSON")
    add("--attach", action="store_true", help="put the results into the export's model card")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace) -> None:
    tasks = [task.strip() for task in options.tasks.split(",") if task.strip()]
    if not tasks:
        raise ConfigError("--tasks names no task")
    for name, value in (("--limit", options.limit), ("--batch-size", options.batch_size)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}: found {value}, expected at least 1")
    if options.output is not None and not options.output.resolve().parent.is_dir():
        raise ConfigError(f"{options.output}: its directory does not exist")
    _be_one_process()
    # Everything below imports torch and transformers, which takes seconds.
    from transformers.utils.logging import disable_progress_bar

    from spes_swarm.convert.evaluation import LOCAL_TASKS, attach, evaluate

    disable_progress_bar()
    evaluation = evaluate(
        options.export,
        tasks,
        [LOCAL_TASKS, *options.include_path],
        limit=options.limit,
        batch_size=options.batch_size,
        device=_device(options.device),
    )
    print(_table(evaluation))
    if options.output is not None:
        options.output.write_text(evaluation.to_json(), encoding="utf-8")
    if options.attach:
        print(f"results written to {attach(evaluation, options.export)}")


def _be_one_process() -> None:
    """Removes the variables by which launchers number processes: accelerate would wait for the others."""
    found = [name for name in _RANKS if os.environ.pop(name, None) is not None]
    if found:
        print(f"evaluate: this is one process; it ignores {', '.join(found)} in the environment", file=sys.stderr)


def _device(name: str) -> str:
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ConfigError(f"--device: found {name!r}, expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not int(index or 0) < torch.cuda.device_count():
        raise ConfigError(f"--device: {name} is not on this machine")
    return name


def _table(evaluation: Evaluation) -> str:
    rows = [("task", "metric", "value", "stderr", "n")]
    for score in evaluation.scores:
        metric = score.metric if score.filter == "none" else f"{score.metric} ({score.filter})"
        stderr = "" if score.stderr is None else f"{score.stderr:.4f}"
        rows.append((score.task, metric, f"{score.value:.4f}", stderr, str(score.num_samples)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        f"{task:<{widths[0]}}  {metric:<{widths[1]}}  {value:>{widths[2]}}  {stderr:>{widths[3]}}  {n:>{widths[4]}}"
        for task, metric, value, stderr, n in rows
    )


if __name__ == "__main__":
    end_program(main())
