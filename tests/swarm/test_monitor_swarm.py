"""The monitor as its users start it, beside real peers that come, die, leave and come back."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Self

import jsonschema
import pytest

from scripts.testing.forked_peer import ForkServer
from scripts.testing.local_peer import PATIENCE_S
from spes_swarm.monitor.__main__ import main
from spes_swarm.monitor.history_file import read_history
from spes_swarm.monitor.schema import STATE_SCHEMA
from tests.helpers.slow_join import launch_slow
from tests.helpers.swarm import PATIENT, Swarm, swarm

pytestmark = pytest.mark.swarm

State = dict[str, Any]


class Monitor:
    """A monitor that writes a line of JSON for each look, and nothing else if all is well."""

    def __init__(self, directory: Path, *arguments: object) -> None:
        directory.mkdir(exist_ok=True)
        self._output = directory / "states.jsonl"
        self._output.touch()
        self.process = ForkServer(main=main)(["--json", *map(str, arguments)], self._output)

    def _lines(self) -> list[str]:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        return [line for line in lines if line.endswith("\n")]

    def states(self) -> list[State]:
        return [json.loads(line) for line in self._lines() if line.startswith("{")]

    def wait_for(self, what: str, condition: Callable[[State], bool], since: int = 0) -> int:
        """Waits for a state that satisfies `condition`; returns how many there were until then."""
        deadline = time.monotonic() + PATIENCE_S
        seen = since
        while time.monotonic() < deadline:
            states = self.states()
            for state in states[seen:]:
                seen += 1
                if condition(state):
                    return seen
            ended = self.process.poll()
            assert ended is None, f"{what}: the monitor ended with {ended}\n{self.log()}"
            time.sleep(0.1)
        last = self.states()[-1:]
        raise AssertionError(f"{what}: not within {PATIENCE_S:.0f} s; last {last}\n{self.log()}")

    def log(self) -> str:
        return "".join(line for line in self._lines() if not line.startswith("{"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


def by_name(state: State) -> dict[str, State]:
    return {peer["name"]: peer for peer in state["peers"]}


def trained_together(state: State) -> bool:
    """Three peers, all in the same round with the same reference, and everything about it told."""
    peers = state["peers"]
    return (
        len(peers) == 3
        and len({peer["round"] for peer in peers}) == 1
        and state["round"] >= 3
        and state["consensus"]["agree"] == 3
        and state["dead_experts"] is not None
        and all(
            peer["train_loss"] and peer["eval_loss"] and peer["bytes_sent"] and peer["round_seconds"] for peer in peers
        )
    )


def start_three(running: Swarm) -> None:
    running.found("--wait-for-peers", 3, "--name", "<b>founder")
    for name in ("second", "third"):
        running.join("--wait-for-peers", 3, "--name", name)


def test_peers_come_die_leave_and_come_back_and_the_monitor_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = tmp_path / "run.sqlite"
    with swarm(tmp_path) as running:
        running.launch = launch_slow(0.8)  # it mostly waits for records to expire
        start_three(running)
        founder, second, third = running.peers
        address = founder.address()
        with Monitor(tmp_path, "--refresh", 0.5, "--initial-peers", address, "--history", history) as monitor:
            seen = monitor.wait_for("three peers", trained_together)
            state = monitor.states()[seen - 1]
            assert set(by_name(state)) == {"‹b›founder", "second", "third"}
            assert state["experts_covered"] == 6
            assert state["refused"] == {}
            # Fair shares, of which a short round has few tokens; and the medians of three peers need not add up to 8.
            assert sum(expert["load"] for expert in state["experts"]) == pytest.approx(8.0, abs=4.0)
            for name in ("load_entropy", "router_entropy", "held_share", "expert_similarity_max"):
                assert 0.0 < state[name] < 1.0
            assert state["join_command"].startswith("python -m spes_swarm.join --initial-peers /ip4/127.0.0.1/tcp/")
            for peer in running.peers:
                peer.wait_for_round(state["round"])
            digests = {peer.rounds()[state["round"]]["digest"] for peer in running.peers}
            assert digests == {state["consensus"]["digest"]}

            for process in third.kill():
                process.wait(PATIENCE_S)
            seen = monitor.wait_for("late", lambda s: by_name(s).get("third", {}).get("state") == "late", seen)
            seen = monitor.wait_for("gone", lambda s: set(by_name(s)) == {"‹b›founder", "second"}, seen)

            for peer in (founder, second):
                peer.process.send_signal(signal.SIGTERM)
            seen = monitor.wait_for("no peers", lambda s: s["status"] == "no_peers", seen)
            alone = monitor.states()[seen - 1]
            assert {peer["state"] for peer in alone["peers"]} <= {"left"}
            assert alone["silent_s"] >= 0
            assert alone["tokens_total"] > 0
            assert alone["round"] >= state["round"]
            assert alone["train_loss"] is not None
            for peer in (founder, second):
                peer.wait()

            running.start("peer0", "--name", "founder-again")
            seen = monitor.wait_for("back", lambda s: "founder-again" in by_name(s), seen)
            seen = monitor.wait_for("training on", lambda s: s["round"] > alone["round"], seen)

            capsys.readouterr()
            assert main(["--initial-peers", address, "--once", "--json"]) == 0
            once = json.loads(capsys.readouterr().out)
            present = [peer for peer in once["peers"] if peer["state"] != "left"]
            assert [peer["name"] for peer in present] == ["founder-again"]

            monitor.process.send_signal(signal.SIGTERM)
            assert monitor.process.wait(PATIENCE_S) == 0, monitor.log()
            states = monitor.states()
        for state in [*states[::25], once]:
            jsonschema.validate(state, STATE_SCHEMA)
        assert main(["--replay", str(history), "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["round"] == states[-1]["round"]
        picture = tmp_path / "run.png"
        assert main(["--replay", str(history), "--plot", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert monitor.log() == ""


def test_two_monitors_see_every_short_round_with_the_same_figures_and_who_leaves(tmp_path: Path) -> None:
    """Rounds are several times shorter than the pauses between the looks of the monitors, which differ."""
    # However busy the machine: no report comes so late that a monitor takes its peer to be gone.
    patient = {**PATIENT, "progress_ttl_s": 100.0, "lease_s": 300.0}
    with swarm(tmp_path, round={"inner_steps": 1, **patient}, evaluation={"every_rounds": 5}) as running:
        running.launch = launch_slow(0.4)  # a round takes at least as long, also that of a single peer
        founder, second = running.start_all(2)
        watch = ("--initial-peers", founder.address(), "--history")
        histories = [tmp_path / "one.sqlite", tmp_path / "other.sqlite"]
        with (
            Monitor(tmp_path / "one", "--refresh", 1.1, *watch, histories[0]) as one,
            Monitor(tmp_path / "other", "--refresh", 2.9, *watch, histories[1]) as other,
        ):
            monitors = (one, other)
            for monitor in monitors:
                monitor.wait_for("many rounds", lambda s: s["round"] >= 10)
            second.process.send_signal(signal.SIGTERM)
            for monitor in monitors:
                seen = monitor.wait_for("left", lambda s: any(peer["state"] == "left" for peer in s["peers"]))
                assert monitor.states()[seen - 1]["status"] == "live"
            for monitor in monitors:
                monitor.wait_for("rounds of one peer", lambda s: s["loss_round"] is not None and s["loss_round"] >= 22)
            with Monitor(tmp_path / "late", *watch[:2]) as late:  # it begins between two evaluations, or just after one
                seen = late.wait_for("an evaluation", lambda s: s["eval_loss"] is not None)
                state = late.states()[seen - 1]
                assert state["eval_round"] % 5 == 0
                assert founder.rounds()[state["eval_round"]]["eval_loss"] == pytest.approx(state["eval_loss"])
            for monitor, stop in zip(monitors, (signal.SIGTERM, signal.SIGHUP), strict=True):
                monitor.process.send_signal(stop)
                assert monitor.process.wait(PATIENCE_S) == 0, monitor.log()
        first, other_points = ({point.round: point for point in read_history(path)[1]} for path in histories)
        for points in (first, other_points):
            assert list(points) == list(range(min(points), max(points) + 1))
            assert max(points) >= 22
        both = first.keys() & other_points.keys()
        assert len(both) > 8
        assert {number: first[number] for number in both} == {number: other_points[number] for number in both}
        told = {peer: peer.rounds() for peer in (founder, second)}
        for number in both:
            losses = [rounds[number]["train_loss"] for rounds in told.values() if number in rounds]
            losses = [loss for loss in losses if loss is not None]  # None: of a peer that made no step in this round
            assert first[number].train_loss == pytest.approx(median(losses))
