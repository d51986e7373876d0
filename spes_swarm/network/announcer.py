"""Publishes this peer's records in the DHT, and decides when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import islice

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.dht_records import RecordWriter
from spes_swarm.network.link.wire import FaultSink
from spes_swarm.network.run_state import RunState
from spes_swarm.port.messages import Presence
from spes_swarm.protocol.members.records import (
    MAX_DUTY_NOTES,
    MAX_PROVEN,
    MAX_ROUNDS,
    DutyNote,
    Lease,
    Progress,
    RecentFaults,
    RecentRounds,
    Record,
    Volunteer,
)
from spes_swarm.protocol.members.round_metrics import PeerMetrics, RoundFigures, telemetry_of
from spes_swarm.protocol.members.twin import TwinWatch

# A record of rounds is written this long after the last one, or sooner when rounds are so short that it would soon pass
# over some.
_ROUNDS_PAUSE_S = 1.0
_MANY_ROUNDS = MAX_ROUNDS // 4


@dataclass(eq=False)
class Announcer:
    """Writes this peer's records while its trainer is alive."""

    run_state: RunState  # its round, digest and experts are announced
    now: Callable[[], float]  # the swarm's time in Unix seconds
    on_fault: FaultSink  # called if no DHT node accepts a record
    presence: Presence | None = None  # what the trainer reported last
    presence_at: float = 0.0  # monotonic time of that report; the trainer reports after each step
    volunteering: tuple[bytes, bool] | None = None  # digest of the target (see election.py), and whether it publishes
    in_round: bool = False
    round_seconds: float = 0.0  # of the last round
    traffic: tuple[int, int] = (0, 0)  # payload bytes sent and received in the last round
    faults: RecentFaults = field(init=False)
    _rounds: RecentRounds = field(default_factory=RecentRounds, init=False)
    _twins: TwinWatch = field(init=False)
    _records: RecordWriter | None = field(default=None, init=False)
    _expires: dict[str, float] = field(default_factory=dict, init=False)
    _lease_expires: float = field(default=0.0, init=False)
    _lease_is_out: bool = field(default=False, init=False)
    _wanted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _last_beat: float = field(default_factory=time.monotonic, init=False)
    # Two records of a kind must arrive in the order of their expiration.
    _storing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self._config = self.run_state.run.round
        self._reference = self.run_state.reference
        self._leases = self.run_state.leases
        self.faults = RecentFaults(self.now)
        self._twins = TwinWatch(self._config.progress_ttl_s)

    def open(self, records: RecordWriter) -> None:
        """Sets where records are written; none are written before."""
        self._records = records

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step of this peer; 0 before its trainer has reported them."""
        return self.presence.tokens_per_step if self.presence is not None else 0

    def has_twin(self, records: Mapping[str, Progress]) -> bool:
        """Returns True if these records show that another process writes this peer's; see twin.py."""
        own = records.get(self.run_state.identity.peer_id)
        return own is not None and self._twins.read(own.expires, self.now())

    def beat(self) -> None:
        """Notes that the trainer is alive."""
        self._last_beat = time.monotonic()

    def announce_soon(self) -> None:
        """Makes an announcement due now."""
        self._wanted.set()

    def renew_lease_soon(self) -> None:
        """Includes the lease in the next announcement, since the experts held have changed."""
        self._lease_expires = 0.0

    def set_presence(self, presence: Presence) -> None:
        """Takes the trainer's report. A change of state or of the round's losses is announced at once."""
        known, self.presence, self.presence_at = self.presence, presence, time.monotonic()
        losses = presence.losses
        if losses is not None and (known is None or known.losses != losses):
            self._rounds.note(
                RoundFigures(
                    **asdict(losses),
                    time=self.now(),
                    tokens_per_second=presence.tokens_per_second,
                    round_seconds=self.round_seconds,
                )
            )
        if known is None or known.state != presence.state or known.losses != losses:
            self._wanted.set()

    def set_traffic(self, sent: int, received: int) -> None:
        """Sets the payload bytes of the last round, and announces them."""
        self.traffic = sent, received
        self._rounds.note_traffic(self._reference.round, sent)
        self._wanted.set()

    def learn_swarm_tokens(self) -> None:
        """Adopts the token count that others report for the reference's round, if this peer has missed commits.

        Does nothing during a round.
        """
        if not self.in_round:
            roster = self.run_state.roster
            self.run_state.swarm_tokens.learn(roster.swarm_tokens(self._reference.round), alone=not roster.present())

    def has_contributed(self, tokens: int) -> None:
        """Subtracts tokens that went into a commit from this peer's count.

        Other peers may ask or read before the trainer's next report, and contributed tokens no longer count.
        """
        if self.presence is not None:
            self.presence = replace(self.presence, tokens=max(0, self.presence.tokens - tokens))

    async def announce(self) -> None:
        """Waits until an announcement is due, then writes the records."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wanted.wait(), self._config.progress_ttl_s / 5)
        self._wanted.clear()
        if time.monotonic() - self._last_beat > self._config.stall_timeout_s:
            return  # the trainer is stopped (Ctrl-Z): other peers must not wait for this one in every round
        await self.publish_progress()
        await self._volunteer()
        if self._rounds_are_due():
            await self._publish_rounds()
        due = self.now() > self._lease_expires - 2 * self._config.lease_s / 3
        if due and (self._leases.held or self._lease_is_out):  # an empty lease releases experts that were lost
            await self.publish_lease()

    async def publish_progress(self) -> None:
        """Writes the progress record now, if the trainer has reported yet."""
        async with self._storing:
            if self.presence is not None:
                await self._store("progress", self._progress(self.presence))

    def _progress(self, presence: Presence) -> Progress:
        expires = self._next_expiration("progress", self._config.progress_ttl_s)
        self._twins.wrote(expires, self.now())
        routing, exclusions = presence.routing, self.run_state.tracks.conduct.exclusions
        # If not all fit, former members come before strangers, and the newest before others.
        is_member = self.run_state.roster.reputation.is_member
        proven = sorted(exclusions.culprits, key=is_member)[-MAX_PROVEN:]
        return Progress(
            expires=expires,
            name=presence.name,
            state=presence.state,
            reachable=self.run_state.reachable,
            round=self._reference.round,
            digest=self._reference.digest,
            tokens=presence.tokens,
            tokens_per_step=presence.tokens_per_step,
            tokens_per_second=presence.tokens_per_second,
            experts=list(presence.experts),
            swarm_tokens=self.run_state.swarm_tokens.published_count,
            data=list(presence.data),
            dead=list(routing.dead) if routing.num_dead is not None else None,
            admission=self.run_state.settings.admission,
            proven=proven,
            proven_in=[exclusions.lie_of(peer_id) for peer_id in proven],
            without_duty=self._duty_notes(),
            in_round=self.in_round,
            expert_loads=routing.loads,
            faults=self.faults.notes(),
            telemetry=telemetry_of(
                PeerMetrics(
                    step=presence.step,
                    loss=presence.loss,
                    total_tokens=presence.total_tokens,
                    bytes_sent=self.traffic[0],
                    bytes_received=self.traffic[1],
                    round_seconds=self.round_seconds,
                )
            ),
        )

    def _duty_notes(self) -> list[DutyNote]:
        run = self.run_state
        reference, doubts = run.reference, run.tracks.conduct.doubts
        return [
            DutyNote(peer=peer_id, since=since, kinds=list(doubts(peer_id, reference.round))[:2])
            for peer_id, since in islice(run.roster.reputation.without_duty.items(), MAX_DUTY_NOTES)
        ]

    async def _volunteer(self) -> None:
        if self.volunteering is not None:
            target, publishing = self.volunteering
            expires = self._next_expiration("publishers", self._config.progress_ttl_s)
            await self._store("publishers", Volunteer(expires=expires, target=target, publishing=publishing))

    def _rounds_are_due(self) -> bool:
        """Returns True if many rounds are new, or any and the last record has become old."""
        lifetime_s = self._config.lease_s
        age_s = self.now() + lifetime_s - self._expires.get("rounds", 0.0)
        due_s = _ROUNDS_PAUSE_S if self._rounds.changed else 2 * lifetime_s / 3
        return age_s >= due_s or self._rounds.num_new >= _MANY_ROUNDS

    async def _publish_rounds(self) -> None:
        # As long-lived as a lease: a peer that is killed leaves its report behind.
        record = self._rounds.record(self._next_expiration("rounds", self._config.lease_s))
        if record is not None:
            await self._store("rounds", record)

    async def publish_lease(self) -> None:
        """Writes the lease on the experts held now."""
        async with self._storing:
            self._lease_is_out = bool(self._leases.held)
            self._lease_expires = self._next_expiration("leases", self._config.lease_s)
            await self._store(
                "leases",
                Lease(expires=self._lease_expires, experts=list(self._leases.held), since_round=self._reference.round),
            )

    async def say_goodbye(self) -> None:
        """Releases the lease, if there is one, and announces that this peer is leaving."""
        self._leases.held = ()
        if self._lease_is_out:
            await self.publish_lease()
        if self.presence is not None:
            self.presence = replace(self.presence, state="leaving", experts=())
            await self.publish_progress()
        await self._publish_rounds()  # even if nothing is new: the last report may have been cancelled on its way

    def _next_expiration(self, kind: str, lifetime_s: float) -> float:
        # The DHT keeps the record that expires last, so a newer one must always expire later.
        self._expires[kind] = max(self.now() + lifetime_s, self._expires.get(kind, 0.0) + 0.001)
        return self._expires[kind]

    async def _store(self, kind: str, record: Record) -> None:
        if self._records is None:
            return
        try:
            stored = await self._records.publish(kind, record)
        except OSError as exc:
            stored, reason = False, str(exc)
        else:
            reason = "no DHT node accepted the record"
        if not stored:
            self.on_fault(self.run_state.identity.peer_id, ProtocolError("dht", reason))
