"""How much publishing slows down the rounds of the publishing peer and of its swarm, on slow lines; needs root.

Three real peers train in network namespaces, each behind a line of --mbps in both directions. In every other phase the
first of them publishes its newest round repeatedly, with the command that `--publish-to` runs meanwhile, to a
server with the Hub's protocol on a fourth host. Compared are times from commit to commit and of the exchanges in phases
with and without uploads, for two kinds of uploads:

shipped    the upload may use a tenth of the line, as if declared with `--upload-mbps`
no limit   the upload uses all available bandwidth

`mbps` is what the server receives. All processes share the processors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from scripts.testing.benches import slow_lines
from scripts.testing.benches.slow_lines import OUTSIDE, compare, slow_peers
from scripts.testing.benchmark import Row
from scripts.testing.local_network import LocalNetwork, enter_namespace
from scripts.testing.local_peer import PATIENCE_S, LocalPeer, LocalPeerError
from spes_swarm.base.rate_limit import DURING_ROUNDS_SHARE

KINDS = ("shipped", "no limit")
_ASK_S = 0.5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    slow_lines.add_options(parser)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each kind of uploads."""
    for kind in KINDS:
        limits = ["--upload-mbps", str(DURING_ROUNDS_SHARE * options.mbps)] if kind == "shipped" else []
        with (
            tempfile.TemporaryDirectory(prefix="bench-publish-") as name,
            slow_peers(options.mbps, Path(name)) as (network, peers),
            _hub(network, Path(name)) as endpoint,
        ):
            yield {
                "upload": kind,
                **compare(peers, options.rounds, partial(_uploads, network, peers[0], endpoint, limits)),
            }


def _on_host(network: LocalNetwork, host: int, *command: str) -> list[str]:
    """The command line that runs a Python module on a host."""
    return ["ip", "netns", "exec", network.namespace(host), sys.executable, "-m", *command]


@contextmanager
def _hub(network: LocalNetwork, directory: Path) -> Iterator[str]:
    """Runs the server; yields its URL."""
    data = directory / "hub"
    data.mkdir()
    command = _on_host(network, OUTSIDE, "tests.helpers.hub_routes", str(data), str(1 << 20), network.address(OUTSIDE))
    with (
        (directory / "hub.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


@contextmanager
def _uploads(
    network: LocalNetwork, peer: LocalPeer, endpoint: str, limits: list[str], phase: int
) -> Iterator[Callable[[], int]]:
    """Publishes repeatedly in the background; entered once the first bytes have arrived."""
    stop, current = threading.Event(), list[subprocess.Popen[bytes]]()
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_TOKEN": "hf_test_owner", "OMP_NUM_THREADS": "1"}
    log = peer.output_dir / f"publish{phase}.log"
    arguments = [str(peer.output_dir), "--to", f"user/phase-{phase}", "--json", "--background", *limits]

    def publish() -> None:
        while not stop.is_set():
            command = _on_host(network, 0, "spes_swarm.publish", *arguments)
            with log.open("ab") as output:
                current[:] = [subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)]
            current[0].wait()

    def ask() -> int:
        enter_namespace(network.namespace(OUTSIDE))  # moves this thread only
        with urllib.request.urlopen(f"{endpoint}/_control/counters", b"{}", timeout=30) as reply:
            return int(json.load(reply).get("lfs_bytes", 0))

    thread = threading.Thread(target=publish)
    with ThreadPoolExecutor(1) as on_the_server:
        moved = on_the_server.submit(ask).result()
        thread.start()
        try:
            # At the lowest priority, beside three peers on few cores, loading torch alone may take longer than a phase.
            deadline = time.monotonic() + PATIENCE_S
            while on_the_server.submit(ask).result() == moved:
                if time.monotonic() > deadline:
                    raise LocalPeerError(f"nothing was uploaded\n{log.read_text(encoding='utf-8')[-2000:]}")
                time.sleep(_ASK_S)
            yield lambda: on_the_server.submit(ask).result()
        finally:
            stop.set()
            for process in current:
                process.kill()
            thread.join()
