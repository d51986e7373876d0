"""Measures how often peers take an honest commit for a harmful one, and how much harm they notice.

    .venv/bin/python scripts/bench_verdicts.py --runs 2 --rounds 400 --jobs 2

Virtual peers train in one process (scripts/testing/verdict_runs.py) and record what their judges
(spes_swarm/training/health/loss_watch.py) would be told. `--json` keeps the records; `--replay` judges them again,
without training. A commit is refused if more than half of the peers, and at least two, say that the loss has risen.
The last columns say how far an honest peer's work for the shared layers pointed against the others' at most, in the
parts of a round that one of them reduced, and how often members ignored such work (protocol/rounds/conduct.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path

from scripts.testing.verdict_runs import SCENARIOS, Record, Window, record, rises
from spes_swarm.base.arguments import show_any_text
from spes_swarm.config.data_source import STDLIB
from spes_swarm.training.health.loss_watch import LossWatch


@dataclass(kw_only=True)
class Row:
    """What the judges said in one scenario."""

    scenario: str
    runs: int = 0
    rounds: int = 0  # of all runs; each side of a partition holds its own
    peer_rounds: int = 0
    verdicts: int = 0  # peer-rounds in which the peer could tell
    alarms: int = 0  # of these: the loss has risen, without harm
    refused: int = 0  # honest rounds that most peers refused
    harmed: int = 0  # rounds
    seen: int = 0  # peer-rounds of these in which the peer said so
    noticed: int = 0  # harmed rounds that most peers refused
    rises: list[float] = field(default_factory=list)  # of the mean loss by harm, in nats, one for each peer-round
    merge_rises: list[float] = field(default_factory=list)  # by commits that merged experts
    return_rises: list[float] = field(default_factory=list)  # after a return, above the loss before the harm
    opposition: float | None = None  # the largest of a peer in a round
    ignored: int = 0
    first_refused: list[int | None] = field(default_factory=list)  # of creeping harm: rounds since it began


def judge(windows: Sequence[Window]) -> Iterator[tuple[Window, bool | None, str]]:
    """Yields each window of a peer with its verdict at the end of it."""
    watch = LossWatch()
    for window in windows:
        if window.kind == "start":
            watch.restart()
        elif window.kind == "return":
            watch.returned()
        else:
            watch.committed(judged=window.kind != "reunion")
        if window.evaluation is not None:
            watch.add_evaluation(*window.evaluation)
        for loss in window.losses:
            watch.add_step(loss)
        yield window, watch.verdict, watch.reason


def add_run(row: Row, run: Record, explain: bool) -> None:
    """Judges the windows of a run."""
    votes: defaultdict[tuple[int, int], list[bool | None]] = defaultdict(list)
    harmed: set[tuple[int, int]] = set()
    for name, windows in run.peers.items():
        for window, verdict, reason in judge(windows):
            key = (window.round, window.side)
            votes[key].append(verdict)
            row.peer_rounds += 1
            row.verdicts += verdict is not None
            if window.kind == "harmed":
                harmed.add(key)
                row.seen += verdict is True
            elif verdict:
                row.alarms += 1
                if explain:
                    print(f"  {run.scenario} {run.seed} {name} round {window.round} ({window.kind}): {reason}")
    refused = {key for key, cast in votes.items() if 2 * cast.count(True) > len(cast) and cast.count(True) >= 2}
    row.runs += 1
    row.rounds += len(votes)
    row.harmed += len(harmed)
    row.noticed += len(harmed & refused)
    row.refused += len(refused - harmed)
    if run.opposition is not None:
        row.opposition = max(row.opposition or 0.0, run.opposition)
    row.ignored += run.ignored
    row.rises += rises(list(run.peers.values()), "harmed")
    row.merge_rises += rises(list(run.peers.values()), "merge")
    row.return_rises += rises(list(run.peers.values()), "return", commits=2)
    if SCENARIOS[run.scenario].harm_every == 1:
        first = min(harmed, default=(0, 0))[0]
        noticed = sorted(number for number, _ in harmed & refused)
        row.first_refused.append(noticed[0] - first if noticed else None)


def table(records: Sequence[Record], explain: bool = False) -> list[Row]:
    """Judges all records and prints a table."""
    rows = {name: Row(scenario=name) for name in SCENARIOS if any(run.scenario == name for run in records)}
    for run in records:
        add_run(rows[run.scenario], run, explain)
    heads = ["runs", "rounds", "peer-r.", "verdicts", "alarms", "refused", "harmed", "seen", "noticed", "rise"]
    heads += ["by merge", "after return", "opposition", "ignored"]
    print(f"{'scenario':12}" + "".join(f"{head:>14}" for head in heads))
    for row in rows.values():
        cells = [row.runs, row.rounds, row.peer_rounds, row.verdicts, row.alarms, row.refused, row.harmed]
        per_harm = row.harmed * SCENARIOS[row.scenario].num_peers
        shares = [f"{row.seen / per_harm:.1%}", f"{row.noticed / row.harmed:.1%}"] if row.harmed else ["-", "-"]
        losses = row.rises, row.merge_rises, row.return_rises
        opposition = ["-", "-"] if row.opposition is None else [f"{row.opposition:.2f}", str(row.ignored)]
        print(
            f"{row.scenario:12}"
            + "".join(f"{cell:>14}" for cell in [*cells, *shares, *map(_mean, losses), *opposition])
            + (f"  first refused after {row.first_refused} rounds" if row.first_refused else "")
        )
    return list(rows.values())


def _mean(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "-"
    return f"{statistics.fmean(values):+.3f}±{statistics.stdev(values) / len(values) ** 0.5:.3f}"


def read_records(path: Path) -> list[Record]:
    """Reads the records that `--json` has written."""
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return [
        Record(**{**run, "peers": {name: [Window(*each) for each in ws] for name, ws in run["peers"].items()}})
        for run in runs
    ]


def write(path: Path, records: Sequence[Record], rows: Sequence[Row]) -> None:
    """Writes rows and records; a window is a list of its fields."""
    runs = [
        {
            "scenario": run.scenario,
            "seed": run.seed,
            "rounds": run.rounds,
            "seconds": run.seconds,
            "opposition": run.opposition,
            "ignored": run.ignored,
            "peers": {name: [list(astuple(window)) for window in windows] for name, windows in run.peers.items()},
        }
        for run in records
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "runs": runs}) + "\n", encoding="utf-8")


def make_runs(options: argparse.Namespace) -> list[Record]:
    """Makes all runs, several at a time, and writes the file after each."""
    until = time.time() + 60 * options.minutes
    tasks = [(name, options.first_seed + seed) for seed in range(options.runs) for name in options.scenarios]
    records: list[Record] = []
    # Forking a process that has used torch may deadlock.
    with ProcessPoolExecutor(min(options.jobs, len(tasks)), multiprocessing.get_context("spawn")) as pool:
        running = {
            pool.submit(record, name, seed, options.rounds, until, options.data): (name, seed) for name, seed in tasks
        }
        for number, done in enumerate(as_completed(running), 1):
            name, seed = running[done]
            run = done.result()
            print(f"[{number}/{len(tasks)}] {name}, seed {seed}: {run.rounds} rounds, {run.seconds:.0f} s", flush=True)
            if run.rounds:
                records.append(run)
                write(options.json, records, [])
    return records


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1, help="seeds of each scenario")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=400, help="of each run")
    parser.add_argument("--minutes", type=float, default=600, help="after these, runs end with the rounds they have")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--data", default=STDLIB, help="stdlib, token files or text")
    parser.add_argument("--replay", type=Path, nargs="+", help="files of earlier runs to judge, without training")
    parser.add_argument("--explain", action="store_true", help="print the reason of each false alarm")
    parser.add_argument("--json", type=Path, default=Path("runs/verdicts.json"), help="where records are written")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes or reads the runs, judges them and prints the table."""
    show_any_text()
    options = parse_arguments(argv)
    if options.replay:
        records = [run for path in options.replay for run in read_records(path)]
        table([run for run in records if run.scenario in options.scenarios], options.explain)
        return 0
    records = make_runs(options)
    write(options.json, records, table(records, options.explain))
    return 0


if __name__ == "__main__":
    sys.exit(main())
