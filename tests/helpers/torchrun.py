"""Peers of several ranks: torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from scripts.testing.forked_peer import ForkServer, Main
from scripts.testing.local_peer import LocalPeer, PeerProcess
from tests.helpers import slow_join
from tests.helpers.repository import ROOT

NUM_RANKS = 2
_SLOW: Main = partial(slow_join.sleeping_main, slow_join.PAUSE_S)
_SHUTDOWN_S = 600  # for a last round on a busy machine; by default 30 s


def launch_ranks(arguments: Sequence[str], log: Path, module: str = slow_join.__name__) -> PeerProcess:
    """Like local_peer.launch_join, with two ranks, by default with a pause before each step."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    torchrun += ["--shutdown-timeout", str(_SHUTDOWN_S)]
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *torchrun, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def launch_forked_ranks(main: Main = _SLOW) -> ForkServer:
    """As `launch_ranks`, without the time for imports: torchrun's agent and the ranks are forked."""
    return ForkServer(main=partial(_agent_main, main))


def _agent_main(main: Main, arguments: list[str]) -> int:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=NUM_RANKS,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
        shutdown_timeout=_SHUTDOWN_S,
    )
    elastic_launch(config, _rank_main)(main, arguments)
    return 0


def _rank_main(main: Main, arguments: list[str]) -> None:
    if code := main(arguments):
        sys.exit(code)  # torchrun waits for others of a process that returns


def rank_process(peer: LocalPeer, rank: int) -> psutil.Process:
    """The process of one of two ranks: rank 0 alone has a network process."""
    (found,) = (p for p in psutil.Process(peer.process.pid).children() if bool(p.children()) == (rank == 0))
    return found
