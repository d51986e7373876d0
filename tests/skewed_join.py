"""A peer on a machine whose clock is wrong: `python -m tests.skewed_join SECONDS [ARGUMENTS OF JOIN]`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spes_swarm import clock
from spes_swarm.join import main
from spes_swarm.local_peer import PeerProcess


def launch_skewed(seconds: float) -> Callable[[Sequence[str], Path], PeerProcess]:
    """Like spes_swarm.local_peer.launch_join, with a clock that is ahead by so many seconds (negative: behind)."""

    def launch(arguments: Sequence[str], log: Path) -> PeerProcess:
        with log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.skewed_join", str(seconds), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parent.parent,
            )

    return launch


if __name__ == "__main__":
    ahead_s = float(sys.argv[1])
    # Before the network process is forked, which reads its wall clock here and nowhere else.
    clock.wall_clock = lambda: time.time() + ahead_s
    sys.exit(main(sys.argv[2:]))
