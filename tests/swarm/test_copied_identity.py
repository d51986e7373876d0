"""A peer's identity file in a second directory: two processes would be one peer to all others."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from tests.helpers.copied_join import launch_copied
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import Swarm, swarm

pytestmark = pytest.mark.swarm


def copy_all(old: Path, new: Path) -> None:
    with contextlib.suppress(shutil.Error):  # a running peer removes files that were listed for copying
        shutil.copytree(old, new)


def copy_identity(old: Path, new: Path) -> None:
    new.mkdir()
    shutil.copy(old / "identity.key", new)


def link_identity(old: Path, new: Path) -> None:
    new.mkdir()
    os.link(old / "identity.key", new / "identity.key")


def link_directory(old: Path, new: Path) -> None:
    new.symlink_to(old)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """A founder, which none of the tests may harm."""
    with swarm(tmp_path_factory.mktemp("swarm")) as running:
        running.launch = launch_slow(0.5)  # it trains for as long as the tests take
        founder = running.found()
        founder.wait_for_round(1)
        yield running
        founder.wait_for_round(max(founder.rounds()) + 1)


@pytest.mark.parametrize("copy", [copy_all, copy_identity, link_identity, link_directory])
def test_a_second_process_is_refused(running: Swarm, tmp_path: Path, copy: Callable[[Path, Path], None]) -> None:
    copy(running.peers[0].output_dir, tmp_path / "copy")
    with LocalPeer(tmp_path / "copy", ["--config", str(running.config)], running.launch) as second:
        assert second.wait() == 2
        assert "in use by another process" in second.text()  # of a linked directory, both write into one log
        assert "Traceback" not in second.text()


def test_a_killed_peer_starts_again_in_a_copy_and_two_processes_with_one_identity_say_so(tmp_path: Path) -> None:
    with swarm(tmp_path) as running:
        other = running.found("--wait-for-peers", 2)
        moved = running.join("--wait-for-peers", 2)
        moved.wait_for_round(2)
        moved.kill()
        copy_all(moved.output_dir, tmp_path / "first")
        first = running.start("first", "--initial-peers", other.address())
        together = first.wait_for("round", lambda event: event["peers"] == 2)["round"]
        first.wait_for_round(together + 4)
        assert not [event for event in first.events("fault") if event["kind"] == "identity"]  # it accuses nobody
        copy_identity(first.output_dir, tmp_path / "second")
        running.launch = launch_copied()
        second = running.join(name="second")
        for peer in (first, second):
            fault = peer.wait_for("fault", lambda event: event["kind"] == "identity")
            assert "two processes use the identity of this peer" in fault["detail"]
            assert "/ip4/127.0.0.1/tcp/" in fault["detail"]
        for peer in (first, second):  # only now: one that has left is no twin any more
            peer.process.send_signal(signal.SIGTERM)
        for peer in (first, second):
            peer.wait(PATIENCE_S)
            assert "two processes use the identity of this peer" in peer.text()
