"""Real peers for tests: processes on 127.0.0.1, watched through their metrics, ended by pid.

Every wait is for an event with a deadline; nothing here sleeps for an effect.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
Event = dict[str, Any]

# Small enough for four peers on two cores; everything else as a user would have it.
TINY_RUN: dict[str, Any] = {
    "name": "test",
    "model": {
        "type": "olmoe",
        "settings": {
            "vocab_size": 272,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 64,
            "bos_token_id": None,
            "eos_token_id": 256,
            "pad_token_id": None,
        },
    },
    "training": {
        "sequence_length": 64,
        "batch_size": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 10,
        "total_steps": 2000,
    },
    "round": {
        "inner_steps": 10,
        "codec": "fp16",
        "window_s": 8.0,
        "stall_timeout_s": 3.0,
        "timeout_s": 30.0,
        "progress_ttl_s": 10.0,
        "lease_s": 60.0,
    },
    "merge": {"alpha": 0.1, "steps": 400, "interval": 20},
    "experts_per_peer": 2,
    "evaluation": {"sequences": 8},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested `changes`."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


class Peer:
    """One `python -m spes_swarm.join` with everything that it starts."""

    def __init__(self, output_dir: Path, arguments: Sequence[str]) -> None:
        self.output_dir = output_dir
        self.arguments = [str(argument) for argument in arguments]
        output_dir.mkdir(parents=True, exist_ok=True)
        self.log = output_dir / "console.log"
        # A directory may have been used by an earlier process: only what this one writes counts.
        self._metrics_start = self._metrics_path.stat().st_size if self._metrics_path.exists() else 0
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "spes_swarm.join", "--output-dir", str(output_dir), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    @property
    def _metrics_path(self) -> Path:
        return self.output_dir / "metrics.jsonl"

    def events(self, kind: str | None = None) -> list[Event]:
        """What this process has written to its metrics so far."""
        if not self._metrics_path.exists():
            return []
        with self._metrics_path.open(encoding="utf-8") as file:
            file.seek(self._metrics_start)
            lines = [line for line in file if line.endswith("\n")]
        events = [json.loads(line) for line in lines]
        return events if kind is None else [event for event in events if event["event"] == kind]

    def rounds(self) -> dict[int, Event]:
        """Committed rounds by number."""
        return {event["round"]: event for event in self.events("round")}

    def wait_for(
        self, kind: str, condition: Callable[[Event], bool] = lambda event: True, timeout_s: float = 60.0
    ) -> Event:
        """Waits for an event that satisfies `condition`."""
        deadline = time.monotonic() + timeout_s
        while True:
            for event in self.events(kind):
                if condition(event):
                    return event
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = f"the peer ended with code {self.process.returncode}" if ended else f"after {timeout_s:.0f} s"
                for event in self.events(kind):  # it may have been written just before the end
                    if condition(event):
                        return event
                raise AssertionError(f"no such {kind!r} event: {why}\n{self.tail()}")
            time.sleep(_POLL_S)

    def wait_for_round(self, number: int, timeout_s: float = 60.0) -> Event:
        """Waits until a round of at least that number is committed."""
        return self.wait_for("round", lambda event: event["round"] >= number, timeout_s)

    def text(self) -> str:
        """What this process has printed so far."""
        return self.log.read_bytes()[self._log_start :].decode(errors="replace")

    def tail(self) -> str:
        """The end of what it printed, and its faults."""
        text = self.text()
        faults = [e for e in self.events("fault")][-10:]
        return f"--- {self.output_dir.name}:\n{text[-3000:]}\nfaults: {faults}"

    def address(self, timeout_s: float = 60.0) -> str:
        """An address that others can use."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            for word in self.text().split():
                if word.startswith("/ip4/127.0.0.1/") and "/p2p/" in word:
                    return word
            time.sleep(_POLL_S)
        raise AssertionError(f"no address was printed\n{self.tail()}")

    def tree(self) -> list[psutil.Process]:
        """The main process and all that it has started."""
        try:
            main = psutil.Process(self.process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def signal_tree(self, number: int) -> None:
        """Sends a signal to the main process and all that it has started."""
        for process in self.tree():
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the main process only, as the kernel's OOM killer does; returns what was its tree."""
        tree = self.tree()
        self.process.kill()
        self.process.wait(10)
        return tree

    def terminate(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def wait(self, timeout_s: float = 120.0) -> int:
        """Waits for it to end by itself; returns the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the peer did not end within {timeout_s:.0f} s\n{self.tail()}") from None


class Swarm:
    """Peers of one test."""

    def __init__(self, directory: Path, changes: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.peers: list[Peer] = []
        self.config = directory / "run.yaml"
        self.config.write_text(yaml.safe_dump({"run": merged(TINY_RUN, changes or {})}), encoding="utf-8")

    def found(self, *arguments: Any, name: str = "peer0") -> Peer:
        """Starts the founder."""
        return self.start(name, "--config", self.config, *arguments)

    def join(self, *arguments: Any, name: str | None = None, via: Peer | None = None) -> Peer:
        """Starts a peer that joins through `via`, by default the first."""
        through = via if via is not None else self.peers[0]
        return self.start(
            name or f"peer{len(self.peers)}", "--initial-peers", through.address(), *arguments
        )

    def start(self, name: str, *arguments: Any) -> Peer:
        """Starts a process."""
        common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
        peer = Peer(self.directory / name, [*common, *map(str, arguments)])
        self.peers.append(peer)
        return peer

    def start_all(self, count: int, *arguments: Any) -> list[Peer]:
        """A founder and `count - 1` others, who begin together."""
        self.found("--wait-for-peers", count, *arguments)
        for _ in range(count - 1):
            self.join("--wait-for-peers", count, *arguments)
        return self.peers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for peer in self.peers:
            for process in peer.tree():
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            if peer.process.poll() is None:
                peer.process.wait(10)


@contextmanager
def swarm(directory: Path, **changes: Any) -> Iterator[Swarm]:
    """A swarm that is cleaned up however the test ends."""
    with Swarm(directory, changes) as running:
        yield running


def equal_digests(peers: Sequence[Peer], number: int) -> str:
    """The digest that all these peers report for a round.

    Raises:
        AssertionError: they differ, or one has not committed it.
    """
    digests = {peer.output_dir.name: peer.rounds()[number]["digest"] for peer in peers}
    assert len(set(digests.values())) == 1, digests
    return next(iter(digests.values()))
