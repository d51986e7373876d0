"""SIGHUP stops a peer as SIGTERM does: one whose terminal is closed leaves gracefully and writes a checkpoint."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from spes_swarm.join import main
from tests.helpers.swarm import swarm

pytestmark = pytest.mark.swarm


def main_in_terminal(name: str, arguments: list[str]) -> int:
    """Runs `join` with this terminal, which is its only input and output."""
    sys.stdout.close()
    sys.stderr.close()
    os.login_tty(os.open(name, os.O_RDWR))
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    return main(arguments)


@contextmanager
def terminal() -> Iterator[tuple[int, str]]:
    """Yields a descriptor that reads what is shown, and the terminal's name; the caller closes the first."""
    shown, device = pty.openpty()
    try:
        yield shown, os.ttyname(device)
    finally:
        os.close(device)


def wait_for_a_round_on(shown: int, peer: LocalPeer) -> None:
    said = b""
    while not peer.rounds():
        readable, _, _ = select.select([shown], [], [], 1.0)
        if readable:
            said += os.read(shown, 1 << 16)  # otherwise the panel would wait at some time
        assert peer.process.poll() is None, said.decode(errors="replace")


@pytest.mark.parametrize("hit", ["terminal", "all processes"])
def test_a_peer_whose_terminal_is_closed_leaves_with_a_checkpoint(tmp_path: Path, hit: str) -> None:
    with swarm(tmp_path) as running, terminal() as (shown, name):
        running.launch = ForkServer(main=partial(main_in_terminal, name))
        peer = running.found("--checkpoint-minutes", 60)
        wait_for_a_round_on(shown, peer)
        tree = peer.tree()
        if hit == "all processes":  # as a service manager does
            peer.signal_tree(signal.SIGHUP)
        os.close(shown)
        assert peer.wait() == 0
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE_S)
    assert not alive
    assert peer.events("leave")
    assert not peer.events("fault")
    newest = max((peer.output_dir / "checkpoints").glob("round-*/meta.json"))
    assert json.loads(newest.read_text(encoding="utf-8"))["step"] == peer.events("step")[-1]["step"]
