"""A peer without a trainer, whose network process measures its rounds; see round.py."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from scripts.testing.tiny_run import tiny_run
from spes_swarm.base.arrays import FloatArray, SharedVector
from spes_swarm.base.errors import BootstrapError, RoundError
from spes_swarm.config.manifest import found_run
from spes_swarm.config.run import RunConfig
from spes_swarm.network.client import NetworkClient
from spes_swarm.network.run_commands import RunCommandHandler
from spes_swarm.port.commands import Commands
from spes_swarm.port.messages import Presence, RoundReport, RunSettings
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.rounds.contributions import Contributions
from spes_swarm.protocol.rounds.reducing import Reduction
from spes_swarm.protocol.rounds.results import Results
from spes_swarm.protocol.rounds.round_state import RoundState

PATIENCE_S = 1800.0  # for all that will come; no measurement depends on it
_TIMEOUT_S = 600.0
_SHARED = 0.2  # of the parameters
_CHUNK = 1 << 20
_NOISE = 1e-3  # root mean square of the differences
_WATCH_S = 0.01  # how often the event loop is to run
_ASK_EVERY_S = 0.01
_ANSWER_S = 10.0  # how long an answer is waited for
_FROZEN_S = 10
_PARTS = {
    "encode": (Contributions, "batch"),
    "decode": (Reduction, "_take"),
    "mean": (Reduction, "_mean"),
    "reduce": (Reduction, "complete"),
    "results": (Results, "store"),
    "commit": (RoundState, "apply"),
    "digests": (Reference, "rehashed"),
}


@dataclass(frozen=True)
class Task:
    """What one peer does.

    Attributes:
        place: its directory; `first`: that of the founder.
        keeps_previous: whether it could take its last commit back.
        fault: what happens to it in the last round but one.
        idle_s: for how long it does nothing, once all are there.
    """

    index: int
    place: Path
    first: Path
    parameters: int
    num_peers: int
    num_experts: int
    codec: str
    part_elements: int
    num_rounds: int
    disk: Path | None
    keeps_previous: bool
    fault: str | None
    idle_s: float

    def dumps(self) -> str:
        """As one argument of a program."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def loads(cls, text: str) -> Self:
        """Reads one."""
        fields = json.loads(text)
        paths = {key: Path(fields[key]) for key in ("place", "first", "disk") if fields[key] is not None}
        return cls(**fields | paths)

    @property
    def layout(self) -> Layout:
        """Of the model."""
        shared = int(_SHARED * self.parameters)
        expert_size = (self.parameters - shared) // self.num_experts
        return Layout.build({"shared": (shared,)}, {"expert": (self.num_experts, expert_size)})

    @property
    def held(self) -> tuple[int, ...]:
        """Its experts: each has one holder, or, with more peers than experts, each peer has one."""
        return tuple(range(self.index % self.num_experts, self.num_experts, self.num_peers))

    @property
    def run(self) -> RunConfig:
        """The configuration of the run."""
        content = tiny_run(
            "bench",
            training={"learning_rate": 1e-3, "warmup_steps": 1, "total_steps": 100_000},
            round={
                "inner_steps": 20,
                "codec": self.codec,
                "part_elements": self.part_elements,
                "window_s": 10.0,
                "stall_timeout_s": 30.0 + 2.0 * self.num_peers,  # they share one machine
                "timeout_s": _TIMEOUT_S,
                "progress_ttl_s": 60.0,
                "lease_s": 600.0,
            },
            merge={"alpha": 0.0, "steps": 1, "interval": 0},
            experts_per_peer=1,
            evaluation={"sequences": 1, "every_rounds": 1000},
        )
        return RunConfig.from_dict(content, source="the benchmark")


def ask(arguments: list[str]) -> int:
    """The main program of somebody who asks a peer for the manifest, again and again, until the file `over` exists."""
    place = Path(arguments[0])
    network = NetworkClient(place / "asker.key", lambda event: print(event, flush=True))
    answers = []
    try:
        _start_daemon(network)
        peers = _bootstrap(network, place)
        while not (place / "over").exists():
            begun = time.monotonic()
            with suppress(BootstrapError):  # no answer
                network.ask(Commands.fetch_manifest, _TIMEOUT_S, peers=peers, run_id=None, timeout_s=_ANSWER_S)
            seconds = time.monotonic() - begun
            answers.append((begun, seconds))
            if len(answers) == 1:
                publish(place / "asking", "")
            time.sleep(max(0.0, _ASK_EVERY_S - seconds))
    finally:
        network.stop()
    publish(place / "answers.json", json.dumps(answers))
    return 0


