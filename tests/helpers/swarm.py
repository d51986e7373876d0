"""Swarms of real peers for tests: processes on 127.0.0.1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import yaml

from scripts.testing.local_peer import LocalPeer, PeerProcess
from scripts.testing.tiny_run import tiny_run
from tests.helpers.events import check_events
from tests.helpers.slow_join import launch_slow

Launch = Callable[[Sequence[str], Path], PeerProcess]

# For a command that ends by itself. Importing torch and transformers on a busy machine takes most of it.
REASONABLE_S = 300.0

# Small enough for four peers on two cores; everything else as a user would have it.
TINY_RUN = tiny_run(
    "test",
    training={"learning_rate": 3e-3, "warmup_steps": 10, "total_steps": 2000},
    round={
        "inner_steps": 10,
        "codec": "fp16",
        "window_s": 8.0,
        "stall_timeout_s": 3.0,
        "timeout_s": 30.0,
        "progress_ttl_s": 10.0,
        "lease_s": 60.0,
    },
    merge={"alpha": 0.1, "steps": 400, "interval": 20},
    experts_per_peer=2,
    evaluation={"sequences": 8, "every_rounds": 1},
)


# Of `round`, for swarms in which nobody dies: a peer that a busy machine holds up still takes part.
PATIENT = {"window_s": 25.0, "stall_timeout_s": 15.0}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with nested `changes`."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


# For tests that wait for a number of rounds: half of the steps, with the rest of the schedule in proportion.
SWARM_RUN = merged(
    TINY_RUN,
    {
        "training": {"warmup_steps": 5, "total_steps": 1000},
        "round": {"inner_steps": 5},
        "merge": {"steps": 200, "interval": 10},
    },
)


class Swarm:
    """Peers of one test.

    Attributes:
        launch: starts those to come.
        has_known_events: whether their events fit the schema, which is checked at the end.
    """

    def __init__(self, directory: Path, changes: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.peers: list[LocalPeer] = []
        self.launch: Launch = launch_slow()
        self.has_known_events = True
        self.config = directory / "run.yaml"
        self.config.write_text(yaml.safe_dump({"run": merged(SWARM_RUN, changes or {})}), encoding="utf-8")

    def found(self, *arguments: Any, name: str = "peer0") -> LocalPeer:
        """Starts the founder."""
        return self.start(name, "--config", self.config, *arguments)

    def join(self, *arguments: Any, name: str | None = None, via: LocalPeer | None = None) -> LocalPeer:
        """Starts a peer that joins through `via`, by default the first."""
        through = via if via is not None else self.peers[0]
        return self.start(name or f"peer{len(self.peers)}", "--initial-peers", through.address(), *arguments)

    def start(self, name: str, *arguments: Any) -> LocalPeer:
        """Starts a process."""
        common = ["--num-threads", "1", "--checkpoint-minutes", "0"]
        if "--client-mode" not in arguments:
            common += ["--host-maddrs", "/ip4/127.0.0.1/tcp/0"]
        peer = LocalPeer(self.directory / name, [*common, *map(str, arguments)], self.launch)
        self.peers.append(peer)
        return peer

    def start_all(self, count: int, *arguments: Any) -> list[LocalPeer]:
        """A founder and `count - 1` others, who begin together."""
        self.found("--wait-for-peers", count, *arguments)
        for _ in range(count - 1):
            self.join("--wait-for-peers", count, *arguments)
        return self.peers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        for peer in self.peers:
            peer.__exit__()
        if details[0] is None and self.has_known_events:
            for peer in self.peers:
                check_events(peer.events())


@contextmanager
def swarm(directory: Path, **changes: Any) -> Iterator[Swarm]:
    """A swarm that is cleaned up however the test ends."""
    with Swarm(directory, changes) as running:
        yield running


def equal_digests(peers: Sequence[LocalPeer], number: int) -> str:
    """The digest that all these peers report for a round.

    Raises:
        AssertionError: they differ, or one has not committed it.
    """
    digests: dict[str, str] = {peer.output_dir.name: peer.rounds()[number]["digest"] for peer in peers}
    assert len(set(digests.values())) == 1, digests
    return next(iter(digests.values()))
