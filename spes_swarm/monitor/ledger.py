"""Turns verified records into the state of a run: present peers, their progress, and whether they agree. No I/O.

Remote clocks are trusted as little as possible: what counts is when a version of a record was first seen here. Claims
are clamped before they are added up, and the swarm's round is the upper median of the claims, not the maximum. A
signature does not make a claim true: each claim is shown next to the name of the peer that makes it.

Times: `now` is the swarm's time in Unix seconds, `at` is this machine's monotonic clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from statistics import median, median_high
from typing import Any, Final

from spes_swarm.base.names import clean_name
from spes_swarm.config.round_clock import RoundClock
from spes_swarm.monitor.accusations import Accusations, Evidence
from spes_swarm.monitor.aggregates import FORGOTTEN, Known, RoundAggregate, bounded, clamped, count, superfluous
from spes_swarm.monitor.state import (
    Consensus,
    ExpertState,
    Fault,
    HistoryPoint,
    PeerActivity,
    PeerState,
    RefusalKind,
    RunInfo,
    Status,
    SwarmState,
    newest_metrics,
    short_id,
)
from spes_swarm.protocol.members.records import MAX_ROUNDS, Lease, Progress, Rounds
from spes_swarm.protocol.members.round_metrics import RoundFigures, known_median, metrics_of
from spes_swarm.protocol.members.routing_report import count_claims, dead_by_majority, unpacked_load

# Reports count for rounds at most this far from the swarm's.
_WINDOW: Final = MAX_ROUNDS
# A peer this many rounds behind is late; one round can be a delayed report.
_LATE_ROUNDS: Final = 2
_MAX_FAULTS: Final = 50
_FAULT_AGE_S: Final = 24 * 3600.0
# Departed peers whose newest record is remembered, so that a replay of it is not taken for a new one.
_MAX_GONE: Final = 20_000
MAX_POINTS: Final = 20_000


@dataclass
class _Sighting:
    """The newest record of a present peer."""

    progress: Progress
    name: str
    seen_at: float  # monotonic clock; when this version was written, as estimated

    @property
    def is_active(self) -> bool:
        """True if it takes part in rounds or waits for others to begin: its reference should match the swarm's."""
        return self.progress.state in ("training", "waiting")

    def age_s(self, at: float) -> float:
        return max(0.0, at - self.seen_at)