def take_part(arguments: list[str]) -> int:
    """The main program of a peer."""
    task = Task.loads(arguments[0])
    layout = task.layout
    reference, contribution = (SharedVector.create(layout.num_elements, task.disk) for _ in range(2))
    previous = SharedVector.create(2 * layout.num_elements, task.disk) if task.keeps_previous else None
    _Clock()
    if task.fault is not None:
        _prepare_fault(task.fault, task.num_rounds - 1)
    identity = Identity.load_or_create(task.place / "identity.key")
    network = NetworkClient(identity.path, lambda event: print(event, flush=True))
    maddrs = _start_daemon(network)
    if task.index == 0:
        manifest, initial_peers = found_run(task.run, layout.digest, identity), []
        publish(task.first / "addresses", json.dumps(maddrs))
    else:
        peers = _bootstrap(network, task.first)
        manifest = network.ask(Commands.fetch_manifest, _TIMEOUT_S, peers=peers, run_id=None, timeout_s=60.0)
        initial_peers = json.loads((task.first / "addresses").read_text())
    settings = RunSettings(
        manifest=manifest,
        layout=layout,
        reference_fd=reference.fd,
        contribution_fd=contribution.fd,
        previous_fd=None if previous is None else previous.fd,
        trainer_pid=os.getpid(),
        client_mode=False,
        bandwidth_mbps=100.0,
        initial_peers=tuple(initial_peers),
    )
    network.ask(Commands.open_run, _TIMEOUT_S, settings=settings, review_reach=False)
    versions = (0,) * len(layout.blocks)
    network.ask(Commands.adopt, _TIMEOUT_S, table_round=0, versions=versions, lineage=Lineage({}))
    network.ask(Commands.claim, _TIMEOUT_S, experts=task.held, room=len(task.held), fixed=True)
    presence = Presence(
        name="",
        state="training",
        step=0,
        tokens=0,
        tokens_per_step=100,
        tokens_per_second=1.0,
        loss=None,
        experts=task.held,
    )
    network.ask(Commands.set_presence, _TIMEOUT_S, presence=presence)
    _await(lambda: network.ask(Commands.view, _TIMEOUT_S).num_training >= task.num_peers - 1)
    _await((task.first / "asking").exists)
    try:
        idle = {"idle_percent": _idle_percent(task.idle_s)} if task.idle_s else {}
        _hold_rounds(task, network, contribution.values_N, idle)
    finally:
        network.stop()
    return 0


def _start_daemon(network: NetworkClient) -> list[str]:
    maddrs: list[str] = network.ask(
        Commands.start_daemon,
        _TIMEOUT_S,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        announce_maddrs=[],
        client_mode=False,
        relay=False,
    )
    return maddrs


def _bootstrap(network: NetworkClient, first: Path) -> list[str]:
    _await((first / "addresses").exists)
    maddrs = json.loads((first / "addresses").read_text())
    peers: list[str] = network.ask(Commands.bootstrap, _TIMEOUT_S, maddrs=maddrs, timeout_s=60.0)
    return peers


def _idle_percent(seconds: float) -> float:
    """What the network process and its p2pd take of a core while nothing happens."""
    processes = psutil.Process().children(recursive=True)
    begun, before = time.monotonic(), _cpu_seconds(processes)
    time.sleep(seconds)
    return 100 * (_cpu_seconds(processes) - before) / (time.monotonic() - begun)


def _hold_rounds(task: Task, network: NetworkClient, contribution_N: FloatArray, idle: Mapping[str, float]) -> None:
    trained = task.layout.trained_blocks(task.held)
    noise_N = _NOISE * np.random.default_rng(task.index).standard_normal(_CHUNK, dtype=np.float32)
    number = tries = 0
    while number < task.num_rounds:
        if tries == 0:
            for block in trained:
                _add(contribution_N[block.where], noise_N)
        asked = network.submit(Commands.run_round, tokens=1000, routed=(250,) * len(task.held), leaving=False)
        tries += 1
        try:
            report = asked.result(_TIMEOUT_S)
        except RoundError as exc:
            print(exc, flush=True)
            continue
        if not isinstance(report, RoundReport):  # it has missed a round, and fetched the reference
            print(report, flush=True)
            number, tries = report.round, 0
            continue
        number = report.commit.round
        sent, received = network.ask(Commands.traffic, _TIMEOUT_S)
        figures = json.loads((task.place / "figures.json").read_text())
        row = {
            "group": report.group_seconds,
            "exchange": report.exchange_seconds,
            **figures,
            "per_1e9": (figures["cpu"] + figures["p2pd"]) * 1e9 / sum(block.size for block in trained),
            "sent": sent / 1e6,
            "received": received / 1e6,
            "digest": report.digest[:8],
            "members": len(report.commit.members),
            "missing": report.commit.parts_missing,
            "tries": tries,
            **idle,
        }
        publish(task.place / f"{number}.json", json.dumps(row))
        tries = 0


