"""Measures what signed exchanges and audits cost honest peers.

    .venv/bin/python -m scripts.bench_audits --size 30M --inner-steps 4

For each seed, two swarms of real peers hold the same number of rounds, one after the other, in alternating order: one
as it is, and one that signs and audits nothing (scripts/testing/unsigned_peer.py says what is left out). Each peer is
in a network namespace, which needs root, with a line of --mbps in both directions from round 1 on. Figures are of a
peer and a round, after some rounds to warm up:

  exchange s   of the metrics: median over peers and rounds
  bytes        sent on the line, those of audits included
  network s    CPU seconds of the network process
  p2pd s       and of the libp2p daemon
  total s      and of both
  loss         of the evaluation after the last round, mean over peers

CPU seconds hardly depend on what else the machine does; the seconds of an exchange do if peers wait for a core. Steps
are short, so peers end up with slightly different numbers of them, on which the loss depends. `--profile` also counts
the CPU time of single functions, and costs some itself. The exit code is 1 if a peer reported a fault, or a round
lacked a member or a part.

With `--slow-mbps`, the last peer has a slower line, and says so; deadlines are the quickstart's, and only signing peers
are run. Then the lines about members, parts and faults are what this is about: how the others deal with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from scripts.testing.local_network import LocalNetwork
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from scripts.testing.unsigned_peer import PROFILE, launch
from spes_swarm.base.arguments import show_any_text
from spes_swarm.config.file import default_config_path, read_config_file

QUICKSTART: Final = "quickstart"
# Hidden size, expert's FFN, layers. The names are the numbers of parameters with eight experts.
# With 30M and five peers, most parts have the default 65,536 elements; smaller models have as many, shorter parts.
SIZES: Final = {"5M": (192, 384, 3), "10M": (256, 384, 4), "30M": (384, 768, 4)}
VARIANTS: Final = ("unsigned", "signed")
FIGURES: Final = ("exchange s", "bytes", "network s", "p2pd s", "total s", "loss")
PORT: Final = 9100
START_S: Final = 300.0
_POLL_S: Final = 0.1


@dataclass(frozen=True)
class Sample:
    """What a peer has used up to a moment."""

    sent_bytes: int
    network_s: float
    p2pd_s: float

    @classmethod
    def of(cls, peer: LocalPeer) -> Sample:
        """Reads the counters of a peer's host and processes."""
        tree = peer.tree()
        daemon = next(process for process in tree if process.name() == "p2pd")
        network = psutil.Process(daemon.ppid())
        assert network.pid != peer.process.pid
        lines = Path(f"/proc/{peer.process.pid}/net/dev").read_text(encoding="ascii").splitlines()
        counters = next(line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:"))
        return cls(int(counters[8]), _cpu_s(network), _cpu_s(daemon))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@dataclass
class Swarm:
    """The figures of one swarm."""

    variant: str
    seed: int
    means: dict[str, float] = field(default_factory=dict)  # FIGURES
    exchange_s: list[float] = field(default_factory=list)  # of each peer and round
    parts: int = 0
    payload_bytes: float = 0.0  # sent by a peer in a round, without audits
    steps: float = 0.0  # of a peer
    troubles: list[str] = field(default_factory=list)
    functions: dict[str, list[float]] = field(default_factory=dict)  # CPU ms and calls of a peer and round


def run_settings(options: argparse.Namespace) -> dict[str, Any]:
    """The section `run` of the configuration."""
    run = read_config_file(default_config_path()).run
    assert run is not None
    changed: dict[str, Any] = json.loads(json.dumps(run))
    if options.size != QUICKSTART:
        hidden, ffn, layers = SIZES[options.size]
        sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}
        changed["model"]["settings"] |= sizes
        # Steps are short, since exchanges are measured: Muon would take longer than the rest of them.
        changed["training"] |= {"batch_size": 2, "sequence_length": 64, "optimiser": "adamw", "learning_rate": 1e-3}
        changed["training"].pop("muon_momentum")
        changed["evaluation"]["sequences"] = 32
    patience = {"stall_timeout_s": 30, "timeout_s": 240, "progress_ttl_s": 60, "lease_s": 240}  # for a busy machine
    if options.slow_mbps is None:
        changed["round"] |= patience
    if options.inner_steps:
        changed["round"]["inner_steps"] = options.inner_steps
    changed["evaluation"]["every_rounds"] = last_round(options)
    return changed


