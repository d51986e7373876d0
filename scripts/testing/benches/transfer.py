"""How much downloads by newcomers slow down the rounds of their donors, on lines of limited speed; needs root.

Three real peers train in network namespaces, each behind a line of --mbps in both directions. In every other phase
newcomers on a fourth host, which has no limit, download the peers' reference repeatedly. Compared are times from commit
to commit and of the exchanges in phases with and without downloads, for three kinds of donors:

declared   as shipped (except that newcomers have no budget), with `upload_mbps` in the configuration
silent     the same without `upload_mbps`: transfers are limited during rounds only
no limit   transfers use all available bandwidth

`mbps` is what all newcomers receive together. All processes share the processors, but exchanges do not run while peers
train.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from scripts.testing.benches import slow_lines
from scripts.testing.benches.slow_lines import OUTSIDE, compare, slow_peers
from scripts.testing.benchmark import Row
from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_network import LocalNetwork
from scripts.testing.local_peer import PATIENCE_S, LocalPeer, LocalPeerError
from spes_swarm.base import rate_limit
from spes_swarm.base.errors import ProtocolError, TransferError
from spes_swarm.config.manifest import open_manifest
from spes_swarm.join import main as join
from spes_swarm.metrics.events import SyncProgress
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Guests
from spes_swarm.network.transfer import transfer
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity

KINDS = ("declared", "silent", "no limit")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    slow_lines.add_options(parser)
    parser.add_argument("--newcomers", type=int, default=4, help="newcomers that download at the same time")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each kind of donors."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="bench-transfer-") as name:
            main = partial(_join_as_donor, kind)
            with slow_peers(options.mbps, Path(name), main, kind == "declared") as (network, donors):
                downloads = partial(_downloads, network, donors, Path(name), options.newcomers)
                yield {"donors": kind, **compare(donors, options.rounds, downloads)}


def _join_as_donor(kind: str, arguments: list[str]) -> int:
    """Runs a donor of this kind, from which strangers may download as often as they like."""
    transfer._PER_STRANGER = transfer._PER_HOST = 1 << 30
    if kind == "no limit":
        rate_limit.DURING_ROUNDS_SHARE = 1e6
    return join(arguments)


@contextmanager
def _downloads(
    network: LocalNetwork, donors: Sequence[LocalPeer], directory: Path, count: int, phase: int
) -> Iterator[Callable[[], int]]:
    """Runs newcomers that download."""
    maddrs = [donor.address(host=network.address(host)) for host, donor in enumerate(donors)]
    launch = ForkServer(network.namespace(OUTSIDE), main=_download_repeatedly)
    places = [directory / f"newcomer{phase}-{number}" for number in range(count)]
    with ExitStack() as stack:
        processes = []
        for place in places:
            place.mkdir()
            processes.append(launch([str(place), network.address(OUTSIDE), *maddrs], place / "log"))
            stack.callback(processes[-1].wait, PATIENCE_S)
            stack.callback(processes[-1].kill)

        def received() -> list[int]:
            logs = [(place / "log").read_text(encoding="utf-8") if (place / "log").exists() else "" for place in places]
            if any(process.poll() is not None for process in processes):
                raise LocalPeerError("a newcomer has ended\n" + "\n".join(logs))
            reports = [[json.loads(line) for line in log.splitlines() if line.startswith('{"bytes"')] for log in logs]
            return [each[-1]["bytes"] if each else 0 for each in reports]

        deadline = time.monotonic() + PATIENCE_S
        while not all(received()):
            if time.monotonic() > deadline:
                raise LocalPeerError("the newcomers did not start to download")
            time.sleep(0.1)
        yield lambda: sum(received())


def _download_repeatedly(arguments: list[str]) -> int:
    directory, own, *maddrs = arguments
    asyncio.run(_download(Path(directory), own, maddrs))
    return 0


async def _download(directory: Path, own: str, maddrs: Sequence[str]) -> None:
    """Runs a newcomer that never joins; prints the bytes that it has received about once a second."""

    def complain(peer_id: str, error: ProtocolError) -> None:
        print(f"fault: {peer_id}: {error}", flush=True)

    identity = Identity.load_or_create(directory / "identity.key")
    daemon = await Daemon.start(identity.path, [f"/ip4/{own}/tcp/0"])
    rpc = Rpc(daemon.transport, complain)
    await rpc.start()
    donors = [await daemon.connect(maddr, 30.0) for maddr in maddrs]
    manifest = open_manifest(await rpc.call(donors[0], "manifest", {}, 30.0), source=donors[0])
    model = manifest.run.model
    layout = layout_of(build_model(model.type, model.settings, 0, "cpu", on_meta=True))
    nobody = Guests(admits=lambda peer_id: False, is_member=lambda peer_id: False)
    stall_s, reference = manifest.run.round.stall_timeout_s, Reference(layout, np.zeros(layout.num_elements, "f4"))
    downloader = transfer.Transfer(daemon.transport, rpc, manifest.run_id, reference, stall_s, complain, nobody)
    num_bytes = 0
    while True:
        downloader.reference = Reference(layout, np.zeros(layout.num_elements, "f4"))

        def tell(progress: SyncProgress, before: int = num_bytes) -> None:
            print(json.dumps({"bytes": before + progress.payload_bytes}), flush=True)

        try:
            report = await downloader.download(lambda: donors, None, tell)
        except TransferError as exc:
            print(f"fault: {exc}", flush=True)
            continue
        num_bytes += report.payload_bytes