def _add(values_N: FloatArray, noise_N: FloatArray) -> None:
    for start in range(0, len(values_N), len(noise_N)):
        piece_N = values_N[start : start + len(noise_N)]
        piece_N += noise_N[: len(piece_N)]


def publish(path: Path, text: str) -> None:
    """Writes a file, of which nobody ever reads a part."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the other peers have not come")
        time.sleep(0.1)


# What a network process that is forked later does.


def _daemons() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.name().startswith("p2pd")]


def _prepare_fault(fault: str, in_round: int) -> None:
    """Has the network process and its p2pd killed, or frozen for a while, in the middle of a round."""
    complete, only_once = Reduction.complete, threading.Lock()

    def complete_or_fail(reduction: Reduction, index: int) -> None:
        complete(reduction, index)
        is_middle = reduction.plan.round == in_round and 2 * len(reduction.reduced) >= reduction.num_to_reduce
        if is_middle and only_once.acquire(blocking=False):
            own = os.getpid()
            pids = " ".join(str(pid) for pid in (*(daemon.pid for daemon in _daemons()), own))
            if fault == "freeze":
                thaw = f"sleep {_FROZEN_S}; kill -CONT {pids}"
                subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; {thaw}"], start_new_session=True).wait()
            else:
                for daemon in _daemons():
                    daemon.kill()
                os.kill(own, signal.SIGKILL)

    setattr(Reduction, "complete", complete_or_fail)  # noqa: B010 (mypy knows that it is a method)


class _Clock:
    """Measures what the network process does in each round; writes figures.json."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()
        for part, (owner, name) in _PARTS.items():
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        original = RunCommandHandler.run_round

        @functools.wraps(original)
        async def run_round(handler: RunCommandHandler, *args: Any, **kwargs: Any) -> Any:
            daemons = _daemons()
            self._seconds.clear()
            peaks = {"block_s": 0.0, "private": 0.0, "private_before": float(_private_bytes())}
            watch = asyncio.create_task(_watch(peaks))
            begun, cpu, theirs = time.monotonic(), time.process_time(), _cpu_seconds(daemons)
            try:
                return await original(handler, *args, **kwargs)
            finally:
                watch.cancel()
                cpu = time.process_time() - cpu
                figures = {
                    "begun": begun,
                    "ended": time.monotonic(),
                    "cpu": cpu,
                    "p2pd": _cpu_seconds(daemons) - theirs,
                    **{part: self._seconds[part] for part in _PARTS},
                    "rest": cpu - self._seconds.total(),
                    "block_ms": 1e3 * peaks["block_s"],
                    "grown_mb": 1e-6 * max(0.0, peaks["private"] - peaks["private_before"]),
                }
                publish(handler._state.identity.path.parent / "figures.json", json.dumps(figures))

        setattr(RunCommandHandler, "run_round", run_round)  # noqa: B010 (mypy knows that it is a method)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Counts the time of a part without that of other parts that it calls."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._local.inner = getattr(self._local, "inner", 0.0), 0.0
            begun = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                seconds = time.thread_time() - begun
                with self._lock:
                    self._seconds[part] += seconds - self._local.inner
                self._local.inner = outer + seconds

        return timed


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


async def _watch(peaks: dict[str, float]) -> None:
    """Notes for how long the event loop ran something else, and the memory."""
    before = measured = time.monotonic()
    while True:
        await asyncio.sleep(_WATCH_S)
        now = time.monotonic()
        peaks["block_s"] = max(peaks["block_s"], now - before - _WATCH_S)
        if now - measured > 0.05:
            measured = now
            peaks["private"] = max(peaks["private"], _private_bytes())
        before = time.monotonic()


def _private_bytes() -> int:
    """Anonymous memory of this process."""
    with Path("/proc/self/status").open(encoding="utf-8") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))
