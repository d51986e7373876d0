"""Writes checkpoints in processes that die by SIGKILL in the middle of it.

    python -m tests.helpers.killed_writer DIRECTORY

Each line of the input is `ROUND CALL`: a forked process writes the checkpoints of that round and of the next, and kills
itself before its CALL-th call of a function in C (write, hash, sync, link, rename, remove ...); 0: never. The output
has a line `saved ROUND` for each that it has completed, `calls N` if it was not killed, and at last `ended STATUS`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from spes_swarm.storage.checkpoint_writing import save_checkpoint
from tests.helpers.checkpoints import LAYOUT, state


def write(directory: Path, round_number: int, kill_at: int) -> int:
    """Writes two checkpoints; returns how many calls they took."""
    calls = 0
    states = {number: state(number, LAYOUT) for number in (round_number, round_number + 1)}

    def count(frame: object, event: str, called: object) -> None:
        nonlocal calls
        if event == "c_call":
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    for number, made in states.items():
        sys.setprofile(count)
        save_checkpoint(directory, made, keep=2)
        sys.setprofile(None)
        os.write(1, b"saved %d\n" % number)
    return calls


def main() -> None:
    """Handles one line of the input after the other."""
    for line in sys.stdin:
        round_number, kill_at = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            calls = write(Path(sys.argv[1]), round_number, kill_at)
            os.write(1, b"calls %d\n" % calls)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        os.write(1, b"ended %d\n" % status)


if __name__ == "__main__":
    main()
