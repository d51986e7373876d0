"""Children die with their parent, however the parent dies.

Linux delivers the parent-death signal when the *thread* that created the child ends, so children are started from a
process's main thread. The setting survives `exec` but not `fork`, so every child sets it itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to send SIGKILL to this process when its parent ends.

    Called in the child. `parent_pid` is what `os.getpid()` returned in the parent. If the parent died before this call,
    no signal would ever come, so the process exits at once.

    Raises:
        OSError: the kernel refused.
        RuntimeError: not on Linux.
    """
    if _LIBC is None:
        raise RuntimeError("spes_swarm runs on Linux only: child processes could not be tied to their parent")
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)
