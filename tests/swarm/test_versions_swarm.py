"""Peers of several versions: those of one major version train together, those of two refuse each other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.testing.local_peer import PATIENCE_S
from tests.helpers.other_version import command, launch_version
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import PATIENT, Launch, equal_digests, swarm

pytestmark = pytest.mark.swarm

MONITOR = [sys.executable, "-m", "spes_swarm.monitor"]


def look(monitor: list[str], *arguments: str) -> dict[str, Any]:
    """What a monitor sees."""
    done = subprocess.run(
        [*monitor, "--once", "--json", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def test_a_peer_that_adds_a_metric_and_one_that_lacks_it_train_together(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        running.has_known_events = False  # its metric
        plain = running.found("--wait-for-peers", 2, "--name", "plain")
        running.launch = launch_version("6.1")
        newer = running.join("--wait-for-peers", 2, "--name", "newer")
        for number in (1, 2, 3):
            for peer in (plain, newer):
                peer.wait_for_round(number)
            equal_digests([plain, newer], number)
            assert [peer.rounds()[number]["peers"] for peer in (plain, newer)] == [2, 2]
        assert newer.rounds()[3]["grad_norm"] == 0.5
        assert "grad_norm" not in plain.rounds()[3]
        address = ("--initial-peers", plain.address())
        here, there = look(MONITOR, *address), look(command("6.1", "monitor.__main__"), *address)
        for state in (here, there):
            assert {peer["name"] for peer in state["peers"]} == {"plain", "newer"}
            assert state["refused"] == {}
            assert state["train_loss"] > 0
        assert "grad_norm" not in here["peers"][0]
        assert there["grad_norm"] == 0.5
        for peer in (plain, newer):
            assert {fault["kind"] for fault in peer.events("fault")} <= {"round"}  # one that a busy machine held up


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("6.0", "7.0", "speaks protocol 6.0, this side 7.0: upgrade peer "),
        ("7.0", "6.0", "speaks protocol 7.0, this side 6.0: upgrade this side"),
    ],
)
def test_a_peer_of_another_major_version_is_refused_at_once(
    tmp_path: Path, first: str, second: str, words: str
) -> None:
    launches: dict[str, Launch] = {"6.0": launch_slow(), "7.0": launch_version("7.0")}
    monitors = {"6.0": MONITOR, "7.0": command("7.0", "monitor.__main__")}
    with swarm(tmp_path) as running:
        running.has_known_events = False
        running.launch = launches[first]
        founder = running.found()
        founder.wait_for_round(1)
        running.launch = launches[second]
        joiner = running.join("--bootstrap-timeout", 100_000)  # far longer than this test waits
        assert joiner.wait() == 2
        (line,) = [line for line in joiner.text().splitlines() if "protocol" in line]
        assert line.startswith("join: peer ")
        assert words in line
        assert "Traceback" not in joiner.text()
        fault = founder.wait_for("fault")
        assert fault["kind"] == "version"
        assert f"the caller speaks protocol {second}, this side {first}: upgrade " in fault["detail"]
        looking = subprocess.run(
            [*monitors[second], "--initial-peers", founder.address(), "--bootstrap-timeout", "100000", "--once"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert looking.returncode == 2
        assert words in looking.stderr
        assert looking.stderr.count("\n") == 1
        founder.wait_for_round(max(founder.rounds()) + 1)
        assert {fault["kind"] for fault in founder.events("fault")} == {"version"}
