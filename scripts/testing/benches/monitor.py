"""The monitor's time per refresh and its memory for a large swarm.

The peers are synthetic: each has its own key and signs a progress and a lease record. A process next to the monitor is
the DHT node that stores all records, and renews a third of the progress records between two refreshes (peers renew
them every 6 seconds). The measured path is the real one: p2pd, hivemind's DHT, signatures, ledger, JSON, history.

Fails if a refresh takes more than two seconds or misses peers. Creating a thousand RSA keys takes minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from hivemind.dht import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID

from scripts.testing.benchmark import Row
from spes_swarm.base.errors import ProtocolError, SwarmError
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.monitor.collector import Collector
from spes_swarm.monitor.history import History
from spes_swarm.monitor.watcher import NetworkOptions, open_watcher
from spes_swarm.network.link.clock import Timekeeper
from spes_swarm.network.link.dht_records import RunRecordValidator, record_key
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.members.round_metrics import PeerMetrics, telemetry_of
from spes_swarm.protocol.members.signed import seal

_LIMIT_S = 2.0
_NUM_LOOKS = 10
_SHARE_RENEWED = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--peers", type=int, nargs="+", default=[10, 100, 1000])


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each swarm.

    Raises:
        SwarmError: a refresh took too long or missed peers.
    """
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="bench-monitor-") as name:
        keys = Path(name) / "keys"
        keys.mkdir()
        with multiprocessing.get_context("spawn").Pool() as pool:
            pool.map(_make_key, [(keys, number) for number in range(max(options.peers))], chunksize=8)
        for count in sorted(options.peers):
            row = asyncio.run(_watch(Path(name), keys, count))
            yield row
            if row["longest_s"] > _LIMIT_S or row["seen"] < row["peers"]:
                raise SwarmError(f"a refresh took longer than {_LIMIT_S} s, or missed peers")


def _ignore(peer_id: str, error: ProtocolError) -> None:
    """Ignores faults."""
    del peer_id, error


def _load_identities(directory: Path, count: int) -> list[Identity]:
    """Loads keys from a directory, and creates those that are missing."""
    return [Identity.load_or_create(directory / f"{number}.key") for number in range(count)]


def _make_key(arguments: tuple[Path, int]) -> None:
    """Creates one key, in a process of a pool."""
    directory, number = arguments
    Identity.load_or_create(directory / f"{number}.key")


def _progress_of(number: int, round_number: int, expires: float) -> Progress:
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


class _Records:
    """The records of many peers in the storage of one real DHT node."""

    def __init__(self, node: DHTNode, manifest: Manifest, identities: list[Identity]) -> None:
        self._node = node
        self._manifest = manifest
        self._identities = identities

    def _put(self, kind: str, owner: Identity, record: Progress | Lease) -> None:
        sealed = seal(owner, kind, self._manifest.run_id, record)
        key = DHTID.generate(source=record_key(self._manifest.run_id, kind))
        value = DHTProtocol.serializer.dumps(sealed)
        self._node.protocol.storage.store(key, value, record.expires, subkey=owner.peer_id)

    def begin(self) -> None:
        """Stores the first records of all peers. They live long, so that none expires while others are being signed."""
        for number, owner in enumerate(self._identities):
            self._put("progress", owner, _progress_of(number, 1, time.time() + 600))
            self._put("leases", owner, Lease(expires=time.time() + 600, experts=[number % 64], since_round=1))

    def renew(self, turn: int) -> None:
        """Renews the records of a third of the peers, one round further."""
        for number in range(turn % _SHARE_RENEWED, len(self._identities), _SHARE_RENEWED):
            expires = time.time() + 600 + turn
            self._put("progress", self._identities[number], _progress_of(number, 1 + turn // _SHARE_RENEWED, expires))


async def _serve_swarm(pipe: Connection, manifest: Manifest, identities: list[Identity]) -> None:
    """Serves the swarm, in the process next to the monitor, until None arrives on the pipe."""
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    daemon = await Daemon.start(identities[0].path, ["/ip4/127.0.0.1/tcp/0"])
    rpc = Rpc(daemon.transport, _ignore)
    await rpc.start()
    await Timekeeper(rpc, manifest.run_id, daemon.peer_id, _ignore).serve()

    async def serve_manifest(peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(manifest.to_wire())

    await rpc.serve("manifest", serve_manifest)
    validator = RunRecordValidator(manifest.run_id, time.time)
    node = await DHTNode.create(p2p=daemon.p2p, record_validator=validator, cache_refresh_before_expiry=0)
    swarm = _Records(node, manifest, identities)
    swarm.begin()
    (maddr,) = [maddr for maddr in await daemon.maddrs() if "/127.0.0.1/" in maddr]
    pipe.send(maddr)
    while (turn := await asyncio.to_thread(pipe.recv)) is not None:
        swarm.renew(turn)  # between two refreshes: the monitor does not wait for this node
        pipe.send(True)
    await node.shutdown()
    await daemon.stop()


def _swarm_process(pipe: Connection, keys: Path, count: int) -> None:
    """Entry point of the process next to the monitor."""
    identities = _load_identities(keys, count)
    asyncio.run(_serve_swarm(pipe, _manifest_of(identities[0]), identities))


def _manifest_of(founder: Identity) -> Manifest:
    """The manifest of a run without any training."""
    run = load_config(default_config_path()).run
    assert run is not None
    return found_run(run, "00" * 32, founder)


async def _watch(directory: Path, keys: Path, count: int) -> Row:
    """Watches one swarm for a number of refreshes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_swarm_process, args=(there, keys, count), daemon=True)
    process.start()
    maddr = await asyncio.to_thread(here.recv)
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
    for turn in range(_NUM_LOOKS):
        cpu_before, started = time.process_time(), time.perf_counter()
        await collector.refresh()
        times.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_before)
        peers.append(len(collector.source.state().peers))
        here.send(turn)
        await asyncio.to_thread(here.recv)
    memory = psutil.Process().memory_info().rss
    row = {
        "peers": count,
        "seen": min(peers),
        "first_s": times[0],
        "median_s": median(times[1:]),
        "longest_s": max(times[1:]),
        "cpu_s": median(cpu[1:]),
        "signatures": (watcher.verifier.num_verified - 2 * count) / (_NUM_LOOKS - 1),
        "memory_mb": memory / 1e6,
        "growth_mb": (memory - before) / 1e6,
    }
    here.send(None)
    await watcher.stop()
    history.close()
    process.join(10)
    return row