def last_round(options: argparse.Namespace) -> int:
    """The number of rounds that a swarm holds: the last measured one ends with the commit of the one after it."""
    return int(options.warm_up + options.rounds + 1)


def measure(variant: str, seed: int, options: argparse.Namespace, directory: Path) -> Swarm:
    """Runs one swarm."""
    directory.mkdir(parents=True)
    config = directory / "run.yaml"
    config.write_text(yaml.safe_dump({"run": run_settings(options)}), encoding="utf-8")
    common = ["--wait-for-peers", options.peers, "--max-rounds", last_round(options), "--num-threads", 1]
    common += ["--assume-reachable"]
    with ExitStack() as stack:
        network = stack.enter_context(LocalNetwork(options.peers))
        peers: list[LocalPeer] = []
        lines: list[float] = []  # Mbit/s
        for host in range(options.peers):
            slow = options.slow_mbps is not None and host == options.peers - 1
            lines.append(options.slow_mbps if slow else options.mbps)
            arguments = [*common, "--seed", options.peers * seed + host, "--upload-mbps", lines[-1]]
            arguments += ["--host-maddrs", f"/ip4/{network.address(host)}/tcp/{PORT}"]
            if host:
                arguments += ["--initial-peers", peers[0].address(START_S, network.address(0))]
            else:
                arguments += ["--config", config]
            start = launch(network.namespace(host), signed=variant == "signed", profiled=options.profile)
            peers.append(
                stack.enter_context(LocalPeer(directory / str(host), [str(a) for a in arguments], launch=start))
            )
        for host, peer in enumerate(peers):  # peers that join download the model, which is not measured
            peer.wait_for_round(1)
            network.limit(host, lines[host])
        samples = follow(peers, (options.warm_up, options.warm_up + options.rounds))
        for peer in peers:
            if peer.wait() != 0:
                raise SystemExit(peer.tail())
        return figures(Swarm(variant, seed), peers, samples, options)


def follow(peers: Sequence[LocalPeer], rounds: tuple[int, int]) -> list[list[Sample]]:
    """Samples each peer after the two rounds."""
    samples: list[list[Sample]] = [[] for _ in peers]
    deadline = time.monotonic() + PATIENCE_S
    while any(len(of_peer) < len(rounds) for of_peer in samples):
        for peer, of_peer in zip(peers, samples, strict=True):
            for event in peer.new_events():
                due = rounds[len(of_peer) :]  # a peer may miss a round
                if event["event"] == "round" and due and event["round"] >= due[0]:
                    of_peer.append(Sample.of(peer))
            if peer.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench_audits: a peer did not get to round {rounds[1]}\n{peer.tail()}")
        time.sleep(_POLL_S)
    return samples


def figures(
    swarm: Swarm, peers: Sequence[LocalPeer], samples: Sequence[Sequence[Sample]], options: argparse.Namespace
) -> Swarm:
    """Fills in what was measured."""
    measured, last = range(options.warm_up + 1, last_round(options)), last_round(options)
    payload, losses, steps = [], [], []
    for number, peer in enumerate(peers):
        rounds = peer.rounds()
        swarm.troubles += [f"peer {number}: {e['kind']}: {e['detail']}" for e in peer.events("fault")]
        for i in measured:
            event = rounds.get(i)
            if event is None or event["peers"] < options.peers or event["parts_missing"]:
                swarm.troubles.append(f"peer {number}: round {i}: {event}")
                continue
            swarm.exchange_s.append(event["exchange_seconds"])
            payload.append(event["payload_bytes_sent"] or 0)
            swarm.parts = event["parts_total"]
        losses += [event["eval_loss"] for event in [rounds.get(last)] if event is not None]
        steps.append(len(peer.events("step")))
    used = [(after, before) for before, after in samples]
    count = len(used) * options.rounds
    network_s = sum(after.network_s - before.network_s for after, before in used) / count
    p2pd_s = sum(after.p2pd_s - before.p2pd_s for after, before in used) / count
    sent = sum(after.sent_bytes - before.sent_bytes for after, before in used) / count
    values = statistics.median(swarm.exchange_s), sent, network_s, p2pd_s, network_s + p2pd_s, statistics.fmean(losses)
    swarm.means = dict(zip(FIGURES, values, strict=True))
    swarm.payload_bytes, swarm.steps = statistics.fmean(payload), statistics.fmean(steps)
    if options.profile:
        swarm.functions = profile(peers, last)
    return swarm


