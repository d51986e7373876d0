"""State shared by the services of one run.

Shape: N elements of the flat vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from spes_swarm.base.address import peer_id_of
from spes_swarm.base.arrays import FloatArray, attach_from
from spes_swarm.config.run import RunConfig
from spes_swarm.port.messages import RunSettings
from spes_swarm.protocol.admission.exclusion import Exclusions
from spes_swarm.protocol.averaging.commitments import SigningKey
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.members.roster import Roster
from spes_swarm.protocol.members.swarm_tokens import SwarmTokens
from spes_swarm.protocol.ownership.lease_table import Leases
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.taking_back import Previous
from spes_swarm.protocol.rounds.track_record import TrackRecords


@dataclass(kw_only=True)
class RunState:
    """This peer's state in one run. Only rounds and downloads change the reference."""

    settings: RunSettings
    identity: Identity
    initial_peers: frozenset[str]  # ids of the initial peers, other than this one
    reference: Reference
    contribution_N: FloatArray  # shared with the trainer
    previous: Previous  # for taking back the last commit
    roster: Roster
    leases: Leases
    reachable: bool  # others can connect to this peer; otherwise it leads no rounds. May change at any time
    key: SigningKey = field(default_factory=SigningKey.generate)  # of what this process sends in exchanges
    tracks: TrackRecords = field(default_factory=TrackRecords)
    lineage: Lineage = field(default_factory=lambda: Lineage({}))
    replaced_lineage: Lineage = field(default_factory=lambda: Lineage({}))  # by a download; until a commit
    swarm_tokens: SwarmTokens = field(default_factory=SwarmTokens)
    group: frozenset[str] = frozenset()  # the members of the last group, which may be exchanging still
    ahead: int = 0  # the round that other peers gather for, if it is beyond this peer's next one

    @classmethod
    def of(
        cls, identity: Identity, settings: RunSettings, admits: Callable[[str], bool], exclusions: Exclusions
    ) -> Self:
        """Creates the initial state on the trainer's shared vectors. `admits` says which peers may take part."""
        run, layout, me = settings.manifest.run, settings.layout, identity.peer_id
        initial_peers = frozenset(map(peer_id_of, settings.initial_peers)) - {me}
        rotate_every, expert_every = run.ownership.rotate_every_rounds, run.round.expert_every
        rules = Rules(run.ownership.replicas, rotate_every, run.most_experts, expert_every)
        values_N = attach_from(settings.trainer_pid, settings.reference_fd, layout.num_elements)
        reputation, previous = Reputation(initial_peers), Previous()
        if settings.previous_fd is not None:
            both_N = attach_from(settings.trainer_pid, settings.previous_fd, 2 * layout.num_elements)
            previous = Previous(both_N[: layout.num_elements], both_N[layout.num_elements :])
        tracks = TrackRecords()
        tracks.conduct.exclusions = exclusions
        return cls(
            settings=settings,
            identity=identity,
            initial_peers=initial_peers,
            reference=Reference(layout, values_N),
            contribution_N=attach_from(settings.trainer_pid, settings.contribution_fd, layout.num_elements),
            previous=previous,
            roster=Roster(me, run.round.progress_ttl_s, reputation, admits=admits),
            leases=Leases(me, layout.num_experts, rules, run.round.lease_s, reputation),
            reachable=not settings.client_mode,
            tracks=tracks,
        )

    def is_member(self, peer_id: str) -> bool:
        """Returns True if slots and upload are reserved for a peer, if only for the exchange that it takes part in."""
        return peer_id in self.group or self.roster.reputation.reserves_for(peer_id)

    def target_round(self) -> int:
        """Returns the round that this peer wants to commit next."""
        return max(self.roster.swarm_round(self.reference.round) + 1, self.ahead)

    def note_ahead(self, round_number: int) -> None:
        """Notes that others gather for a round, at most one beyond this peer's next one.

        Calls prove nothing, and must not drive the round number.
        """
        if round_number <= self.reference.round + 2:
            self.ahead = round_number

    @cached_property
    def certificate(self) -> bytes:
        """Shows that `key` is this peer's."""
        return self.key.certificate(self.identity, self.run_id)

    @property
    def run(self) -> RunConfig:
        """The run's swarm-wide settings."""
        return self.settings.manifest.run

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.settings.manifest.run_id
