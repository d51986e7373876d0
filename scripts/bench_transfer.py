"""Measures how much downloads by newcomers slow down the rounds of their donors, on lines of limited speed.

    sudo .venv/bin/python scripts/bench_transfer.py --mbps 20 --newcomers 4

Three real peers (`python -m spes_swarm.join`) train in network namespaces, each behind a line of --mbps in both
directions. In every other phase newcomers on a fourth host, which has no limit, download the peers' reference
repeatedly. The benchmark compares exchange times in phases with and without downloads, for three kinds of donors:

  declared   as shipped (except that newcomers have no budget), with `upload_mbps` in the configuration
  silent     the same without `upload_mbps`: transfers are limited during rounds only
  no limit   transfers use all available bandwidth

Prints a table and writes JSON. All processes share the processors, but exchanges do not run while peers train.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from scripts.testing.local_network import LocalNetwork, enter_namespace
from scripts.testing.local_peer import LocalPeer, PeerProcess
from scripts.testing.tiny_run import tiny_run
from spes_swarm.base.lifetime import die_with_parent

NUM_DONORS = 3
KINDS = ("declared", "silent", "no limit")
START_S = 300.0
ROUND_S = 120.0
# The reference has about 13 MB; with fp16 differences an exchange moves some 5 MB in and out of each peer.
RUN = tiny_run(
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


@dataclass(frozen=True)
class Outcome:
    """The result for one kind of donors."""

    kind: str
    exchanges_without: int  # of all donors; fewer than expected if one has missed a round
    exchanges_with: int
    exchange_s_without: float  # median over rounds and peers
    exchange_s_with: float
    downloads: int
    download_mbps: float  # received by all newcomers together, over all phases with downloads

    @property
    def ratio(self) -> float:
        """Exchange time with downloads relative to that without."""
        return self.exchange_s_with / self.exchange_s_without


# Processes of the experiment: this script in another role.


def take_part(kind: str, arguments: list[str]) -> int:
    """Runs a donor of this kind, from which strangers may download as often as they like."""
    from spes_swarm.base import rate_limit
    from spes_swarm.join import main as join
    from spes_swarm.network.transfer import transfer

    transfer._PER_STRANGER = transfer._PER_HOST = 1 << 30
    if kind == "no limit":
        rate_limit.DURING_ROUNDS_SHARE = 1e6
    return join(arguments)


async def download_again_and_again(directory: Path, own: str, maddrs: Sequence[str]) -> None:
    """Runs a newcomer that never joins; prints a line for each download, and the bytes so far about once a second."""
    import numpy as np

    from spes_swarm.base.errors import ProtocolError, TransferError
    from spes_swarm.config.manifest import open_manifest
    from spes_swarm.metrics.events import SyncProgress
    from spes_swarm.model.sparse_model import build_model, layout_of
    from spes_swarm.network.link.daemon import Daemon
    from spes_swarm.network.link.rpc import Rpc
    from spes_swarm.network.link.wire import Guests
    from spes_swarm.network.transfer.transfer import Transfer
    from spes_swarm.protocol.consensus.reference import Reference
    from spes_swarm.protocol.members.identity import Identity

    def complain(peer_id: str, error: ProtocolError) -> None:
        print(json.dumps({"fault": f"{peer_id}: {error}"}), flush=True)

    identity = Identity.load_or_create(directory / "identity.key")
    daemon = await Daemon.start(identity.path, [f"/ip4/{own}/tcp/0"])
    rpc = Rpc(daemon.p2p, complain)
    await rpc.start()
    donors = [await daemon.connect(maddr, 30.0) for maddr in maddrs]
    manifest = open_manifest(await rpc.call(donors[0], "manifest", {}, 30.0), source=donors[0])
    model = manifest.run.model
    layout = layout_of(build_model(model.type, model.settings, 0, "cpu", on_meta=True))
    values_N = np.zeros(layout.num_elements, np.float32)
    nobody = Guests(admits=lambda peer_id: False, is_member=lambda peer_id: False)
    stall_s, reference = manifest.run.round.stall_timeout_s, Reference(layout, values_N)
    transfer = Transfer(daemon.p2p, rpc, manifest.run_id, reference, stall_s, complain, nobody)
    num_bytes = 0
    while True:
        values_N[:] = 0.0
        transfer.reference = Reference(layout, values_N)
        started = time.monotonic()

        def tell(progress: SyncProgress, before: int = num_bytes) -> None:
            print(json.dumps({"at": time.monotonic(), "bytes": before + progress.payload_bytes}), flush=True)

        try:
            report = await transfer.download(lambda: donors, None, tell)
        except TransferError as exc:
            print(json.dumps({"fault": str(exc)}), flush=True)
            continue
        num_bytes += report.payload_bytes
        print(json.dumps({"seconds": time.monotonic() - started, "bytes": report.payload_bytes}), flush=True)


# The experiment.


def in_namespace(network: LocalNetwork, host: int, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a command on a host, with its output appended to `log`."""
    name, parent = network.namespace(host), os.getpid()

    def prepare() -> None:
        die_with_parent(parent)
        enter_namespace(name)

    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=prepare,
        )


def launcher(network: LocalNetwork, host: int, kind: str) -> Callable[[Sequence[str], Path], PeerProcess]:
    """The `launch` argument of LocalPeer for a donor."""

    def launch(arguments: Sequence[str], log: Path) -> PeerProcess:
        return in_namespace(network, host, [__file__, "--take-part", kind, *arguments], log)

    return launch


