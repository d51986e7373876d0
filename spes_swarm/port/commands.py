"""The port between a peer's trainer and its network process.

`Commands` lists what the network process does for the trainer, one coroutine each. A trainer names a command by its
function, never by a string, so that mypy checks arguments (which are keywords) and results on both sides:

    counts = port.ask(Commands.count_tokens, 30.0)
    future = port.submit(Commands.run_round, tokens=512, routed=(128,), leaving=False)  # Future[RoundReport | CaughtUp]

The other direction is `Notification`: what the network process reports unprompted.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.metrics import events
from spes_swarm.port.messages import (
    CaughtUp,
    Presence,
    RoundReport,
    RunSettings,
    SwarmView,
    TokenCounts,
    TransferReport,
)
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import ReferenceTable

# How long a joining peer waits for the answer to a command; none of these waits for a round.
COMMAND_TIMEOUT_S = 120.0

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


class ProcessCommands(Protocol):
    """Commands that need no open run; see network.process.NetworkProcess."""

    async def start_daemon(
        self,
        *,
        host_maddrs: list[str],
        announce_maddrs: list[str],
        client_mode: bool,
        relay: bool,
        private: bool = False,
    ) -> list[str]:
        """Starts p2pd, replacing a running one; returns this peer's addresses."""

    async def bootstrap(self, *, maddrs: list[str], timeout_s: float) -> list[str]:
        """Connects to the initial peers; see network.transport.daemon.bootstrap.

        Raises:
            BootstrapError: none of them could be reached.
        """

    async def fetch_manifest(
        self, *, peers: list[str], run_id: str | None, timeout_s: float, admission: bytes = b""
    ) -> Manifest:
        """Asks peers for the manifest of the run they take part in, and shows them an admission to it.

        Raises:
            BootstrapError: none of them takes part in a run yet.
            InvitationError: the run is private, and they do not admit this peer.
            VersionError: one of them speaks another major version of the protocol, and no other has a manifest.
            ManifestError: what they sent fails verification.
        """

    async def fetch_tokenizer(self, *, peers: list[str], digest: str) -> bytes | None:
        """Asks peers for the packed files of the run's tokenizer; returns None if nobody has those of `digest`."""

    async def check_reach(self) -> events.Reach:
        """Asks connected peers whether they can open connections to this one; see network/link/reach.py."""

    async def open_run(self, *, settings: RunSettings, review_reach: bool) -> None:
        """Joins the run's DHT and starts its services on the shared vectors of `settings`.

        With `review_reach`, this peer's reachability is checked again from time to time.
        """

    async def beat(self) -> None:
        """Heartbeat of the trainer: without it for a while, the peer counts as gone (see network/announcer.py)."""

    async def stop(self) -> None:
        """Leaves the run: releases the leases, announces the departure, stops the daemon."""


class RunCommands(Protocol):
    """Commands that need an open run; see network.run_commands.RunCommandHandler."""

    # The reference.

    async def adopt(
        self, *, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int = 0
    ) -> str:
        """Declares the shared reference (initial weights, a checkpoint, a publication) complete; returns its digest."""

    async def download(self, *, if_newer: bool, partial: Path | None = None) -> TransferReport | None:
        """Fetches the reference from the other peers, with `if_newer` only a newer one; returns None if there is none.

        `partial` is a file that keeps verified chunks in case this peer is killed; see Transfer.download.

        Raises:
            TransferError: no peer delivers it.
        """

    async def swarm_table(self) -> ReferenceTable | None:
        """Returns the table of the reference that most other peers have; None if no peer answers."""

    async def table(self) -> ReferenceTable:
        """Returns the table of this peer's reference."""

    async def lineage(self) -> tuple[list[int], bytes]:
        """Returns rounds and marks of the commits that led to the reference; see protocol/consensus/lineage.py."""

    async def swarm_tokens(self) -> int:
        """Returns the tokens of all peers in the commits up to this peer's reference."""

    # Other peers.

    async def peer_maddrs(self) -> list[str]:
        """Returns addresses of the other peers of the run that this peer is connected to."""

    async def view(self) -> SwarmView:
        """Reads the records of the other peers now."""

    async def count_tokens(self) -> TokenCounts:
        """Asks the other peers directly how many tokens they have processed since the last commit."""

    async def set_presence(self, *, presence: Presence) -> None:
        """Updates what this peer announces about itself."""

    async def volunteer(self, *, target: bytes | None, publishing: bool) -> None:
        """Announces that this peer volunteers to publish (or is publishing) to the place with the digest `target`; None
        withdraws. See protocol/members/election.py.
        """

    # Experts.

    async def claim(self, *, experts: tuple[int, ...] | int, room: int, fixed: bool) -> tuple[int, ...]:
        """Takes leases on these experts, or on that many chosen by the rules; returns the experts held.

        `room` is the most that this peer can hold. `fixed`: the user chose the experts, which must not change later.
        """

    # Rounds.

    async def run_round(
        self, *, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport | CaughtUp:
        """Holds a round with the contribution in shared memory, the tokens processed since the last commit and those
        routed to each expert held since its last synchronisation. `leaving`: it is this peer's last round. `loss_rose`:
        since the last commit, None if this peer cannot tell.

        Raises:
            RoundError: nothing was committed; the reference and the contribution are unchanged.
            TransferError: the run has ended without this peer, and nobody delivers its last reference.
        """

    async def cancel_round(self) -> None:
        """Cancels the round that is under way, if any; afterwards the reference no longer changes."""

    async def traffic(self) -> tuple[int, int]:
        """Returns payload bytes (sent, received) of the last round, once others have fetched their results here."""


class Commands(ProcessCommands, RunCommands, Protocol):
    """All commands.

    Each may raise its own SwarmError; a run command raises NetworkProcessError if no run is open.
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
        """Sends a method of Commands with its arguments, and waits for at most `wait_s` (None: no limit).

        Raises:
            NetworkProcessError: the network process has ended, or did not answer within `wait_s`.
            SwarmError: whatever the command raised.
        """


class Port(Protocol):
    """The network process as the trainer sees it."""

    @property
    def view(self) -> SwarmView | None:
        """The latest view of the other peers; None before the first one. After a round it is no older than its end."""

    @property
    def called_round(self) -> int:
        """The newest round that a leader has called; 0 before the first one."""

    def submit(
        self,
        command: Callable[Concatenate[Commands, _Args], Coroutine[Any, Any, _Result]],
        /,
        *args: _Args.args,
        **kwargs: _Args.kwargs,
    ) -> Future[_Result]:
        """Sends a command without blocking; the future carries its result or exception.

        Raises:
            NetworkProcessError: the network process has ended, or has read no command for a long time.
        """

    @property
    def ask(self) -> Ask:
        """Sends a command and waits for its result."""


@dataclass(frozen=True)
class Called:
    """A leader has called a round."""

    round: int


Notification: TypeAlias = events.Event | SwarmView | Called
"""All that the network process reports to the trainer unprompted."""


class Listener(Protocol):
    """Receives what happens in a run: the trainer, through the network process's pipe."""

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """A peer did something wrong, or an operation with it failed."""

    def on_round_over(self) -> None:
        """A round has ended, with or without a commit."""

    def report(self, why: str) -> None:
        """A round went wrong: what the network process is doing goes to the log."""

    def notify(self, notification: Notification) -> None:
        """Passes on a message."""
