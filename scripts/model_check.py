"""Checks the machine that forms the group of a round: searches all interleavings, walks at random, leaves parts out.

    .venv/bin/python -m scripts.model_check search --peers 3 --crashes 1
    .venv/bin/python -m scripts.model_check walk --honest 4 --hostile 1 --faults 8 --walks 200
    .venv/bin/python -m scripts.model_check mutate

Each prints what it saw; the exit code is 1 if something does not hold, or if more than a twentieth of the mutants is
not noticed.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts.testing.meeting.mutations import Mutant, mutants, notice, notice_in_cases
from scripts.testing.meeting.search import search
from scripts.testing.meeting.walks import walk
from spes_swarm.protocol.meeting import view


def main(arguments: list[str] | None = None) -> int:
    """Runs one of the checks."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    searching = commands.add_parser("search", help="all interleavings of one round")
    searching.add_argument("--peers", type=int, default=2)
    for fault in ("crashes", "freezes", "losses"):
        searching.add_argument(f"--{fault}", type=int, default=0)
    searching.add_argument("--most", type=int, default=10**9, help="states")
    walking = commands.add_parser("walk", help="random walks of a swarm over many rounds")
    walking.add_argument("--honest", type=int, default=4)
    walking.add_argument("--hostile", type=int, default=0)
    walking.add_argument("--faults", type=int, default=8)
    walking.add_argument("--freezes-only", action="store_true", help="no other faults: rounds are never divided then")
    walking.add_argument("--walks", type=int, default=100)
    walking.add_argument("--first-seed", type=int, default=0)
    walking.add_argument("--trace", type=int, default=0, help="lines of the first walk with a problem to print")
    mutating = commands.add_parser("mutate", help="the machine without one of its statements")
    mutating.add_argument("--every", type=int, default=1, help="only every so many mutants")
    mutating.add_argument("--drops", action="store_true", help="only statements that are left out, no conditions")
    mutating.add_argument("--jobs", type=int, default=1, help="mutants at a time, each on a core of its own")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    held = {"search": _search, "walk": _walk, "mutate": _mutate}[options.command](options)
    print(f"{time.monotonic() - started:.0f} s")
    return 0 if held else 1


def _search(options: argparse.Namespace) -> bool:
    found = search(
        options.peers, crashes=options.crashes, freezes=options.freezes, losses=options.losses, most=options.most
    )
    for step in found.trace:
        print(*step)
    print(f"{found.states:,} states, {'all' if found.complete else 'not all'}: {found.problem or 'no problem'}")
    return found.problem is None


def _walk(options: argparse.Namespace) -> bool:
    rounds = problems = 0
    for seed in range(options.first_seed, options.first_seed + options.walks):
        found, walked = walk(seed, options.honest, options.hostile, options.faults, options.freezes_only)
        rounds += walked.rounds
        for problem in found[:1]:
            print(f"seed {seed}, {problem.time:.1f} s: {problem.what}", flush=True)
            if not problems and options.trace:
                print(*walked.trace[-options.trace :], sep="\n")
            problems += 1
    print(f"{options.walks} walks, {rounds:,} commits, {problems} with a problem")
    return not problems


def _mutate(options: argparse.Namespace) -> bool:
    count = missed = in_cases = 0
    unchanged, _ = next(iter(mutants()))
    if notice_in_cases(unchanged, Path(view.__file__).read_text(encoding="utf-8")):
        raise RuntimeError("the tests' cases fail without a mutant")
    chosen = [each for each in mutants() if each[0].change.startswith("drop") or not options.drops]
    with ProcessPoolExecutor(options.jobs) as jobs:
        for mutant, noticed_by in jobs.map(_judge, chosen[:: options.every]):
            count += 1
            if noticed_by == "cases":
                in_cases += 1
                print("noticed by the cases alone:", mutant, flush=True)
            elif noticed_by is None:
                missed += 1
                print("not noticed:", mutant, flush=True)
    print(
        f"{count} mutants, {count - missed} noticed ({1 - missed / count:.1%}), {in_cases} of them by the cases alone"
    )
    return missed <= 0.05 * count


def _judge(mutant_and_source: tuple[Mutant, str]) -> tuple[Mutant, str | None]:
    mutant, source = mutant_and_source
    if notice(mutant, source) is not None:
        return mutant, "walks"
    return mutant, "cases" if notice_in_cases(mutant, source) else None


if __name__ == "__main__":
    sys.exit(main())