def start_donors(stack: ExitStack, network: LocalNetwork, directory: Path, kind: str, mbps: float) -> list[LocalPeer]:
    """Starts three peers that train together."""
    peer = {"upload_mbps": mbps} if kind == "declared" else {}
    donors: list[LocalPeer] = []
    for host in range(NUM_DONORS):
        config = directory / f"{host}.yaml"
        config.write_text(yaml.safe_dump({"peer": peer} if host else {"run": RUN, "peer": peer}))
        arguments = ["--host-maddrs", f"/ip4/{network.address(host)}/tcp/0", "--num-threads", "1"]
        arguments += ["--wait-for-peers", str(NUM_DONORS), "--assume-reachable", "--config", str(config)]
        if host:
            arguments += ["--initial-peers", donors[0].address(START_S, network.address(0))]
        donor = LocalPeer(directory / f"donor{host}", arguments, launcher(network, host, kind))
        donors.append(stack.enter_context(donor))
    return donors


@contextmanager
def newcomers(
    network: LocalNetwork, directory: Path, donors: Sequence[LocalPeer], count: int
) -> Iterator[Callable[[], list[list[dict[str, Any]]]]]:
    """Runs newcomers that download; yields a function that returns their reports so far."""
    maddrs = [donor.address(START_S, network.address(host)) for host, donor in enumerate(donors)]
    places = [directory / f"newcomer{number}" for number in range(count)]
    with ExitStack() as stack:
        processes = []
        for place in places:
            place.mkdir(parents=True)
            command = [__file__, "--download", str(place), network.address(NUM_DONORS), *maddrs]
            processes.append(in_namespace(network, NUM_DONORS, command, place / "log"))
            stack.callback(processes[-1].wait, 10)
            stack.callback(processes[-1].kill)

        def reports() -> list[list[dict[str, Any]]]:
            if any(process.poll() is not None for process in processes):
                raise SystemExit("\n".join((place / "log").read_text() for place in places))
            lines = [(place / "log").read_text().splitlines() for place in places]
            return [[json.loads(line) for line in each if line.startswith("{")] for each in lines]

        deadline = time.monotonic() + START_S
        while not all(reports()):
            if time.monotonic() > deadline:
                raise SystemExit("the newcomers did not start to download")
            time.sleep(0.1)
        yield reports


def exchange_times(donors: Sequence[LocalPeer], num_rounds: int) -> list[float]:
    """Waits for this many rounds from now on; returns the times of the exchanges in which all donors took part."""
    first = max(max(donor.rounds(), default=0) for donor in donors) + 2  # the next one may be in progress
    for donor in donors:
        donor.wait_for_round(first + num_rounds - 1, num_rounds * ROUND_S)
    held = [donor.rounds().get(number) for donor in donors for number in range(first, first + num_rounds)]
    return [float(event["exchange_seconds"]) for event in held if event is not None and event["peers"] == NUM_DONORS]


def measure(kind: str, mbps: float, count: int, rounds: int, phases: int, directory: Path) -> Outcome:
    """Runs one swarm, in alternating phases with and without downloads."""
    without: list[float] = []
    with_downloads: list[float] = []
    num_downloads, rates = 0, []
    with ExitStack() as stack:
        network = stack.enter_context(LocalNetwork(NUM_DONORS + 1))
        for host in range(NUM_DONORS):
            network.limit(host, mbps)
        donors = start_donors(stack, network, directory, kind, mbps)
        for donor in donors:
            donor.wait_for("round", lambda event: event["peers"] == NUM_DONORS, START_S)
        for phase in range(phases):
            without += exchange_times(donors, rounds)
            with newcomers(network, directory / f"phase{phase}", donors, count) as reports:
                with_downloads += exchange_times(donors, rounds)
                downloads = reports()
            num_downloads += sum("seconds" in report for each in downloads for report in each)
            heard = [[report for report in each if "at" in report] for each in downloads]
            rates.append(sum((e[-1]["bytes"] - e[0]["bytes"]) / (e[-1]["at"] - e[0]["at"]) for e in heard))
    return Outcome(
        kind,
        len(without),
        len(with_downloads),
        statistics.median(without),
        statistics.median(with_downloads),
        num_downloads,
        8e-6 * statistics.mean(rates),
    )


def main() -> int:
    """Runs the benchmark."""
    if sys.argv[1:2] == ["--take-part"]:
        return take_part(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["--download"]:
        asyncio.run(download_again_and_again(Path(sys.argv[2]), sys.argv[3], sys.argv[4:]))
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbps", type=float, default=20.0, help="speed of a donor's line")
    parser.add_argument("--newcomers", type=int, default=4, help="newcomers that download at the same time")
    parser.add_argument("--rounds", type=int, default=6, help="rounds in each phase")
    parser.add_argument("--phases", type=int, default=2, help="phases with and phases without downloads")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--output", type=Path, default=Path("runs/bench_transfer.json"))
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    print(f"{'donors':<10} {'exchange alone':>15} {'with download':>14} {'ratio':>6} {'download':>13}")
    for kind in arguments.kinds:
        with tempfile.TemporaryDirectory(prefix="spes_swarm-bench-") as directory:
            outcome = measure(
                kind, arguments.mbps, arguments.newcomers, arguments.rounds, arguments.phases, Path(directory)
            )
        outcomes.append(outcome)
        print(
            f"{kind:<10} {outcome.exchange_s_without:>13.2f} s {outcome.exchange_s_with:>12.2f} s "
            f"{outcome.ratio:>6.2f} {outcome.download_mbps:>6.1f} Mbit/s   "
            f"({outcome.exchanges_without} and {outcome.exchanges_with} exchanges)",
            flush=True,
        )
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    results = [{**asdict(outcome), "ratio": outcome.ratio} for outcome in outcomes]
    setting = {"mbps": arguments.mbps, "newcomers": arguments.newcomers, "load": os.getloadavg()[2]}
    arguments.output.write_text(json.dumps({**setting, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
