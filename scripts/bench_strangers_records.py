"""Memory of a node of the DHT, in a process of its own, while records of new identities are stored in it.

    .venv/bin/python scripts/bench_strangers_records.py [--unlimited]

Keys are products of two primes of a pool, which makes a thousand of them in seconds. The node reads all records once a
second, as a peer does. `--unlimited`: every writer counts as known, so nothing limits how many there are.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht import DHTNode

from spes_swarm.config.manifest import found_run
from spes_swarm.network.link.daemon import Daemon, bootstrap
from spes_swarm.network.link.dht_records import Records, RunRecordValidator, everybody, record_key
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.run_dht import RunDht
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.records import Lease, Progress
from spes_swarm.protocol.members.signed import seal
from tests.helpers.lone_trainer import run_config
from tests.helpers.records import lease, progress

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
LIFETIME_S = 600.0
AFTER_S = 70.0  # how long memory is watched after the last record


def identities(count: int) -> Iterator[Identity]:
    """Yields identities with distinct keys."""
    keys = [rsa.generate_private_key(65537, 2048).private_numbers() for _ in range(24)]
    primes = [prime for key in keys for prime in (key.p, key.q)]
    for p, q in itertools.islice(itertools.combinations(primes, 2), count):
        d = pow(65537, -1, (p - 1) * (q - 1))
        exponents = rsa.rsa_crt_dmp1(d, p), rsa.rsa_crt_dmq1(d, q), rsa.rsa_crt_iqmp(p, q)
        public = rsa.RSAPublicNumbers(65537, p * q)
        yield Identity(rsa.RSAPrivateNumbers(p, q, d, *exponents, public).private_key(), Path())


async def keep_records(directory: Path, limited: bool, pipe: Connection) -> None:
    """Runs the node until it is killed."""
    own = Identity.load_or_create(directory / "node.key")
    daemon = await Daemon.start(own.path, LOOPBACK)
    rpc = Rpc(daemon.p2p, lambda peer_id, error: None)
    manifest = found_run(run_config(), "0" * 64, own)
    dht = RunDht(daemon, rpc, manifest, lambda peer_id, error: None)
    is_known = dht.has_met if limited else everybody
    validator = RunRecordValidator(manifest.run_id, time.time, is_known)
    await dht.join([], validator, lambda connected: connected, client_mode=False)
    pipe.send((await daemon.maddrs(), manifest.run_id))
    records = Records(dht.node, own, manifest.run_id, time.time, is_known)
    while True:
        await asyncio.gather(records.read("progress", Progress), records.read("leases", Lease))
        await asyncio.sleep(1.0)


async def attack(directory: Path, count: int, maddrs: Sequence[str], run_id: str, node: psutil.Process) -> None:
    """Stores two records for each of `count` identities; prints the memory of the node."""
    strangers = list(identities(count))
    own = Identity.load_or_create(directory / "attacker.key")
    daemon = await Daemon.start(own.path, LOOPBACK)
    local = [maddr for maddr in maddrs if "127.0.0.1" in maddr]
    await bootstrap(daemon, local, 30.0)
    attacker = await DHTNode.create(p2p=daemon.p2p, initial_peers=local, client_mode=True)
    begun = time.monotonic()

    def show(what: str) -> None:
        megabytes = node.memory_full_info().uss / 1e6
        print(f"{time.monotonic() - begun:6.1f} s  {megabytes:6.1f} MB  {what}", flush=True)

    show("before")
    stored = 0
    for who in strangers:
        expires = time.time() + LIFETIME_S
        of_kinds: dict[str, Any] = {"progress": progress(expires), "leases": lease(expires)}
        for kind, record in of_kinds.items():
            sealed = seal(who, kind, run_id, record)
            key = record_key(run_id, kind)
            stored += bool(await attacker.store(key, sealed, expires, subkey=who.peer_id, exclude_self=True))
    show(f"{stored} records of {count} identities stored")
    for _ in range(7):
        await asyncio.sleep(AFTER_S / 7)
        show("after the last")
    await attacker.shutdown()
    await daemon.stop()


def run_node(directory: Path, limited: bool, pipe: Connection) -> None:
    """Entry point of the node's process."""
    asyncio.run(keep_records(directory, limited, pipe))


def main(arguments: Sequence[str]) -> int:
    """Measures once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--identities", type=int, default=1000)
    parser.add_argument("--unlimited", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        node = spawn.Process(target=run_node, args=(Path(directory), not options.unlimited, there))
        node.start()
        try:
            maddrs, run_id = here.recv()
            asyncio.run(attack(Path(directory), options.identities, maddrs, run_id, psutil.Process(node.pid)))
        finally:
            node.kill()
            node.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
