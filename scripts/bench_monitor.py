"""Measures the monitor's time per refresh and its memory for a large swarm.

    .venv/bin/python scripts/bench_monitor.py --peers 10 100 1000 --json monitor.json

The peers are synthetic: each has its own key and signs a progress and a lease record. A process beside the monitor is
the DHT node that stores all records, and renews a third of the progress records between two refreshes (peers renew
them every 6 seconds). The measured path is the real one: p2pd, hivemind's DHT, signatures, ledger, JSON, history.

Creating a thousand RSA keys takes minutes; --keys DIR keeps them for later runs.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from rich.console import Console
from rich.table import Table

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.monitor.collector import Collector
from spes_swarm.monitor.history import History
from spes_swarm.monitor.state import to_text
from spes_swarm.monitor.views.prometheus import metrics_text
from spes_swarm.monitor.views.terminal import screen
from spes_swarm.monitor.watcher import NetworkOptions, open_watcher
from spes_swarm.network.link.clock import Timekeeper
from spes_swarm.network.link.daemon import Daemon
from spes_swarm.network.link.dht_records import RunRecordValidator, record_key
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.members.round_metrics import PeerMetrics, telemetry_of
from spes_swarm.protocol.members.signed import seal

_LIMIT_S = 2.0
_SHARE_RENEWED = 3
Row = dict[str, Any]


def ignore(peer_id: str, error: ProtocolError) -> None:
    """Ignores faults."""
    del peer_id, error


def load_identities(directory: Path, count: int) -> list[Identity]:
    """Loads keys from a directory, and creates those that are missing."""
    return [Identity.load_or_create(directory / f"{number}.key") for number in range(count)]


def make_keys(arguments: tuple[Path, int]) -> None:
    """Creates one key, in a process of a pool."""
    directory, number = arguments
    Identity.load_or_create(directory / f"{number}.key")


def progress_of(number: int, round_number: int, expires: float) -> Progress:
    """A record as a peer of a large swarm would write it."""
    return Progress(
        expires=expires,
        name=f"volunteer-{number}",
        state="training",
        reachable=True,
        round=round_number,
        digest=bytes([round_number]) * 32,
        tokens=1000 + number,
        tokens_per_step=8192,
        tokens_per_second=1000.0 + number,
        experts=[number % 64, 64 + number % 32],
        telemetry=telemetry_of(
            PeerMetrics(
                step=100 * round_number,
                loss=3.0 + number / 10_000,
                round_seconds=12.5,
                bytes_sent=10**9,
                bytes_received=10**9,
                total_tokens=10**8,
            )
        ),
    )


class SyntheticSwarm:
    """The records of many peers in the storage of one real DHT node."""

    def __init__(self, node: DHTNode, manifest: Manifest, identities: list[Identity]) -> None:
        self._node = node
        self._manifest = manifest
        self._identities = identities
        self.record_bytes = 0

    def _put(self, kind: str, owner: Identity, record: Progress | Lease) -> None:
        sealed = seal(owner, kind, self._manifest.run_id, record)
        self.record_bytes = max(self.record_bytes, len(sealed))
        key = DHTID.generate(source=record_key(self._manifest.run_id, kind))
        value = DHTProtocol.serializer.dumps(sealed)
        self._node.protocol.storage.store(key, value, record.expires, subkey=owner.peer_id)

    def begin(self) -> None:
        """Stores the first records of all peers. They live long, so that none expires while others are being signed."""
        for number, owner in enumerate(self._identities):
            self._put("progress", owner, progress_of(number, 1, time.time() + 600))
            self._put("leases", owner, Lease(expires=time.time() + 600, experts=[number % 64], since_round=1))

    def renew(self, turn: int) -> None:
        """Renews the records of a third of the peers, one round further."""
        for number in range(turn % _SHARE_RENEWED, len(self._identities), _SHARE_RENEWED):
            expires = time.time() + 600 + turn
            self._put("progress", self._identities[number], progress_of(number, 1 + turn // _SHARE_RENEWED, expires))


async def serve_swarm(pipe: Connection, manifest: Manifest, identities: list[Identity]) -> None:
    """Serves the swarm, in the process beside the monitor, until None arrives on the pipe."""
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    daemon = await Daemon.start(identities[0].path, ["/ip4/127.0.0.1/tcp/0"])
    rpc = Rpc(daemon.p2p, ignore)
    await rpc.start()
    await Timekeeper(rpc, manifest.run_id, daemon.peer_id, ignore).serve()

    async def serve_manifest(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(manifest.to_wire())

    await rpc.serve("manifest", serve_manifest)
    validator = RunRecordValidator(manifest.run_id, time.time)
    node = await DHTNode.create(p2p=daemon.p2p, record_validator=validator, cache_refresh_before_expiry=0)
    swarm = SyntheticSwarm(node, manifest, identities)
    swarm.begin()
    (maddr,) = [maddr for maddr in await daemon.maddrs() if "/127.0.0.1/" in maddr]
    pipe.send((maddr, swarm.record_bytes))
    while (turn := await asyncio.to_thread(pipe.recv)) is not None:
        swarm.renew(turn)  # between two refreshes: the monitor does not wait for this node
        pipe.send(True)
    await node.shutdown()
    await daemon.stop()


def swarm_process(pipe: Connection, keys: Path, count: int) -> None:
    """Entry point of the process beside the monitor."""
    identities = load_identities(keys, count)
    asyncio.run(serve_swarm(pipe, manifest_of(identities[0]), identities))


def manifest_of(founder: Identity) -> Manifest:
    """The manifest of a run without any training."""
    run = load_config(default_config_path()).run
    assert run is not None
    return found_run(run, "00" * 32, founder)


def seconds_of(action: Any) -> float:
    """Wall time of a call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


