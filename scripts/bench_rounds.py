"""Measures how punctual rounds are and how long peers stand still for them.

    .venv/bin/python scripts/bench_rounds.py --peers 2 4 --inner-steps 5 10 50

Each swarm consists of quickstart peers on this machine, all through `python -m spes_swarm.join`, with one thread each.
Everything comes from their metrics, without the first and the last rounds:

  steps/H      inner steps of all peers in a round, as a share of H for each: median, 90th percentile and mean
  standstill   milliseconds outside inner steps per round: median, 90th percentile; then the means of its parts
  training     share of the wall-clock time in inner steps

The parts of a standstill are: group (statements and rendezvous), exchange, apply (live weights, experts, merge),
evaluate, and rest (contribution, commands between the processes, records, checkpoints). Peers that share a core slow
each other down, so use no more than two a core. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from scripts.testing.local_peer import LocalPeer
from spes_swarm.config.file import default_config_path, read_config_file

WARM_UP_ROUNDS = 3
PARTS = ("group", "exchange", "apply", "evaluate", "rest")
HEAD = (
    f"{'peers':>5} {'H':>3} {'steps/H':>8} {'p90':>5} {'mean':>5} {'standstill ms':>14} {'p90':>5} "
    f"{''.join(f'{part:>9}' for part in PARTS)} {'training':>9} {'complete':>9} {'wall s':>7}"
)
LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--assume-reachable", "--num-threads", "1")
Result = dict[str, Any]


def measure(source: Path, num_peers: int, inner_steps: int, rounds: int, directory: Path) -> Result:
    """Runs one swarm for WARM_UP_ROUNDS, these `rounds`, and one more; returns its figures."""
    run = read_config_file(source).run
    assert run is not None
    directory.mkdir(parents=True)
    config = directory / "run.yaml"
    changed = {**run, "round": {**run["round"], "inner_steps": inner_steps}}
    config.write_text(yaml.safe_dump({"run": changed}), encoding="utf-8")
    last = WARM_UP_ROUNDS + rounds + 1
    common = [*LOOPBACK, "--experts", str(8 // num_peers), "--wait-for-peers", str(num_peers)]
    common += ["--max-rounds", str(last)]
    with ExitStack() as stack:
        peers = [stack.enter_context(LocalPeer(directory / "0", [*common, "--config", str(config)]))]
        address = peers[0].address()
        for i in range(1, num_peers):
            arguments = [*common, "--initial-peers", address]
            peers.append(stack.enter_context(LocalPeer(directory / str(i), arguments)))
        for peer in peers:
            if peer.wait() != 0:
                raise SystemExit(peer.tail())
        seen = [figures(peer, WARM_UP_ROUNDS, last) for peer in peers]
    joined = {key: [value for one in seen for value in one[key]] for key in seen[0]}
    together = [statistics.fmean(steps) / inner_steps for steps in zip(*(one["steps"] for one in seen), strict=True)]
    return {"peers": num_peers, "inner_steps": inner_steps, "rounds": rounds, "ratio": together, **joined}


def figures(peer: LocalPeer, first: int, last: int) -> dict[str, list[float]]:
    """The figures of each round after `first` and before `last` on one peer."""
    rounds = {number: event for number, event in peer.rounds().items() if first < number < last}
    # A step's `round` is the last one committed, so it belongs to the next.
    times: dict[int, list[float]] = {number: [] for number in range(last + 1)}
    for step in peer.events("step"):
        times[step["round"] + 1].append(step["time"])
    result: dict[str, list[float]] = {
        "steps": [len(times[number]) for number in rounds],
        "members": [event["peers"] for event in rounds.values()],
        "wall": [times[number + 1][-1] - times[number][-1] for number in rounds if times[number + 1]],
    }
    stood = [event for event in rounds.values() if event["standstill_seconds"] is not None]
    for part in ("standstill", *PARTS[:-1]):
        result[part] = [event[f"{part}_seconds"] for event in stood]
    known = [sum(event[f"{part}_seconds"] for part in PARTS[:-1]) for event in stood]
    result["rest"] = [event["standstill_seconds"] - seconds for event, seconds in zip(stood, known, strict=True)]
    return result


def summary(result: Result) -> dict[str, float]:
    """The figures of one swarm in numbers: ratios, and seconds."""
    ratio, standstill = result["ratio"], result["standstill"]
    return {
        "ratio": statistics.median(ratio),
        "ratio_p90": ninetieth(ratio),
        "ratio_mean": statistics.fmean(ratio),
        "standstill": statistics.median(standstill),
        "standstill_p90": ninetieth(standstill),
        **{part: statistics.fmean(result[part]) for part in PARTS},
        "training": 1 - sum(standstill) / sum(result["wall"]),
        "all_members": statistics.fmean(count == result["peers"] for count in result["members"]),
    }


def ninetieth(values: list[float]) -> float:
    """The 90th percentile."""
    return sorted(values)[int(0.9 * (len(values) - 1))]


def line(result: Result, wall_s: float) -> str:
    """The line of the table for one swarm."""
    short = result["summary"]
    times = [1e3 * short[key] for key in PARTS]
    return (
        f"{result['peers']:>5} {result['inner_steps']:>3} {short['ratio']:>8.3f} {short['ratio_p90']:>5.2f} "
        f"{short['ratio_mean']:>5.2f} {1e3 * short['standstill']:>14.0f} {1e3 * short['standstill_p90']:>5.0f} "
        f"{''.join(f'{value:>9.0f}' for value in times)} {short['training']:>9.1%} {short['all_members']:>9.0%} "
        f"{wall_s:>7.0f}"
    )


def main() -> int:
    """Measures each combination."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--config", type=Path, default=default_config_path(), help="of the run; default: the quickstart"
    )
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[5, 10, 50], metavar="H")
    parser.add_argument("--rounds", type=int, default=20, help="measured, of each swarm")
    parser.add_argument("--json", type=Path, default=Path("runs/rounds.json"))
    options = parser.parse_args()
    results: list[Result] = []
    print(HEAD)
    for num_peers in options.peers:
        for inner_steps in options.inner_steps:
            with tempfile.TemporaryDirectory(prefix="bench-rounds-") as name:
                started = time.monotonic()
                result = measure(options.config, num_peers, inner_steps, options.rounds, Path(name) / "swarm")
            result["summary"] = summary(result)
            results.append(result)
            print(line(result, time.monotonic() - started), flush=True)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
