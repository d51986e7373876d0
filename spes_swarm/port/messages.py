"""The messages between the trainer and the network process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import SwarmError
from spes_swarm.config.manifest import Manifest
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.members.records import State
from spes_swarm.protocol.members.round_metrics import RoundMetrics
from spes_swarm.protocol.members.routing_report import NOTHING_REPORTED, RoutingReport
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.protocol.rounds.outcome import CommitReport


@dataclass(frozen=True, kw_only=True)
class MeasuredRound(RoundMetrics):
    """What this peer knows of a committed round."""

    round: int
    peers: int = 0  # members of the commit
    experts_covered: int = 0
    swarm_tokens: int = 0  # of all peers, in all commits up to this one


@dataclass(frozen=True, kw_only=True)
class Presence:
    """What this peer announces about itself."""

    name: str
    state: State
    step: int
    tokens: int
    tokens_per_step: int
    tokens_per_second: float
    loss: float | None
    experts: tuple[int, ...]
    total_tokens: int = 0  # tokens that this peer has trained on in the run
    losses: MeasuredRound | None = None  # of its last round
    data: tuple[int, ...] = ()  # its position in each data set that the peers divide; see data/streaming/pieces.py
    routing: RoutingReport = NOTHING_REPORTED


@dataclass(frozen=True)
class SwarmView:
    """What the trainer needs to know about the other peers; sent to it once a second."""

    num_peers: int  # other peers with a live record that answer calls
    num_ready: int  # of those, how many have a reference and train or wait for others
    num_training: int  # of those, how many train
    # From the electorate alone, up to swarm_round; see protocol/members/reputation.py.
    tokens_per_step: int  # sum over the peers that train
    tokens: float  # estimate of what they have processed since the last commit, at `at`
    tokens_per_second: float  # their total speed
    at: float  # monotonic time (the same clock in both processes)
    swarm_round: int
    experts_covered: int
    ready: tuple[str, ...] = ()  # the peers counted in num_ready
    # The furthest position of any peer of the electorate in each data set that the peers divide.
    data: tuple[int, ...] = ()
    # How many periods a round is overdue before this peer publishes it; see protocol/members/election.py.
    publishing_periods: int = 0
    # How many of the electorate have judged their experts, and how many call each dead; see members/routing_report.py.
    routing_reports: int = 0
    dead_votes: Mapping[int, int] = field(default_factory=dict)
    # Peers against which this peer has proofs, and those that most of its last group doubt.
    excluded: tuple[str, ...] = ()
    without_duty: tuple[str, ...] = ()
    out: str | None = None  # why this peer may no longer take part in the run; None: it may


@dataclass(frozen=True)
class TokenCounts:
    """What the other peers have processed since the last commit."""

    tokens: int  # in total, in finished steps
    steps: tuple[float, ...]  # finished inner steps of each peer
    begun: float = 0.0  # estimate of their tokens in the steps that they were taking at `at`
    tokens_per_second: float = 0.0  # their total speed in these steps
    at: float = 0.0  # monotonic time (the same clock in both processes)
    behind: bool = False  # most of them have committed a round that this peer has not
    called: bool = False  # this peer is a newcomer, and one of its initial peers is gathering for a round


@dataclass(frozen=True)
class RoundReport:
    """A committed round as the trainer sees it."""

    commit: CommitReport
    group_seconds: float
    exchange_seconds: float
    digest: str
    experts: ExpertChange
    swarm_tokens: int  # of all peers, in all commits up to this one


@dataclass(frozen=True, kw_only=True)
class CaughtUp:
    """In place of a round: this peer's reference was too far from the swarm's and has been fetched again.

    The contribution now holds the new values of the live weights.
    """

    round: int
    why: str
    seconds: float
    payload_bytes: int
    complete: bool  # False: part of it is still the old one, and the next round heals it


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What the network process needs to know about a run and this peer."""

    manifest: Manifest
    layout: Layout
    reference_fd: int
    contribution_fd: int
    previous_fd: int | None  # room for a reference and a contribution; None: nothing is kept to take commits back
    trainer_pid: int
    client_mode: bool
    bandwidth_mbps: float
    initial_peers: tuple[str, ...]
    known_peers: tuple[str, ...] = ()  # addresses of an earlier session, from which nobody has answered yet
    upload_mbps: float | None = None  # declared by the user; transfers to newcomers stay below it
    num_threads: int | None = None  # for what exchanges compute; None: a few
    admission: bytes = b""  # of this peer; see protocol/admission/grants.py
    acts: Path | None = None  # the file of acts; see storage/acts_file.py
    proofs: Path | None = None  # the folder of proofs; see storage/proofs.py
    track_records: Path | None = None  # what is remembered of other peers; see storage/track_record_file.py
    tokenizer: Path | None = None  # packed files that other peers can ask for (data/run_tokenizer.py)


@dataclass
class TransferReport:
    """Report of a download. payload_bytes = bytes kept + refetched_bytes + superseded_bytes."""

    round: int
    digest: str = ""  # of the adopted reference, in hex
    payload_bytes: int = 0  # all that donors have sent, including discarded bytes
    refetched_bytes: int = 0  # of that, discarded: unfinished chunks of failed donors, duplicates, corrupt chunks
    superseded_bytes: int = 0  # of that, verified and kept until the swarm changed those chunks
    resumed_bytes: int = 0  # verified chunks of an earlier attempt, from disk
    outdated_blocks: int = 0  # blocks that differ from the last vote: the swarm commits faster than they arrive
    chunks_by_donor: Counter[str] = field(default_factory=Counter)
    moved_on: Counter[str] = field(default_factory=Counter)  # chunks that a donor no longer had when asked


@dataclass(frozen=True, slots=True)
class Command:
    """A command to the network process."""

    number: int  # the reply has the same number
    name: str  # a method of port.commands.Commands
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """The outcome of a command."""

    number: int
    result: Any = None
    error: SwarmError | None = None
