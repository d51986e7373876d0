"""What the trainer and the network process tell each other about a run."""

from __future__ import annotations

import ipaddress
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.config.manifest import Manifest
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.members.records import State
from spes_swarm.protocol.ownership.leases import Reassignment
from spes_swarm.protocol.rounds.round_state import CommitReport


@dataclass(frozen=True, kw_only=True)
class RoundLosses:
    """How good the model was in a committed round."""

    round: int
    train_loss: float | None  # mean over the steps that went into it
    eval_loss: float | None  # None: not evaluated
    eval_loss_stderr: float | None  # its standard error


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What the trainer wants others to know about this peer."""

    name: str
    state: State
    step: int
    tokens: int
    tokens_per_step: int
    tokens_per_second: float
    loss: float | None
    experts: tuple[int, ...]
    total_tokens: int = 0  # that this peer has trained on in the run
    losses: RoundLosses | None = None  # of its last round


@dataclass(frozen=True)
class SwarmView:
    """What the trainer needs to know about the others; sent to it once a second."""

    num_peers: int  # the others with a live record that answer calls
    num_ready: int  # of those, how many have a reference and train or wait for others
    num_training: int  # of those, how many train
    # These follow voices alone; see standing.py.
    tokens_per_step: int  # sum over the others that train
    tokens: float  # estimate of what they have processed since the last commit, at `at`
    tokens_per_second: float  # their speed together
    at: float  # monotonic time (the same clock in both processes)
    swarm_round: int
    experts_covered: int
    publishing_periods: int = 0  # a round may be overdue before it is for this peer to publish it; see election.py


@dataclass(frozen=True)
class TokenCounts:
    """What the others have processed since the last commit."""

    tokens: int  # together
    steps: tuple[float, ...]  # each of them
    behind: bool = False  # most of them have committed a round that this peer has not
    called: bool = False  # this peer is a newcomer, and one that it was told to join is on its way to a round


@dataclass(frozen=True)
class RoundReport:
    """A committed round as the trainer sees it."""

    commit: CommitReport
    group_seconds: float
    exchange_seconds: float
    digest: str
    experts: Reassignment
    swarm_tokens: int  # of all peers, that have gone into commits until this one


@dataclass(frozen=True, kw_only=True)
class CaughtUp:
    """In place of a round: this peer's reference was too far from the swarm's, and has been fetched anew.

    The contribution has become what the live weights have to be.
    """

    round: int
    why: str
    seconds: float
    payload_bytes: int
    complete: bool  # otherwise a part of it is still the old one, and the next round heals it


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the network process needs to know of a run and of this peer."""

    manifest: Manifest
    layout: Layout
    reference_fd: int
    contribution_fd: int
    trainer_pid: int
    client_mode: bool
    bandwidth_mbps: float
    initial_peers: tuple[str, ...]
    upload_mbps: float | None = None  # as declared by the user; transfers to newcomers keep within it


@dataclass(frozen=True)
class Reach:
    """What is known about whether this peer can be reached."""

    metric: ClassVar[str] = "reach"
    reachable: bool | None  # None: nobody could tell
    address: str | None  # where it was tried
    via: tuple[str, ...]  # the peers that tried

    def describe(self) -> list[str]:
        """What the user should know; nothing where there is no news, as for peers on one machine."""
        endpoint = None if self.address is None else tcp_endpoint(self.address)
        if endpoint is None or ipaddress.ip_address(endpoint[0]).is_loopback:
            return []
        asked = f"{len(self.via)} peer" + ("s" if len(self.via) > 1 else "")
        if self.reachable:
            return [f"reachable at {self.address} (tried by {asked})"]
        host, port = endpoint
        return [
            f"not reachable from outside: {host} takes no connections on TCP port {port} (tried by {asked}); taking "
            "part as a client, whose parts others average",
            f"to be reachable, open TCP port {port} in the router or firewall (--host-maddrs chooses the port), or use "
            "--announce-maddrs",
        ]


UNKNOWN = Reach(None, None, ())


@dataclass
class TransferReport:
    """How a download went. payload_bytes = what was kept + refetched_bytes + superseded_bytes."""

    round: int
    digest: str = ""  # of what was adopted, in hex
    payload_bytes: int = 0  # all that donors have sent, including what was thrown away
    refetched_bytes: int = 0  # of that, thrown away: unfinished chunks of failed donors, duplicates, lies
    superseded_bytes: int = 0  # of that, verified and kept until the swarm had changed them
    resumed_bytes: int = 0  # verified chunks of an earlier attempt, from disk
    outdated_blocks: int = 0  # blocks that are not as in the last vote: the swarm commits faster than they arrive
    chunks_by_donor: Counter[str] = field(default_factory=Counter)
    moved_on: Counter[str] = field(default_factory=Counter)  # chunks that a donor had changed before it was asked


@dataclass(frozen=True)
class SyncProgress:
    """How far a download is."""

    metric: ClassVar[str] = "sync_progress"
    round: int
    done_bytes: int  # in place and verified
    total_bytes: int
    payload_bytes: int
    chunks_by_donor: dict[str, int]


@dataclass(frozen=True, slots=True)
class Received:
    """One expert's moments as they arrived."""

    peer_id: str
    step: int  # of the giver's optimiser
    digest: str  # hex BLAKE3 of the values
