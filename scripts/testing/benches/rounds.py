"""How punctual rounds are and how long peers stand still for them.

Each swarm consists of quickstart peers on this machine, all through `python -m spes_swarm.join`, with one thread each.
Everything comes from their metrics, without the first and the last rounds:

steps/H      inner steps of all peers in a round, as a share of H for each: median, 90th percentile and mean
standstill   milliseconds outside inner steps per round: median, 90th percentile; then the means of its parts: group
             (statements and rendezvous), exchange, apply (live weights, experts, merge), evaluate, and rest
             (contribution, commands between the processes, records, checkpoints)
training     share of the wall-clock time in inner steps
complete     share of the rounds with all peers

Peers that share a core slow each other down, so use no more than two a core.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import yaml

from scripts.testing.benchmark import Row
from scripts.testing.local_peer import LocalPeer, LocalPeerError
from spes_swarm.config.file import default_config_path, read_config_file

_WARM_UP_ROUNDS = 3
_PARTS = ("group", "exchange", "apply", "evaluate")
_LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--assume-reachable", "--num-threads", "1")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--config", type=Path, default=default_config_path(), help="default: the quickstart")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--inner-steps", type=int, nargs="+", default=[5, 10, 50], metavar="H")
    parser.add_argument("--rounds", type=int, default=20, help="measured, of each swarm")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each number of peers and steps."""
    for num_peers in options.peers:
        for inner_steps in options.inner_steps:
            with tempfile.TemporaryDirectory(prefix="bench-rounds-") as name:
                figures = _run_swarm(options.config, num_peers, inner_steps, options.rounds, Path(name))
            yield {"peers": num_peers, "H": inner_steps, **_summary(figures, num_peers, inner_steps)}


def _run_swarm(
    source: Path, num_peers: int, inner_steps: int, rounds: int, directory: Path
) -> list[dict[str, list[float]]]:
    """Runs one swarm for _WARM_UP_ROUNDS, these `rounds`, and one more; returns the figures of each peer."""
    run = read_config_file(source).run
    assert run is not None
    config = directory / "run.yaml"
    changed = {**run, "round": {**run["round"], "inner_steps": inner_steps}}
    config.write_text(yaml.safe_dump({"run": changed}), encoding="utf-8")
    last = _WARM_UP_ROUNDS + rounds + 1
    common = [*_LOOPBACK, "--experts", str(8 // num_peers), "--wait-for-peers", str(num_peers)]
    common += ["--max-rounds", str(last)]
    with ExitStack() as stack:
        peers = [stack.enter_context(LocalPeer(directory / "0", [*common, "--config", str(config)]))]
        address = peers[0].address()
        for i in range(1, num_peers):
            arguments = [*common, "--initial-peers", address]
            peers.append(stack.enter_context(LocalPeer(directory / str(i), arguments)))
        for peer in peers:
            if peer.wait() != 0:
                raise LocalPeerError(peer.tail())
        return [_figures(peer, _WARM_UP_ROUNDS, last) for peer in peers]


def _figures(peer: LocalPeer, first: int, last: int) -> dict[str, list[float]]:
    """The figures of each round after `first` and before `last` on one peer."""
    rounds = {number: event for number, event in peer.rounds().items() if first < number < last}
    # A step's `round` is the last one committed, so it belongs to the next.
    times: dict[int, list[float]] = {number: [] for number in range(last + 1)}
    for step in peer.events("step"):
        times[step["round"] + 1].append(step["time"])
    stood = [event for event in rounds.values() if event["standstill_seconds"] is not None]
    return {
        "steps": [len(times[number]) for number in rounds],
        "members": [event["peers"] for event in rounds.values()],
        "wall": [times[number + 1][-1] - times[number][-1] for number in rounds if times[number + 1]],
        **{part: [event[f"{part}_seconds"] for event in stood] for part in ("standstill", *_PARTS)},
    }


def _summary(of_peers: list[dict[str, list[float]]], num_peers: int, inner_steps: int) -> Row:
    """The columns of one swarm."""
    all_of = {key: [value for one in of_peers for value in one[key]] for key in of_peers[0]}
    ratios = [statistics.fmean(steps) / inner_steps for steps in zip(*(one["steps"] for one in of_peers), strict=True)]
    standstill = all_of["standstill"]
    parts = {part: 1e3 * statistics.fmean(all_of[part]) for part in _PARTS}
    return {
        "steps/H": statistics.median(ratios),
        "p90": _ninetieth(ratios),
        "mean": statistics.fmean(ratios),
        "standstill_ms": 1e3 * statistics.median(standstill),
        "standstill_p90": 1e3 * _ninetieth(standstill),
        **parts,
        "rest": 1e3 * statistics.fmean(standstill) - sum(parts.values()),
        "training": 1 - sum(standstill) / sum(all_of["wall"]),
        "complete": statistics.fmean(count == num_peers for count in all_of["members"]),
    }


def _ninetieth(values: list[float]) -> float:
    """The 90th percentile."""
    return sorted(values)[int(0.9 * (len(values) - 1))]
