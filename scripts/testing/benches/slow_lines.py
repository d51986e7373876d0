"""Three peers that train behind slow lines, in turns undisturbed and disturbed."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import yaml

from scripts.testing.benchmark import Row
from scripts.testing.forked_peer import ForkServer, Main
from scripts.testing.local_network import LocalNetwork
from scripts.testing.local_peer import LocalPeer
from scripts.testing.tiny_run import tiny_run
from spes_swarm.join import main as join

NUM_PEERS = 3
OUTSIDE = NUM_PEERS  # the host with a fast line
_PHASES = 2  # of either kind
# The reference has about 13 MB; with fp16 differences an exchange moves some 5 MB in and out of each peer.
_RUN = tiny_run(
    "bench",
    hidden_size=128,
    intermediate_size=512,
    training={"learning_rate": 1e-3, "warmup_steps": 10, "total_steps": 100_000},
    round={
        "inner_steps": 20,
        "window_s": 20.0,
        "stall_timeout_s": 20.0,
        "timeout_s": 120.0,
        "progress_ttl_s": 30.0,
        "lease_s": 120.0,
    },
    merge={"alpha": 0.0, "steps": 1, "interval": 0},
    experts_per_peer=3,
    evaluation={"sequences": 1, "every_rounds": 1000},
)
Times = tuple[list[float], list[float]]
"""Seconds of rounds and of exchanges."""
Disturbance = Callable[[int], AbstractContextManager[Callable[[], int]]]
"""Disturbs the peers in one phase, while its context is open; the context's function returns the bytes moved so far."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of both benchmarks."""
    parser.add_argument("--mbps", type=float, default=20.0, help="speed of a peer's line")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in each phase")


@contextmanager
def slow_peers(
    mbps: float, directory: Path, main: Main = join, declares: bool = True
) -> Iterator[tuple[LocalNetwork, list[LocalPeer]]]:
    """Starts the peers, which `declares` tells the speed of their lines, and waits until they train together."""
    with ExitStack() as stack:
        network = stack.enter_context(LocalNetwork(NUM_PEERS + 1))
        peers: list[LocalPeer] = []
        for host in range(NUM_PEERS):
            network.limit(host, mbps)
            config = directory / f"{host}.yaml"
            settings = {"peer": {"upload_mbps": mbps} if declares else {}} | ({} if host else {"run": _RUN})
            config.write_text(yaml.safe_dump(settings), encoding="utf-8")
            arguments = ["--host-maddrs", f"/ip4/{network.address(host)}/tcp/0", "--num-threads", "1"]
            arguments += ["--wait-for-peers", str(NUM_PEERS), "--assume-reachable", "--config", str(config)]
            if host:
                arguments += ["--initial-peers", peers[0].address(host=network.address(0))]
            launch = ForkServer(network.namespace(host), main=main)
            peers.append(stack.enter_context(LocalPeer(directory / f"peer{host}", arguments, launch)))
        for peer in peers:
            peer.wait_for("round", lambda event: event["peers"] == NUM_PEERS)
        yield network, peers


def compare(peers: Sequence[LocalPeer], num_rounds: int, disturbance: Disturbance) -> Row:
    """Returns median times of rounds, from commit to commit, and of exchanges, in phases without and with it."""
    alone: Times = ([], [])
    disturbed: Times = ([], [])
    num_bytes, seconds = 0, 0.0
    for phase in range(_PHASES):
        _add_times(alone, peers, num_rounds)
        with disturbance(phase) as moved:
            started, before = time.monotonic(), moved()
            _add_times(disturbed, peers, num_rounds)
            seconds += time.monotonic() - started
            num_bytes += moved() - before
    row: Row = {}
    for what, without, with_it in zip(("round", "exchange"), alone, disturbed, strict=True):
        row[f"{what}_s"], row[f"disturbed_{what}_s"] = statistics.median(without), statistics.median(with_it)
        row[f"{what}_ratio"] = statistics.median(with_it) / statistics.median(without)
    return {**row, "mbps": 8e-6 * num_bytes / seconds}


def _add_times(times: Times, peers: Sequence[LocalPeer], num_rounds: int) -> None:
    """Adds the seconds of this many rounds of all peers, from the next but one on."""
    first = max(max(peer.rounds(), default=0) for peer in peers) + 2
    for peer in peers:
        peer.wait_for_round(first + num_rounds)
    for peer in peers:
        rounds = peer.rounds()
        for number in range(first, first + num_rounds):
            event, following = rounds.get(number), rounds.get(number + 1)
            if event is not None and following is not None and event["peers"] == NUM_PEERS:
                times[0].append(following["time"] - event["time"])
                times[1].append(event["exchange_seconds"])
