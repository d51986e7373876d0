"""Chaos: a seeded schedule of joins, kills, stops, cuts and returns against real peers, and its cost for the others.

    .venv/bin/python scripts/chaos.py --seed 1 --faults 200 --peers 4 --max-peers 6 --cuts

Every peer is a `python -m spes_swarm.join` on this machine; with --cuts they run in network namespaces (needs root).
Prints a line for each fault and tables, writes JSON, and exits with code 1 after any failure: a hang, a crash of an
undisturbed peer, digests that differ and do not heal at the next commit, a process that outlives its peer, or a median
cost of a round or more per fault.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from scripts.testing.interrupts import report_interrupt

report_interrupt("chaos")

from scripts.testing.chaos.report import describe, fault_table, markdown, to_json, totals_table
from scripts.testing.chaos.schedule import MIN_PEERS, Kind, draw_schedule
from scripts.testing.chaos.swarm import ChaosSwarm, HangError
from scripts.testing.local_network import LocalNetwork, unavailable_reason
from scripts.testing.local_peer import LocalPeerError
from scripts.testing.output_directory import remake_directory
from scripts.testing.tiny_run import tiny_run
from spes_swarm.base.errors import UserError
from spes_swarm.protocol.consensus.codec import CODECS

_MAX_HANGS = 3  # after so many the experiment ends

# Small enough for six peers on two cores, wide enough that an exchange lasts some tenths of a second. Deadlines are
# about those of the quickstart: they make up most of the cost of a stopped peer.
RUN = tiny_run(
    "chaos",
    hidden_size=64,
    intermediate_size=256,
    training={"learning_rate": 1e-3, "warmup_steps": 50, "total_steps": 100_000},
    round={
        "inner_steps": 20,
        "codec": "fp16",
        "window_s": 5.0,
        "stall_timeout_s": 4.0,
        "timeout_s": 30.0,
        "progress_ttl_s": 10.0,
        "lease_s": 30.0,
    },
    merge={"alpha": 0.1, "steps": 2000, "interval": 200},
    experts_per_peer=3,
    evaluation={"sequences": 8, "every_rounds": 10},
)


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--peers", type=int, default=4, help="at the start")
    parser.add_argument("--max-peers", type=int, default=6)
    parser.add_argument("--cuts", action="store_true", help="also cut the network (uses namespaces; needs root)")
    parser.add_argument("--only", nargs="+", type=Kind, choices=list(Kind), metavar="KIND", help="only these faults")
    parser.add_argument("--inner-steps", type=int, default=RUN["round"]["inner_steps"], help="sets a round's length")
    parser.add_argument("--optimiser", default="adamw")
    parser.add_argument("--codec", choices=list(CODECS), default=RUN["round"]["codec"])
    parser.add_argument("--result-codec", choices=list(CODECS), help="default: the same")
    parser.add_argument("--hang-s", type=float, default=90.0, help="a longer wait is a hang")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/chaos"), help="earlier results are removed")
    parser.add_argument("--json", type=Path, help="default: OUTPUT_DIR/chaos.json")
    options = parser.parse_args()
    if not MIN_PEERS <= options.peers <= options.max_peers:
        parser.error(f"--peers must be at least {MIN_PEERS} and at most --max-peers")
    return options


def _on_signal(number: int, frame: FrameType | None) -> None:
    del frame
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Runs the experiment; exit code 0 only if all criteria are met."""
    options = parse_arguments()
    for number in (signal.SIGINT, signal.SIGTERM):  # also if a shell has set them to be ignored
        signal.signal(number, _on_signal)
    kinds = set(options.only or Kind)
    no_cuts = unavailable_reason() if options.cuts else "--cuts is not given"
    if no_cuts is not None:
        kinds.discard(Kind.CUT)
        print(f"no cuts: {no_cuts}")
    schedule = draw_schedule(options.seed, options.faults, options.peers, options.max_peers, kinds)
    directory: Path = options.output_dir.absolute()
    try:
        remake_directory(directory, "chaos")
    except UserError as exc:
        print(f"chaos: {exc}", file=sys.stderr)
        return 2
    changes = {"inner_steps": options.inner_steps, "codec": options.codec, "result_codec": options.result_codec}
    training = {**RUN["training"], "optimiser": options.optimiser}
    run = {**RUN, "training": training, "round": {**RUN["round"], **changes}}
    started = time.monotonic()
    with ExitStack() as stack:
        network = stack.enter_context(LocalNetwork(options.max_peers)) if no_cuts is None else None
        swarm = stack.enter_context(ChaosSwarm(directory, run, hang_s=options.hang_s, network=network))
        try:
            swarm.found(options.peers)
        except (HangError, LocalPeerError) as exc:
            print(f"chaos: {options.peers} undisturbed peers did not start training: {exc}", file=sys.stderr)
            return 1
        print(f"{options.peers} peers commit a round in {swarm.pace.interval(options.peers):.1f} s", flush=True)
        hangs = 0
        try:
            for fault in schedule:
                outcome = swarm.strike(fault)
                print(describe(outcome, swarm.pace), flush=True)
                hangs += any(problem.kind == "hang" for problem in outcome.problems)
                if hangs >= _MAX_HANGS or len(swarm.running()) < MIN_PEERS:
                    print(f"given up after {hangs} hangs, with {len(swarm.running())} peers running")
                    break
        except KeyboardInterrupt as exc:
            print(f"stopped by {exc}; partial results follow", flush=True)
        result = swarm.end()
    pace, seconds = swarm.pace, time.monotonic() - started
    failures = result.failures()
    if result.faults < options.faults:
        failures.append(f"only {result.faults} of {options.faults} faults were injected")
    print(f"\nseed {options.seed}, {seconds:.0f} s\n")
    print(fault_table(swarm.outcomes, pace), end="\n\n")
    print(totals_table(result), end="\n\n")
    rounds = [[str(n), f"{pace.interval(n):.1f}", str(len(pace.samples[n]))] for n in sorted(pace.samples)]
    print(markdown(["peers", "undisturbed round s", "measured"], rounds), end="\n\n")
    content = {
        "seed": options.seed,
        "peers": options.peers,
        "max_peers": options.max_peers,
        "kinds": sorted(kinds),
        "run": run,
        "machine": {"cores": os.cpu_count(), "platform": platform.platform(), "python": platform.python_version()},
        "seconds": seconds,
        "pace": dict(sorted(pace.samples.items())),
        "faults": [to_json(outcome, pace) for outcome in swarm.outcomes],
        "totals": asdict(result),
        "failures": failures,
    }
    path: Path = options.json or directory / "chaos.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
    for failure in failures:
        print(f"FAILED: {failure}")
    if not failures:
        print("All criteria are met.")
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt as exc:
        print(f"chaos: stopped by {exc}; all peers have been killed", file=sys.stderr)
        sys.exit(130)
