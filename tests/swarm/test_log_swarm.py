"""What the log of a real peer tells when a part of it fails or hangs, and what it never tells."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S, LocalPeer
from tests.helpers.broken_join import launch_broken, launch_broken_rank, launch_freezing
from tests.helpers.swarm import PATIENT, REASONABLE_S, swarm

pytestmark = pytest.mark.swarm
ERROR = "PlantedError('planted')"
TOKEN = "hf_thisTokenMustNotBeSeen123456"


def log_of(peer: LocalPeer) -> str:
    return (peer.output_dir / "log.txt").read_text(encoding="utf-8")


def wait_until(condition: Callable[[], bool], peer: LocalPeer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, peer.tail()
        assert peer.process.poll() is None, peer.tail()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("part", "process", "where"),
    [
        ("network", "network", "_execute"),
        ("checkpoint", "trainer", "saving.py"),
        ("publisher", "publisher", "publish.py"),
        ("rank", "rank 1", "run_step"),
    ],
)
def test_an_unexpected_error_is_in_the_log_with_its_traceback_and_the_console_names_it(
    tmp_path: Path, part: str, process: str, where: str
) -> None:
    with swarm(tmp_path) as running:
        running.launch = launch_broken_rank() if part == "rank" else launch_broken(part)
        publishing = ("--publish-to", f"file:{tmp_path / 'published'}", "--publish-every", 1)
        peer = running.found(*(publishing if part == "publisher" else ()))
        if part == "publisher":  # training goes on without it
            peer.wait_for("fault", lambda event: event["kind"] == "publish")
            wait_until(lambda: "publishing is tried again" in peer.text(), peer)  # the end of what it says next
        else:
            assert peer.wait() == 1, peer.tail()
        log, console = log_of(peer), peer.text()
    (line,) = (line for line in log.splitlines() if f" {process} run=" in line and " ERROR " in line)
    assert f"peer={peer.events('listening')[0]['peer_id'][-8:]}" in line
    traceback = log.partition(line)[2]
    assert "Traceback (most recent call last):" in traceback
    assert where in traceback
    assert "PlantedError: planted" in traceback
    told = [line for line in console.splitlines() if ERROR in line or "PlantedError: planted" in line]
    assert f"; traceback in {peer.output_dir / 'log.txt'}" in told[0]
    assert len(told) == 1, console
    assert "Traceback" not in console or part == "rank"  # torchrun prints one of its own


def ask(peer: LocalPeer) -> str:
    """Has a peer write what it is doing; returns its log."""
    answer = "asked by a signal: state of the network process"
    before = log_of(peer).count(answer)
    os.kill(peer.process.pid, signal.SIGUSR1)
    wait_until(lambda: log_of(peer).count(answer) > before, peer)
    return log_of(peer)


def test_a_signal_during_a_stuck_exchange_names_the_member_and_the_parts(tmp_path: Path) -> None:
    stuck = {"window_s": PATIENT["window_s"], "stall_timeout_s": 500.0, "timeout_s": 1000.0}
    with swarm(tmp_path, round=stuck) as running:
        running.launch = ForkServer(environment={"HF_TOKEN": TOKEN})
        peer = running.found("--wait-for-peers", 2, "--log-level", "debug")
        running.launch = launch_freezing(2)
        frozen = running.join("--wait-for-peers", 2)
        who = frozen.wait_for("join")["peer_id"]

        def stopped() -> bool:
            processes = psutil.Process(frozen.process.pid).children()
            return any(process.status() == psutil.STATUS_STOPPED for process in processes)

        wait_until(stopped, frozen)
        assert max(peer.rounds()) == 1
        log = ask(peer)
        packed = tmp_path / "logs.tar.gz"
        command = [sys.executable, "-m", "spes_swarm.logs", str(peer.output_dir), "--to", str(packed)]
        subprocess.run(command, check=True, timeout=REASONABLE_S, env={**os.environ, "HF_TOKEN": TOKEN})
    exchange = log.rpartition("exchange of round 2 with 2 members, under way: ")[2]
    assert re.search(rf"awaited from {who}: contributions to parts \d.*; results of parts \d", exchange)
    assert "_train_step" in log or "await_end" in log  # the trainer's stack
    assert "Exchange.run" in log  # the network process's tasks
    assert f"stream {peer.events('join')[0]['run_id']}/p" in log
    assert f"peer {who} " in log
    with tarfile.open(packed) as archive:
        files = {entry.name: archive.extractfile(entry) for entry in archive}
        texts = [log.encode(), *(file.read() for file in files.values() if file is not None)]
    assert files.keys() == {"log.txt", "metrics.jsonl", "manifest.json", "versions.json"}
    key = (peer.output_dir / "identity.key").read_bytes()
    for secret in (TOKEN.encode(), key[-200:-100], key[-200:-100].hex().encode(), base64.b64encode(key[-201:-102])):
        assert not any(secret in text for text in texts)
