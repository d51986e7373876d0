"""A process in the place of a peer that does nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.testing.local_peer import PeerProcess


def launch_nothing(arguments: Sequence[str], log: Path) -> PeerProcess:
    """A process that ends at once."""
    del arguments, log
    return subprocess.Popen([sys.executable, "-c", ""])
