"""Peers of several ranks: torchrun on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from scripts.testing.local_peer import LocalPeer, PeerProcess
from tests.helpers import slow_join
from tests.helpers.repository import ROOT

NUM_RANKS = 2


def launch_ranks(arguments: Sequence[str], log: Path, module: str = slow_join.__name__) -> PeerProcess:
    """Like local_peer.launch_join, with two ranks, by default with a pause before each step."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS)]
    torchrun += ["--shutdown-timeout", "600"]  # for a last round on a busy machine; by default 30 s
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *torchrun, "-m", module, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def rank_process(peer: LocalPeer, rank: int) -> psutil.Process:
    """The process of one rank."""
    (found,) = (
        process for process in psutil.Process(peer.process.pid).children() if process.environ().get("RANK") == str(rank)
    )
    return found
