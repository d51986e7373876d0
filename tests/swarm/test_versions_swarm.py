"""Peers of several versions: those of one major version train together, those of two refuse each other."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S
from spes_swarm.monitor.__main__ import main as monitor
from tests.helpers.commands import output_of
from tests.helpers.other_version import SLOW_S, command, launch_version, with_protocol
from tests.helpers.slow_join import PAUSE_S, launch_slow, sleeping_main
from tests.helpers.swarm import PATIENT, equal_digests, swarm

pytestmark = pytest.mark.swarm


def test_a_peer_that_adds_a_metric_and_one_that_lacks_it_train_together(tmp_path: Path) -> None:
    with swarm(tmp_path, round=PATIENT) as running:
        running.has_known_events = False  # its metric
        running.launch = launch_slow(SLOW_S)
        plain = running.found("--wait-for-peers", 2, "--name", "plain")
        running.launch = launch_version("7.1")
        newer = running.join("--wait-for-peers", 2, "--name", "newer")
        for number in (1, 2):
            for peer in (plain, newer):
                peer.wait_for_round(number)
            equal_digests([plain, newer], number)
            assert [peer.rounds()[number]["peers"] for peer in (plain, newer)] == [2, 2]
        assert newer.rounds()[2]["grad_norm"] == 0.5
        assert "grad_norm" not in plain.rounds()[2]
        look = ("--once", "--json", "--initial-peers", plain.address())
        its_own = command("7.1", "monitor.__main__", *look)
        said = subprocess.run(its_own, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
        here, there = json.loads(output_of(monitor, *look)), json.loads(said)
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
        ("7.0", "8.0", "speaks protocol 7.0, this side 8.0: upgrade peer "),
        ("8.0", "7.0", "speaks protocol 8.0, this side 7.0: upgrade this side"),
    ],
)
def test_a_peer_of_another_major_version_is_refused_at_once(
    tmp_path: Path, first: str, second: str, words: str
) -> None:
    slow = partial(sleeping_main, PAUSE_S)
    with swarm(tmp_path) as running:
        running.has_known_events = False
        running.launch = ForkServer(main=partial(with_protocol, first, slow))
        founder = running.found()
        founder.wait_for_round(1)
        running.launch = ForkServer(main=partial(with_protocol, second, slow))
        joiner = running.join("--bootstrap-timeout", 100_000)  # far longer than this test waits
        assert joiner.wait() == 2
        (line,) = [line for line in joiner.text().splitlines() if "protocol" in line]
        assert line.startswith("join: peer ")
        assert words in line
        assert "Traceback" not in joiner.text()
        fault = founder.wait_for("fault")
        assert fault["kind"] == "version"
        assert f"the caller speaks protocol {second}, this side {first}: upgrade " in fault["detail"]
        look = ("--initial-peers", founder.address(), "--bootstrap-timeout", 100_000, "--once")
        said = output_of(partial(with_protocol, second, monitor), *look, code=2)
        assert words in said
        assert said.count("\n") == 1
        founder.wait_for_round(max(founder.rounds()) + 1)
        assert {fault["kind"] for fault in founder.events("fault")} == {"version"}
