"""Measures how much publishing slows down the rounds of the publishing peer and of its swarm, on slow lines.

    sudo .venv/bin/python scripts/bench_publish.py --mbps 20

Three real peers (`python -m spes_swarm.join`) train in network namespaces, each behind a line of --mbps in both
directions. In every other phase the first of them publishes its newest round repeatedly, with the command that
`--publish-to` runs beside the training, to a server with the Hub's protocol on a fourth host. The benchmark compares
the times from commit to commit and of the exchanges, in phases with and without uploads, for two kinds of uploads:

  shipped    the upload may use a tenth of the line, as if declared with `--upload-mbps`
  no limit   the upload uses all available bandwidth

Prints a table and writes JSON. All processes share the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.bench_transfer import NUM_DONORS, ROUND_S, START_S, start_donors
from scripts.testing.local_network import LocalNetwork, enter_namespace
from scripts.testing.local_peer import LocalPeer
from spes_swarm.base.lifetime import die_with_parent
from spes_swarm.base.rate_limit import DURING_ROUNDS_SHARE

KINDS = ("shipped", "no limit")
TOKEN = "hf_test_owner"


@dataclass(frozen=True)
class Times:
    """Times of the rounds of one phase, in seconds."""

    rounds: list[float]  # from commit to commit
    exchanges: list[float]


@dataclass(frozen=True)
class Outcome:
    """The result for one kind of uploads; medians over rounds and peers, in seconds."""

    kind: str
    round_without: float
    round_with: float
    exchange_without: float
    exchange_with: float
    upload_mbps: float  # mean over the phases with uploads

    @property
    def round_ratio(self) -> float:
        """Time of a round with uploads relative to that without."""
        return self.round_with / self.round_without

    @property
    def exchange_ratio(self) -> float:
        """The same for the exchange only."""
        return self.exchange_with / self.exchange_without


def start_hub(stack: ExitStack, network: LocalNetwork, directory: Path) -> str:
    """Starts the server on the host after those of the peers; returns its URL."""
    (directory / "data").mkdir(parents=True)
    log = directory / "log"
    command = ["-m", "tests.helpers.hub_routes", str(directory / "data"), str(1 << 20), network.address(NUM_DONORS)]
    name = network.namespace(NUM_DONORS)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,  # it exits when this is closed
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: enter_namespace(name),
        )
    stack.callback(process.wait, 10)
    stack.callback(process.kill)
    deadline = time.monotonic() + 30
    while not log.read_text().startswith("http://"):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return log.read_text().split()[0]


@contextmanager
def uploads(
    network: LocalNetwork, peer: LocalPeer, endpoint: str, limit_mbps: float | None, repo: str
) -> Iterator[None]:
    """Publishes repeatedly in the background while the context is open."""
    stop = threading.Event()
    name, parent = network.namespace(0), os.getpid()
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    current: list[subprocess.Popen[bytes]] = []

    def prepare() -> None:
        die_with_parent(parent)
        enter_namespace(name)

    def publish() -> None:
        command = [sys.executable, "-m", "spes_swarm.publish", str(peer.output_dir), "--to", repo, "--json"]
        command += ["--background", *(["--upload-mbps", str(limit_mbps)] if limit_mbps is not None else [])]
        while not stop.is_set():
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, env=environment, preexec_fn=prepare, start_new_session=True
            )
            current[:] = [process]
            process.wait()

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        for process in current:
            process.kill()
        thread.join()


def bytes_received(network: LocalNetwork, endpoint: str) -> int:
    """Bytes of large files that the server has received so far."""
    answers: list[int] = []

    def ask() -> None:
        enter_namespace(network.namespace(NUM_DONORS))  # moves this thread only
        with urllib.request.urlopen(f"{endpoint}/_control/counters", b"{}", timeout=30) as reply:
            answers.append(json.load(reply).get("lfs_bytes", 0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answers[0]


def times(peers: Sequence[LocalPeer], num_rounds: int) -> Times:
    """Waits for this many rounds, starting after the next one, and returns their times."""
    first = max(max(peer.rounds(), default=0) for peer in peers) + 2
    for peer in peers:
        peer.wait_for_round(first + num_rounds, (num_rounds + 2) * ROUND_S)
    found = Times([], [])
    for peer in peers:
        events = peer.rounds()
        for number in range(first, first + num_rounds):
            if number in events and number + 1 in events:
                found.rounds.append(events[number + 1]["time"] - events[number]["time"])
                found.exchanges.append(events[number]["exchange_seconds"])
    return found


def measure(kind: str, mbps: float, rounds: int, phases: int, directory: Path) -> Outcome:
    """Runs one swarm, in alternating phases with and without uploads."""
    without, during = Times([], []), Times([], [])
    num_bytes, seconds = 0, 0.0
    limit = DURING_ROUNDS_SHARE * mbps if kind == "shipped" else None
    with ExitStack() as stack:
        network = stack.enter_context(LocalNetwork(NUM_DONORS + 1))
        for host in range(NUM_DONORS):
            network.limit(host, mbps)
        endpoint = start_hub(stack, network, directory / "hub")
        peers = start_donors(stack, network, directory, "declared", mbps)
        for peer in peers:
            peer.wait_for("round", lambda event: event["peers"] == NUM_DONORS, START_S)
        for phase in range(phases):
            quiet = times(peers, rounds)
            with uploads(network, peers[0], endpoint, limit, f"user/{kind.replace(' ', '-')}-{phase}"):
                started, before = time.monotonic(), bytes_received(network, endpoint)
                busy = times(peers, rounds)
                seconds += time.monotonic() - started
                num_bytes += bytes_received(network, endpoint) - before
            for total, part in ((without, quiet), (during, busy)):
                total.rounds.extend(part.rounds)
                total.exchanges.extend(part.exchanges)
    return Outcome(
        kind=kind,
        round_without=statistics.median(without.rounds),
        round_with=statistics.median(during.rounds),
        exchange_without=statistics.median(without.exchanges),
        exchange_with=statistics.median(during.exchanges),
        upload_mbps=8e-6 * num_bytes / seconds,
    )


def main() -> int:
    """Runs the benchmark."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbps", type=float, default=20.0, help="speed of a peer's line")
    parser.add_argument("--rounds", type=int, default=8, help="rounds in each phase")
    parser.add_argument("--phases", type=int, default=2, help="phases with and phases without uploads")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("runs/bench_publish.json"))
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    columns = ("round alone", "with upload", "ratio", "exchange", "with upload", "ratio")
    print(f"{'upload':<10}" + "".join(f"{column:>13}" for column in columns))
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="spes_swarm-bench-") as directory:
            outcome = measure(kind, arguments.mbps, arguments.rounds, arguments.phases, Path(directory))
        outcomes.append(outcome)
        print(
            f"{kind:<10}{outcome.round_without:>11.2f} s{outcome.round_with:>11.2f} s{outcome.round_ratio:>13.2f}"
            f"{outcome.exchange_without:>11.2f} s{outcome.exchange_with:>11.2f} s{outcome.exchange_ratio:>13.2f}   "
            f"({outcome.upload_mbps:.1f} Mbit/s)",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    results = [
        {**asdict(outcome), "round_ratio": outcome.round_ratio, "exchange_ratio": outcome.exchange_ratio}
        for outcome in outcomes
    ]
    setting = {"mbps": arguments.mbps, "rounds": arguments.rounds, "phases": arguments.phases, "load": os.getloadavg()}
    arguments.output.write_text(json.dumps({**setting, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
