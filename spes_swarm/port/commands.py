"""The port between a peer's trainer and its network process.

`Commands` lists what the network process does for the trainer, one coroutine each. A trainer names a command by its
function, never by a string, so that mypy checks arguments and results on both sides:

    counts = port.ask(Commands.count_tokens, 30.0)
    report = port.submit(Commands.run_round, tokens=4096, routed=(1024,), leaving=False)  # a Future[RoundReport | ...]

The other direction is `News`: what the network process tells without being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.port.messages import (
    CaughtUp,
    Presence,
    Reach,
    Received,
    RoundReport,
    RunSettings,
    SwarmView,
    SyncProgress,
    TokenCounts,
    TransferReport,
)
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ProcessCommands(Protocol):
    """What the network process does with or without a run; see network.NetworkProcess."""

    async def start_daemon(
        self,
        host_maddrs: list[str],
        announce_maddrs: list[str],
        client_mode: bool,
        relay: bool,
        private: bool = False,
    ) -> list[str]:
        """Starts p2pd, ending one that runs; returns this peer's addresses."""

    async def bootstrap(self, maddrs: list[str], timeout_s: float) -> list[str]:
        """Connects to the initial peers; see daemon.bootstrap.

        Raises:
            BootstrapError: none of them could be reached.
        """

    async def fetch_manifest(self, peers: list[str], run_id: str | None, timeout_s: float) -> Manifest:
        """Asks peers for the manifest of the run they take part in.

        Raises:
            BootstrapError: none of them takes part in a run yet.
            ManifestError: what they sent fails verification.
        """

    async def check_reach(self) -> Reach:
        """Asks connected peers whether they can open connections to this one; see reach.py."""

    async def open_run(self, settings: RunSettings, review_reach: bool) -> None:
        """Joins the run's DHT and opens its services. The shared vectors hold the reference to begin with.

        Args:
            settings: of the run and of this peer.
            review_reach: whether this peer's reachability is checked again from time to time.
        """

    async def beat(self) -> None:
        """The trainer is alive: without this for a while, the peer counts as gone (see announcer.py)."""

    async def stop(self) -> None:
        """Leaves: releases the lease, tells the others, ends the daemon."""


class RunCommands(Protocol):
    """What it does once a run is open; see services.RunServices."""

    # The reference.

    async def adopt(self, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int = 0) -> str:
        """Declares the shared reference (initial weights, a checkpoint, a publication) complete; returns its digest."""

    async def download(self, if_newer: bool, partial: Path | None = None) -> TransferReport | None:
        """Fetches the reference from the other peers.

        Args:
            if_newer: only one that is newer than this peer's.
            partial: keeps what has come in case this peer is killed; see Transfer.download.

        Returns:
            How it went; None if there is none that is newer.

        Raises:
            RoundError: nobody delivers it.
        """

    async def swarm_table(self) -> ReferenceTable | None:
        """Table of the reference that most of the other peers have, None if nobody answers."""

    async def table(self) -> ReferenceTable:
        """Table of this peer's reference."""

    async def lineage(self) -> tuple[list[int], bytes]:
        """Rounds and marks of the commits that led to this peer's reference; see lineage.py."""

    async def swarm_tokens(self) -> int:
        """Tokens of all peers that have gone into commits until the reference's round."""

    # Other peers.

    async def peer_maddrs(self) -> list[str]:
        """Addresses of the run's other peers that this peer is connected to."""

    async def view(self) -> SwarmView:
        """Reads the records of the others now."""

    async def count_tokens(self) -> TokenCounts:
        """Asks the others directly how many tokens they have processed since the last commit."""

    async def set_presence(self, presence: Presence) -> None:
        """Updates what others see of this peer."""

    async def volunteer(self, target: bytes | None, publishing: bool) -> None:
        """Tells others that this peer would publish there (None: nowhere), and whether it is at it; see election.py."""

    # Experts.

    async def claim(self, experts: tuple[int, ...] | int, room: int, fixed: bool) -> tuple[int, ...]:
        """Takes leases of these experts, or of that many chosen by the rules.

        Args:
            experts: numbers, or how many.
            room: how many this peer can hold at most.
            fixed: the choice is the user's and must not be changed later.

        Returns:
            The experts held.
        """

    async def offer_moments(self, round_number: int, step: int, experts: tuple[int, ...], memory_fd: int) -> None:
        """Serves the moments of experts given up at a commit, in shared memory, to those who took the experts over."""

    async def fetch_moments(
        self, round_number: int, sources: dict[int, tuple[str, ...]], memory_fd: int
    ) -> dict[int, Received]:
        """Fetches the moments of experts taken over at a commit into shared memory; returns those that came."""

    async def wait_until_fetched(self, timeout_s: float) -> bool:
        """Waits until all moments that are due have been fetched from here."""

    # Rounds.

    async def run_round(self, tokens: int, routed: tuple[int, ...], leaving: bool) -> RoundReport | CaughtUp:
        """Holds a round with the contribution in shared memory.

        Args:
            tokens: that this peer has processed since the last commit.
            routed: of those, how many went to each expert held.
            leaving: it is this peer's last round.

        Raises:
            RoundError: nothing was committed, and reference and contribution are unchanged.
        """

    async def cancel_round(self) -> None:
        """Gives up the round that is under way, if there is one; afterwards the reference is at rest."""

    async def traffic(self) -> tuple[int, int]:
        """Payload bytes (sent, received) of the last round, when the others have fetched their share from here."""