async def measure(directory: Path, keys: Path, count: int, looks: int) -> Row:
    """Watches one swarm for a number of refreshes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=swarm_process, args=(there, keys, count), daemon=True)
    process.start()
    maddr, record_bytes = await asyncio.to_thread(here.recv)
    monitor_key = Identity.load_or_create(directory / "monitor.key")
    options = NetworkOptions(
        initial_peers=(maddr,),
        identity_path=monitor_key.path,
        host_maddrs=(),
        announce_maddrs=(),
        is_entry=False,
        run_id=None,
        timeout_s=60.0,
    )
    watcher = await open_watcher(options, None)
    history = History(directory / f"{count}.sqlite")
    collector = Collector(watcher, history, 2.0)
    before = psutil.Process().memory_info().rss
    times, cpu, peers = [], [], []
    for turn in range(looks):
        cpu_before, started = time.process_time(), time.perf_counter()
        await collector.refresh()
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_before)
        peers.append(len(collector.source.state().peers))
        here.send(turn)
        await asyncio.to_thread(here.recv)
    state, points = collector.source.state(), collector.source.history()
    drawing = Console(file=io.StringIO(), width=80)
    row = {
        "peers": count,
        "peers_seen": min(peers),
        "record_bytes": record_bytes,
        "first_look_s": times[0],
        "look_median_s": median(times[1:]),
        "look_longest_s": max(times[1:]),
        "look_cpu_median_s": median(cpu[1:]),
        "signatures_per_look": (watcher.verifier.num_verified - 2 * count) / (looks - 1),
        "json_s": seconds_of(lambda: to_text(state)),
        "json_bytes": len(to_text(state)),
        "prometheus_s": seconds_of(lambda: metrics_text(state)),
        "screen_s": seconds_of(lambda: drawing.print(screen(state, points, width=80, max_peers=20))),
        "memory_mb": psutil.Process().memory_info().rss / 1e6,
        "memory_growth_mb": (psutil.Process().memory_info().rss - before) / 1e6,
    }
    here.send(None)
    await watcher.stop()
    history.close()
    process.join(10)
    return {**row, "history_bytes": history.path.stat().st_size}


def main() -> int:
    """Command line entry point; exit code 1 if a refresh took too long or missed peers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--looks", type=int, default=10, help="refreshes for each swarm")
    parser.add_argument("--keys", type=Path, help="directory that keeps the peers' keys")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="spes-bench-") as name:
        keys = options.keys or Path(name) / "keys"
        keys.mkdir(parents=True, exist_ok=True)
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.map(make_keys, [(keys, number) for number in range(max(options.peers))], chunksize=8)
        rows = [asyncio.run(measure(Path(name), keys, count, options.looks)) for count in sorted(options.peers)]
    table = Table(title="The monitor and a large swarm")
    table.add_column("")
    for row in rows:
        table.add_column(f"{row['peers']} peers", justify="right")
    for key in rows[0]:
        table.add_row(key, *(f"{row[key]:,.4g}" if isinstance(row[key], float) else f"{row[key]:,}" for row in rows))
    Console(width=100).print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    slow = [row for row in rows if row["look_longest_s"] > _LIMIT_S or row["peers_seen"] < row["peers"]]
    if slow:
        print(f"bench_monitor: a refresh took longer than {_LIMIT_S} s, or missed peers", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