def profile(peers: Sequence[LocalPeer], rounds: int) -> dict[str, list[float]]:
    """CPU milliseconds and calls of each function, of a peer and round."""
    total: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for peer in peers:
        for name, (seconds, calls) in json.loads((peer.output_dir / PROFILE).read_text(encoding="utf-8")).items():
            total[name][0] += 1e3 * seconds / len(peers) / rounds
            total[name][1] += calls / len(peers) / rounds
    return dict(total)


def table(swarms: Sequence[Swarm]) -> str:
    """The medians of both variants, and the ratio of each pair."""
    by_variant = {v: {swarm.seed: swarm.means for swarm in swarms if swarm.variant == v} for v in VARIANTS}
    lines = [f"{'':12}{'unsigned':>12}{'signed':>12}{'ratio':>9}  of each seed"]
    for name in FIGURES:
        without, signed = ({seed: means[name] for seed, means in by_variant[v].items()} for v in VARIANTS)
        ratios = [signed[seed] / without[seed] for seed in without if seed in signed]
        middle = [statistics.median(each.values()) for each in (without, signed)]
        shown = " ".join(f"{ratio - 1:+.2%}" for ratio in ratios)
        line = f"{name:12}{middle[0]:>12.5g}{middle[1]:>12.5g}{statistics.median(ratios) - 1:>+9.2%}  {shown}"
        lines.append(line)
    return "\n".join(lines)


def table_of_functions(swarms: Sequence[Swarm]) -> str:
    """CPU milliseconds and calls of both variants, of a peer and round, means over seeds."""
    sides = [[swarm.functions for swarm in swarms if swarm.variant == variant] for variant in VARIANTS]
    names = sorted({name for swarm in swarms for name in swarm.functions})
    lines = [f"{'CPU of a peer and round':36}{'unsigned ms':>12}{'calls':>8}{'signed ms':>12}{'calls':>8}"]
    for name in names:
        cells = []
        for side in sides:
            values = [functions.get(name, [0.0, 0.0]) for functions in side]
            cells.append("".join(f"{statistics.fmean(v[i] for v in values):>{12 - 4 * i}.1f}" for i in (0, 1)))
        lines.append(f"{name:36}{cells[0]}{cells[1]}")
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", default=QUICKSTART, choices=[QUICKSTART, *SIZES])
    parser.add_argument("--peers", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10, help="measured ones")
    parser.add_argument("--warm-up", type=int, default=3, metavar="ROUNDS", help="before them")
    parser.add_argument("--inner-steps", type=int, help="override the quickstart's")
    parser.add_argument("--mbps", type=float, default=100.0, help="of each peer's line")
    parser.add_argument("--slow-mbps", type=float, help="of the last peer's line, if that is slower")
    parser.add_argument("--profile", action="store_true", help="count the CPU time of single functions, too")
    parser.add_argument("--json", type=Path, default=Path("runs/audits.json"))
    options = parser.parse_args(argv)
    if options.peers < 2 or min(options.seeds, options.rounds, options.warm_up) < 1:
        parser.error("--peers must be at least 2; --seeds, --rounds and --warm-up at least 1")
    if options.slow_mbps is not None and (options.profile or options.slow_mbps > options.mbps):
        parser.error("--slow-mbps must be at most --mbps, and goes without --profile")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all swarms; returns 1 if one of them was not all right."""
    show_any_text()
    options = parse_arguments(argv)
    swarms: list[Swarm] = []
    for seed in range(options.seeds):
        both = VARIANTS[:: 1 if seed % 2 == 0 else -1]
        for variant in both if options.slow_mbps is None else ["signed"]:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="bench-audits-") as name:
                swarm = measure(variant, seed, options, Path(name) / "swarm")
            swarms.append(swarm)
            shown = ", ".join(f"{key} {value:.5g}" for key, value in swarm.means.items())
            print(
                f"seed {seed}, {variant}: {shown}; {swarm.parts} parts, {swarm.payload_bytes:.4g} payload bytes, "
                f"{swarm.steps:.1f} steps; {time.monotonic() - begun:.0f} s",
                flush=True,
            )
            print("".join(f"FAULT {trouble}\n" for trouble in swarm.troubles), end="", flush=True)
    if options.slow_mbps is None:
        print(table(swarms))
    if options.profile:
        print(table_of_functions(swarms))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"options": {k: str(v) for k, v in vars(options).items()}, "swarms": [asdict(s) for s in swarms]}
    options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if any(swarm.troubles for swarm in swarms) else 0


if __name__ == "__main__":
    sys.exit(main())