class Commands(ProcessCommands, RunCommands, Protocol):
    """All of them.

    Each may raise a SwarmError of its own; RoundError stands for a run command when no run is open.
    """


class Ask(Protocol):
    """Sends a command and waits for its result."""

    def __call__(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        wait_s: float | None,
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> _Result:
        """Sends `command` with the arguments.

        Args:
            command: one of Commands.
            wait_s: how long to wait; None: as long as it takes.
            args: of the command.
            kwargs: of the command.

        Raises:
            NetworkProcessError: the network process has ended, or did not answer within `wait_s`.
            SwarmError: whatever the command raised.
        """


class Port(Protocol):
    """The network process as the trainer sees it."""

    @property
    def view(self) -> SwarmView | None:
        """The latest view of the others, None before the first."""

    @property
    def called_round(self) -> int:
        """The newest round that a leader has called for, 0 before the first."""

    def renew_view(self, wait_s: float) -> None:
        """Has the records of the others read now; `view` is then no older than this call.

        Raises:
            NetworkProcessError: the network process has ended, or did not answer within `wait_s`.
        """

    def submit(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Result]:
        """Sends a command without ever waiting; the future carries its result or exception.

        Raises:
            NetworkProcessError: the process has ended, or has read no command for long.
        """

    @property
    def ask(self) -> Ask:
        """Sends a command and waits for its result."""


@dataclass(frozen=True)
class FaultSeen:
    """A peer did something wrong, or something went wrong with it."""

    metric: ClassVar[str] = "fault"
    kind: str
    peer: str
    detail: str


@dataclass(frozen=True)
class GroupFormed:
    """The exchange of a round begins."""

    metric: ClassVar[str] = "group"
    round: int
    peers: int


@dataclass(frozen=True)
class LinkMade:
    """A connection to another peer stands, directly or through a relay."""

    metric: ClassVar[str] = "link"
    peer: str
    relayed: bool


@dataclass(frozen=True)
class Called:
    """A leader calls for a round."""

    round: int


Event: TypeAlias = FaultSeen | GroupFormed | LinkMade | Reach | SyncProgress
"""What the network process reports for the metrics, under the name `metric`."""

News: TypeAlias = Event | SwarmView | Called
"""All that it tells the trainer without being asked."""


class Listener(Protocol):
    """Who is told what happens in a run: the trainer, through the network process's pipe."""

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """A peer did something wrong, or something went wrong with it."""

    def on_round_over(self) -> None:
        """A round has ended, with or without a commit."""

    def tell(self, news: News) -> None:
        """There is news."""