@dataclass
class Ledger:
    """Builds the state of one run from records."""

    run: RunInfo
    progress_ttl_s: float  # how long a peer counts as present without a new record
    known: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self.round = self.known.round
        self._clock = RoundClock(self.run.inner_steps, self.run.inner_steps_later)
        self._peers: dict[str, _Sighting] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()  # peer -> expiration of its last record
        self._leases: dict[str, Lease] = {}
        self._reports: dict[str, tuple[Rounds, list[RoundFigures]]] = {}
        self._began_in: int | None = None  # the round of the first read
        self._evaluated: dict[str, Any] = {"eval_round": 0}  # the last evaluation before that
        self._tokens = dict(self.known.tokens)
        self._names = dict(self.known.names)
        self._points = {point.round: point for point in self.known.points}
        self._changed: set[int] = set()  # rounds whose points were written or removed since `take_changes`
        self._aggregates: dict[int, RoundAggregate] = {}
        self._trained_in = dict(self.known.trained_in)  # expert -> round
        self._faults = dict.fromkeys(self.known.faults)
        self.accusations = Accusations(self.known.excluded, self.known.without_duty)
        self.proven: Mapping[str, Evidence] = {}  # by culprit; set by the owner
        self._alive_at = self.known.alive_at  # swarm time of the newest record of any peer
        self._taken_at: float | None = None

    # Input.

    def update(
        self,
        now: float,
        at: float,
        progress: Mapping[str, Progress],
        leases: Mapping[str, Lease],
        rounds: Mapping[str, Rounds],
    ) -> None:
        """Takes in the records of one read of the DHT; a record missing from it is kept until it expires."""
        for peer_id, record in progress.items():
            self._see(peer_id, record, now, at)
        for peer_id, sighting in list(self._peers.items()):
            if sighting.age_s(at) > self.progress_ttl_s or sighting.progress.expires <= now:
                self._lose(peer_id)
        self._leases = {
            peer: lease for peer, lease in {**self._leases, **leases}.items() if lease.expires > now and lease.experts
        }
        for peer_id, reported in rounds.items():
            known = self._reports.get(peer_id)
            if known is None or reported.expires > known[0].expires:
                self._reports[peer_id] = reported, reported.reports()
        self._reports = {peer: known for peer, known in self._reports.items() if known[0].expires > now}
        self._taken_at = at
        if self._peers:
            self._alive_at = now - min(sighting.age_s(at) for sighting in self._peers.values())
        committed = [s.progress.round for s in self._participants(at)]
        if committed:
            self.round = median_high(committed)  # as peers compute it: Roster.median_round
            if self._began_in is None:
                self._began_in = self.round
        self._aggregate_rounds(now, at)
        self._note_evaluation()
        electorate = {p: s.progress for p, s in self._peers.items() if self._participates(s, at)}
        self.accusations.update(now, electorate, self._names, self.proven)

    def _see(self, peer_id: str, record: Progress, now: float, at: float) -> None:
        known = self._peers.get(peer_id)
        if record.expires <= (known.progress.expires if known else self._gone.get(peer_id, 0.0)):
            return  # the same or an older one: a replayed record does not bring a departed peer back
        # Its expiration gives its age, at most the time since the last read, which would have found an older one.
        longest_s = at - self._taken_at if known and self._taken_at is not None else self.progress_ttl_s
        age_s = min(max(0.0, now - (record.expires - self.progress_ttl_s)), longest_s)
        self._peers[peer_id] = _Sighting(progress=record, name=clean_name(record.name), seen_at=at - age_s)
        self._names[peer_id] = self._peers[peer_id].name
        # A peer that went back to a checkpoint reports fewer tokens, but has trained on the others, too.
        self._tokens[peer_id] = max(self._tokens.pop(peer_id, 0), record.metrics.total_tokens)
        for note in record.faults:
            if now - note.at < _FAULT_AGE_S:
                self._faults[Fault(time=min(note.at, now), peer_id=peer_id, kind=note.kind)] = None
        if len(self._faults) > 2 * _MAX_FAULTS:
            self._faults = dict.fromkeys(self._newest_faults())

    def _lose(self, peer_id: str) -> None:
        self._gone[peer_id] = self._peers.pop(peer_id).progress.expires
        self._gone.move_to_end(peer_id)
        while len(self._gone) > _MAX_GONE:
            forgotten, _ = self._gone.popitem(last=False)
            self._names.pop(forgotten, None)
            self._tokens[FORGOTTEN] = count(self._tokens.get(FORGOTTEN, 0) + self._tokens.pop(forgotten, 0))

    def _newest_faults(self) -> list[Fault]:
        return sorted(self._faults, key=lambda fault: (fault.time, fault.peer_id, fault.kind))[-_MAX_FAULTS:]

    def _participants(self, at: float) -> list[_Sighting]:
        """Peers that take part in rounds or wait for others to begin, and are not late."""
        return [s for s in self._peers.values() if self._participates(s, at)]

    def _participates(self, seen: _Sighting, at: float) -> bool:
        return seen.is_active and seen.age_s(at) <= self.progress_ttl_s / 2

    def _aggregate_rounds(self, now: float, at: float) -> None:
        for number in [n for n, aggregate in self._aggregates.items() if abs(n - self.round) > _WINDOW]:
            aggregate = self._aggregates[number]
            # One from before the first read may wait for a member to be late.
            is_past = number < (self._began_in or 0) and now - aggregate.first_seen > 2 * self.progress_ttl_s
            if number > self.round or aggregate.is_written or is_past:
                del self._aggregates[number]
        for peer_id, sighting in self._peers.items():
            progress = sighting.progress
            if not (sighting.is_active or progress.state == "leaving") or abs(progress.round - self.round) > _WINDOW:
                continue
            aggregate = self._aggregates.setdefault(progress.round, RoundAggregate(progress.round, now))
            aggregate.enter(peer_id, progress)
            if progress.round <= self.round:
                for expert in progress.experts:
                    if expert < self.run.num_experts:
                        self._trained_in[expert] = max(self._trained_in.get(expert, 0), progress.round)
        for peer_id, (_, reports) in self._reports.items():
            for figures in reports:
                if abs(figures.round - self.round) <= _WINDOW or figures.round in self._aggregates:
                    aggregate = self._aggregates.setdefault(figures.round, RoundAggregate(figures.round, now))
                    aggregate.reports[peer_id] = figures
        for number in sorted(self._aggregates):
            aggregate = self._aggregates[number]
            if 0 < number <= self.round:
                if number == self.round or aggregate.tokens is None:
                    aggregate.tokens = self.tokens_total
                if self._is_final(aggregate, now, at):
                    self._write(aggregate.point(self.run.num_experts, now))
                    aggregate.is_written = True
                elif self._began_in is not None and number >= self._began_in:
                    break  # rounds appear in their order
        if len(self._points) > MAX_POINTS:
            for number in superfluous(self._points):
                del self._points[number]
                self._changed.add(number)

    def _note_evaluation(self) -> None:
        """Remembers the last evaluation that most peers report from before the first read."""
        last = [next((r for r in reversed(of) if r.eval_loss is not None), None) for _, of in self._reports.values()]
        known = [report for report in last if report is not None and report.round < (self._began_in or 0)]
        number = median_high([report.round for report in known]) if known else 0
        if number > self._evaluated["eval_round"]:
            same = [report for report in known if report.round == number]
            for name in ("eval_loss", "eval_loss_stderr"):
                values = [value for report in same if (value := getattr(report, name)) is not None]
                self._evaluated[name] = clamped(known_median(values))
            self._evaluated["eval_round"] = count(number)

    def _is_final(self, aggregate: RoundAggregate, now: float, at: float) -> bool:
        """Returns True if no more reports of a round are to be expected.

        If some never come, what is there counts. Of a round from before the first read, a monitor that was there may
        have seen more, unless as many peers as are missing have a record of rounds that ends before it: they are
        then taken to have been killed before they reported it.
        """
        num_present = len(self._participants(at))
        if aggregate.is_complete(num_present):
            return True
        if self._began_in is None:
            return False
        if aggregate.number < self._began_in:
            num_ended = sum(reports[-1].round < aggregate.number for _, reports in self._reports.values())
            if not aggregate.is_complete(num_present, num_ended):
                return False
        is_old = now - aggregate.first_seen > self.progress_ttl_s
        return not any(self._may_report(aggregate, peer_id, seen, at, is_old) for peer_id, seen in self._peers.items())

    def _may_report(self, aggregate: RoundAggregate, peer_id: str, seen: _Sighting, at: float, is_old: bool) -> bool:
        """Returns True if a present peer may still report a round: it has not got that far, or still evaluates."""
        behind = is_old and self.round - seen.progress.round >= _LATE_ROUNDS
        if peer_id in aggregate.reports or behind or seen.age_s(at) > self.progress_ttl_s / 2:
            return False
        if not seen.is_active and (seen.progress.state != "leaving" or seen.progress.round < aggregate.number):
            return False
        last = self._reports[peer_id][1][-1].round if peer_id in self._reports else seen.progress.round - 1
        return last < aggregate.number

    def _write(self, point: HistoryPoint) -> None:
        before = self._points.get(point.round)
        # After a restart of the monitor, few peers may still report a round that was seen in full.
        if point != before and (before is None or point.peers >= before.peers):
            self._points[point.round] = point
            self._changed.add(point.round)

    # Output.

    @property
    def tokens_total(self) -> int:
        """Tokens that all peers ever seen have trained on."""
        return count(sum(self._tokens.values()))

    def summary(self) -> Known:
        """What the next monitor needs, except the points."""
        return Known(
            round=self.round,
            alive_at=self._alive_at,
            tokens=dict(self._tokens),
            names=dict(self._names),
            trained_in=dict(self._trained_in),
            faults=tuple(self._newest_faults()),
            excluded=self.accusations.excluded(self.proven),
            without_duty=self.accusations.without_duty,
        )

    def points(self) -> list[HistoryPoint]:
        """All rounds seen, in order."""
        return [self._points[number] for number in sorted(self._points)]

    def take_changes(self) -> tuple[list[HistoryPoint], list[int]]:
        """(points written, rounds removed) since the last call."""
        changed, self._changed = sorted(self._changed), set()
        return [self._points[n] for n in changed if n in self._points], [n for n in changed if n not in self._points]

    def give_back(self, points: Iterable[HistoryPoint], removed: Iterable[int]) -> None:
        """Undoes `take_changes` after a failed write."""
        self._changed.update([point.round for point in points], removed)

    def live_peers(self) -> dict[str, bool]:
        """The present peers that have not left, and whether others can open connections to them."""
        return {p: seen.progress.reachable for p, seen in self._peers.items() if seen.progress.state != "leaving"}

    def state(self, now: float, at: float, refused: Mapping[RefusalKind, int], join_command: str | None) -> SwarmState:
        """The state of the run."""
        votes = {n: aggregate.consensus for n, aggregate in self._aggregates.items()}
        peers = tuple(self._peer_state(p, self._peers[p], at, votes) for p in sorted(self._peers))
        next_s, progress = self._next_round(at)
        experts = self._experts()
        here = any(peer.state != "left" for peer in peers)
        status: Status = "live" if here else "no_peers"  # not `replay`, which is for files
        members = [p for p in peers if self._peers[p.peer_id].is_active]
        active = self._participants(at)
        return SwarmState(
            time=now,
            status=status,
            silent_s=None if here or self._alive_at is None else max(0.0, now - self._alive_at),
            run=self.run,
            round=count(self.round),
            next_round_s=next_s,
            round_progress=progress,
            tokens_total=self.tokens_total,
            tokens_per_second=bounded(
                sum(bounded(s.progress.tokens_per_second) for s in active if s.progress.state == "training")
            ),
            experts_covered=sum(bool(expert.holders) for expert in experts),
            peers=peers,
            experts=experts,
            consensus=Consensus(
                digest=votes.get(self.round) if peers else None,
                agree=sum(p.agrees and p.round == self.round for p in members),
                differ=tuple(p.peer_id for p in members if not p.agrees),
            ),
            faults=tuple(self._newest_faults()),
            refused=dict(sorted(refused.items())),
            join_command=join_command,
            steps=count(self._clock.step_of(self.round)),
            inner_steps=self._clock.inner_steps_after(self.round),
            excluded=self.accusations.excluded(self.proven),
            without_duty=self.accusations.without_duty,
            **self._newest_metrics(),
        )

    def _newest_metrics(self) -> dict[str, Any]:
        newest = newest_metrics(self.points())
        return newest | (self._evaluated if (newest["eval_round"] or 0) < self._evaluated["eval_round"] else {})

    def _peer_state(self, peer_id: str, seen: _Sighting, at: float, votes: Mapping[int, str | None]) -> PeerState:
        progress = seen.progress
        digest = progress.digest.hex()
        age_s = seen.age_s(at)
        reports = self._reports[peer_id][1] if peer_id in self._reports else []
        newest: dict[str, Any] = newest_metrics(reports) | asdict(progress.metrics)
        metrics: dict[str, Any] = {name: clamped(newest[name]) for name in newest.keys() & metrics_of(PeerState).keys()}
        return PeerState(
            peer_id=peer_id,
            short_id=short_id(peer_id),
            name=seen.name,
            state=self._activity(progress, age_s),
            reachable=progress.reachable,
            experts=tuple(e for e in progress.experts if e < self.run.num_experts),
            round=count(progress.round),
            tokens_per_second=bounded(progress.tokens_per_second),
            age_s=age_s,
            digest=digest,
            # There are no votes on rounds far from the swarm's; a joining peer has no reference to compare yet.
            agrees=not seen.is_active or votes.get(progress.round) in (None, digest),
            **metrics,
        )

    def _activity(self, progress: Progress, age_s: float) -> PeerActivity:
        if progress.state == "leaving":
            return "left" if not progress.experts or age_s > self.progress_ttl_s / 2 else "leaving"
        if age_s > self.progress_ttl_s / 2:  # it has missed two renewals
            return "late"
        if progress.state == "training" and progress.in_round:
            return "syncing"
        if progress.state == "training" and self.round - progress.round >= _LATE_ROUNDS:
            return "late"
        return progress.state

    def _next_round(self, at: float) -> tuple[float | None, float]:
        """(seconds until the next round is due, fraction of its work done), estimated as in training/rounds/due.py."""
        working = [s for s in self._participants(at) if s.progress.state == "training"]
        if not working:
            return None, 0.0
        if 2 * sum(s.progress.in_round for s in working) > len(working):
            return 0.0, 1.0
        wanted = self._clock.inner_steps_after(self.round) * sum(bounded(s.progress.tokens_per_step) for s in working)
        speed = sum(bounded(s.progress.tokens_per_second) for s in working)
        done = sum(
            bounded(s.progress.tokens) + bounded(s.progress.tokens_per_second) * s.age_s(at)
            for s in working
            if s.progress.round >= self.round and not s.progress.in_round
        )
        fraction = min(1.0, done / wanted) if wanted > 0 else 0.0
        return (bounded(max(0.0, wanted - done) / speed) if speed > 0 else None), fraction

    def _experts(self) -> tuple[ExpertState, ...]:
        holders: dict[int, list[str]] = {}
        for peer_id, sighting in self._peers.items():
            if sighting.progress.state != "leaving":
                for expert in sighting.progress.experts:
                    holders.setdefault(expert, []).append(peer_id)
        reserved: dict[int, list[str]] = {}
        for peer_id, lease in self._leases.items():
            if peer_id not in self._peers:
                for expert in lease.experts:
                    reserved.setdefault(expert, []).append(peer_id)
        load_of, dead_in = self._routing()
        return tuple(
            ExpertState(
                expert=e,
                load=load_of[e] if load_of else None,
                dead_layers=tuple(dead_in.get(e, ())),
                holders=tuple(sorted(holders.get(e, ()))),
                reserved=tuple(sorted(reserved.get(e, ()))),
                age_rounds=count(max(0, self.round - self._trained_in[e])) if e in self._trained_in else None,
            )
            for e in range(self.run.num_experts)
        )

    def _routing(self) -> tuple[list[float], dict[int, list[int]]]:
        """(load of each expert, if any peer reports it; the layers in which each dead expert is dead)."""
        num_experts = self.run.num_experts
        active = [s.progress for s in self._peers.values() if s.is_active]
        reported = [p.expert_loads for p in active if len(p.expert_loads) == num_experts]
        claims = [p.dead for p in active if p.dead is not None]
        dead_in: dict[int, list[int]] = {}
        for pair in dead_by_majority(count_claims(claims), len(claims)):
            dead_in.setdefault(pair % num_experts, []).append(pair // num_experts)
        return [median(map(unpacked_load, of_peers)) for of_peers in zip(*reported, strict=True)], dead_in
