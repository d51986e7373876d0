"""A swarm in virtual time: which peers train which experts while peers join, leave and die.

Nothing is trained and nothing is sent, but all decisions are made by the code of real peers: joiners choose with
`reassignment.choose_experts`, and each round's group of statements goes through `plan.make_plan` and
`lease_table.reassign_group`. A round takes no virtual time: its group has the peers that run when it is due.

Session lengths follow the measurements of Stutzbach and Rejaie in BitTorrent swarms ("Understanding Churn in
Peer-to-Peer Networks", IMC 2006): a Weibull distribution with a shape of 0.34 to 0.59, far from exponential. Most
sessions are short, but at any time most peers are in long ones. Newcomers arrive as a Poisson process.

Shapes: M members of a group.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from spes_swarm.protocol.bitmap import bitmap
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.ownership.lease_table import reassign_group
from spes_swarm.protocol.ownership.reassignment import Rules, choose_experts
from spes_swarm.protocol.rounds.plan import Form, Plan, make_plan
from spes_swarm.protocol.rounds.statement import Group, Member, Statement

Float64Array = npt.NDArray[np.float64]

# Simulated peers agree on all bases, so blocks of one element (one part each) suffice to show who contributes to what.
_ELEMENTS = 1
_STEPS_PER_S = 1.0  # of a peer of speed 1
_TOKENS_PER_STEP = 1024


@dataclass(frozen=True, slots=True)
class Weibull:
    """A distribution of durations, given by its median; smaller shapes have heavier tails, 1 is exponential."""

    median_s: float
    shape: float = 0.5

    @property
    def _scale_s(self) -> float:
        return float(self.median_s / math.log(2) ** (1 / self.shape))

    @property
    def mean_s(self) -> float:
        """The mean."""
        return self._scale_s * math.gamma(1 + 1 / self.shape)

    def draw(self, rng: random.Random) -> float:
        """Draws a duration."""
        return rng.weibullvariate(self._scale_s, self.shape)

    def remaining(self, rng: random.Random) -> float:
        """Draws what is left of a duration in progress at a random time: long ones are met more often."""
        whole_s = self._scale_s * float(rng.gammavariate(1 + 1 / self.shape, 1) ** (1 / self.shape))
        return rng.random() * whole_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A swarm and its environment."""

    num_peers: int  # on average
    num_experts: int
    duration_s: float
    seed: int = 0
    rules: Rules = field(default_factory=Rules)
    session: Weibull | None = field(default_factory=lambda: Weibull(1800.0))  # None: no peer ever leaves
    sudden: float = 0.5  # share of departures without notice: crashes, power cuts, kills
    restart: float = 0.2  # share of departures after which the peer is back within two minutes
    comeback: float = 0.3  # share of departures after which it is back much later; else it never returns
    absence: Weibull = field(default_factory=lambda: Weibull(4 * 3600.0))  # of those that are back later
    lease_s: float = 120.0
    round_s: float = 60.0
    follows_speed: bool = False  # rounds are due once the live peers together have done enough steps
    rooms: tuple[tuple[int, float], ...] = ((1, 0.5), (4, 0.35), (8, 0.15))  # (experts held, share of peers)
    fixed: float = 0.0  # share of peers with experts named by the user
    clients: float = 0.1  # share of peers that others cannot reach
    outage: float = 0.0  # share of the peers that die together at half time
    stale: float = 0.05  # share of members that see the leases of the previous round
    start_s: float = 20.0  # from the command to the start of the download
    reference_bytes: float = 300e6  # what a joiner downloads


@dataclass(eq=False, slots=True)
class _Peer:
    name: str
    room: int
    speed: float  # relative
    upload_mbps: float
    reachable: bool
    fixed: bool
    visit: int = 0  # counts arrivals and departures
    ready: bool = False  # has the reference and trains
    leaving: bool = False
    held: tuple[int, ...] = ()
    trains_since: float = 0.0
    leased_at: float = 0.0


def traffic(plan: Plan, bytes_per_value: float) -> tuple[Float64Array, Float64Array]:
    """Payload bytes that each member (M,) sends and receives in a round without losses."""
    sent_M, received_M = np.zeros((2, plan.num_members))
    reduced: defaultdict[int, Float64Array] = defaultdict(lambda: np.zeros(plan.num_members))
    for part in plan.parts:
        reduced[part.block][part.reducer] += part.size
    width = {Form.DELTA: bytes_per_value, Form.FULL: 4.0}
    for index, block in plan.blocks.items():
        own_M, pushed_M, wanted_M = reduced[index], np.zeros(plan.num_members), np.zeros(plan.num_members)
        for contribution in block.contributions:
            pushed_M[contribution.member] = width[contribution.form]
        for member in range(plan.num_members):
            wanted_M[member] = width[block.result_form(member)] * block.receives(member)
        # A member sends nothing to itself.
        sent_M += pushed_M * (own_M.sum() - own_M) + own_M * (wanted_M.sum() - wanted_M)
        received_M += wanted_M * (own_M.sum() - own_M) + own_M * (pushed_M.sum() - pushed_M)
    return sent_M, received_M


@dataclass(slots=True)
class _Orphan:
    """An expert whose last holder has died."""

    died_at: float
    died_round: int  # rounds committed until then
    lease_ends: float
    adopted: bool = False
    waited: int = 0  # commits from the end of the lease to the adoption
    had_room: bool = True  # the swarm had room for all experts at each of those commits


@dataclass(frozen=True, slots=True)
class Takeover:
    """How an expert whose last holder died was trained again."""

    seconds: float  # from the death to the commit with new work on it
    rounds: int  # commits from the death to that one; 1: no round was missed
    waited: int  # commits from the end of the lease to the adoption; 0: a joiner took it, or the holder was back
    had_room: bool  # the swarm had room for all experts meanwhile


@dataclass(slots=True)
class Report:
    """The results of a simulation."""

    rounds: int = 0
    empty_rounds: int = 0  # without any member
    peers: list[int] = field(default_factory=list)  # members of each round
    room: list[int] = field(default_factory=list)  # in total, in each round
    expected: int = 0  # expert-rounds
    possible: int = 0  # of those, how many the members had room for
    trained: int = 0  # of those, how many had a contribution
    untrained: Counter[str] = field(default_factory=Counter)  # the others, by reason
    ages: Counter[int] = field(default_factory=Counter)  # rounds since the last training of an expert, over all commits
    takeovers: list[Takeover] = field(default_factory=list)
    gained: Counter[str] = field(default_factory=Counter)  # experts that members adopted at commits, by reason
    departures: Counter[str] = field(default_factory=Counter)
    joins: int = 0
    reassign_s: list[float] = field(default_factory=list)  # CPU time for each round

    @property
    def coverage(self) -> float:
        """Share of expert-rounds in which a living holder contributed."""
        return self.trained / max(1, self.expected)


class Simulation:
    """One run of a scenario; `on_round` is called with the group of every round."""

    def __init__(self, scenario: Scenario, on_round: Callable[[Group], None] = lambda group: None) -> None:
        self._scenario = scenario
        self._on_round = on_round
        self._rng = random.Random(scenario.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._peers: dict[str, _Peer] = {}  # present
        self._holders: defaultdict[int, set[str]] = defaultdict(set)  # of them, those that train each expert
        self._leases: dict[str, tuple[int, ...]] = {}
        self._lease_ends: dict[str, float] = {}  # of peers that have died
        self._seen_before = b""  # bitmap of the leases at the last round
        self._layout = Layout.build({"shared": (_ELEMENTS,)}, {"experts": (scenario.num_experts, _ELEMENTS)})
        self._versions = [0] * (scenario.num_experts + 1)
        self._lineage = Lineage({})
        self._committed_at = 0.0
        self._first_pace = 0.0
        self._orphans: dict[int, _Orphan] = {}
        self._reserved: set[int] = set()  # experts that only dead peers had leases on at the last commit
        self._report = Report()

    def run(self) -> Report:
        """Runs the scenario and returns its results."""
        scenario = self._scenario
        for _ in range(scenario.num_peers):
            peer = self._new_peer()
            self._come(peer, None if scenario.session is None else scenario.session.remaining(self._rng))
            self._begin(peer)
        if scenario.session is not None:
            departures_per_s = scenario.num_peers / scenario.session.mean_s
            for _ in range(round(departures_per_s * scenario.comeback * scenario.absence.mean_s)):
                self._arrive(self._new_peer(), scenario.absence.remaining(self._rng))
            self._await_newcomer(departures_per_s * (1 - scenario.comeback - scenario.restart))
        self._after(scenario.round_s, self._hold_round)
        self._after(scenario.duration_s / 2, self._suffer_outage)
        while self._events and self._events[0][0] <= scenario.duration_s:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._report

    def _after(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay_s, next(self._order), event))

    # Churn.

    def _new_peer(self) -> _Peer:
        rng = self._rng
        rooms, shares = zip(*self._scenario.rooms, strict=True)
        room = min(rng.choices(rooms, shares)[0], self._scenario.num_experts)
        return _Peer(
            name=f"Qm{rng.getrandbits(128):032x}",  # ids are hashes of keys
            room=room,
            speed=math.sqrt(room) * rng.lognormvariate(0, 0.5),  # peers with more memory tend to be faster
            upload_mbps=min(max(rng.lognormvariate(math.log(40), 1), 5), 1000),
            reachable=rng.random() >= self._scenario.clients,
            fixed=rng.random() < self._scenario.fixed,
        )

    def _await_newcomer(self, per_s: float) -> None:
        def come() -> None:
            self._arrive(self._new_peer(), 0.0)
            self._await_newcomer(per_s)

        if per_s > 0:
            self._after(self._rng.expovariate(per_s), come)

    def _arrive(self, peer: _Peer, after_s: float) -> None:
        """Starts a peer after a delay; it downloads the reference and begins to train."""

        def come() -> None:
            assert self._scenario.session is not None
            self._report.joins += 1
            self._come(peer, self._scenario.session.draw(self._rng))
            # Many donors serve a joiner, so its own line is the limit; most lines have a faster downlink.
            download_s = self._scenario.reference_bytes * 8 / (4e6 * peer.upload_mbps)
            self._while_there(peer, self._scenario.start_s + download_s, self._begin)

        self._after(after_s, come)

    def _come(self, peer: _Peer, stay_s: float | None) -> None:
        peer.visit += 1
        self._peers[peer.name] = peer
        if stay_s is not None:
            self._while_there(peer, stay_s, self._depart)

    def _while_there(self, peer: _Peer, after_s: float, event: Callable[[_Peer], None]) -> None:
        """Schedules an event of a peer, dropped if the peer has gone by then."""
        visit = peer.visit
        self._after(after_s, lambda: event(peer) if peer.visit == visit else None)

    def _begin(self, peer: _Peer) -> None:
        """Makes a peer choose experts and train them from now on."""
        scenario = self._scenario
        self._expire()
        if peer.name in self._lease_ends:  # it is back before its lease expires
            del self._lease_ends[peer.name]
        elif not (peer.fixed and peer.held):
            peer.held = choose_experts(self._leases, peer.name, scenario.num_experts, peer.room, scenario.rules)
        peer.ready = True
        peer.trains_since = self._now
        self._publish_lease(peer)
        for expert in peer.held:
            self._gain(peer, expert)

    def _suffer_outage(self) -> None:
        for peer in list(self._peers.values()):
            if self._rng.random() < self._scenario.outage:
                self._depart(peer, sudden=True)

    def _depart(self, peer: _Peer, sudden: bool | None = None) -> None:
        if sudden is None:
            sudden = self._rng.random() < self._scenario.sudden
        self._report.departures["sudden" if sudden else "announced"] += 1
        if not peer.ready:
            self._go(peer)
        elif sudden:
            self._die(peer)
        else:
            peer.leaving = True  # its last round is the next one

    def _die(self, peer: _Peer) -> None:
        # A lease is renewed after each third of its lifetime.
        renewals = (self._now - peer.leased_at) // (self._scenario.lease_s / 3)
        self._lease_ends[peer.name] = peer.leased_at + (renewals / 3 + 1) * self._scenario.lease_s
        self._go(peer)
        for expert in peer.held:
            if not self._holders[expert]:
                ends = max(end for name, end in self._lease_ends.items() if expert in self._leases[name])
                orphan = self._orphans.setdefault(expert, _Orphan(self._now, self._report.rounds, ends))
                orphan.adopted, orphan.lease_ends, orphan.waited = False, ends, 0

    def _go(self, peer: _Peer) -> None:
        for expert in peer.held:
            self._holders[expert].discard(peer.name)
        del self._peers[peer.name]
        peer.visit += 1
        peer.ready = peer.leaving = False
        fate = self._rng.random()
        if fate < self._scenario.restart:
            self._arrive(peer, self._rng.uniform(5.0, 120.0))
        elif fate < self._scenario.restart + self._scenario.comeback:
            self._arrive(peer, self._scenario.absence.draw(self._rng))

    def _gain(self, peer: _Peer, expert: int) -> None:
        self._holders[expert].add(peer.name)
        if expert in self._orphans:
            self._orphans[expert].adopted = True

    def _publish_lease(self, peer: _Peer) -> None:
        self._leases[peer.name] = peer.held
        peer.leased_at = self._now

    def _expire(self) -> None:
        for name in [name for name, ends in self._lease_ends.items() if ends <= self._now]:
            del self._lease_ends[name], self._leases[name]

    # Rounds.

    def _hold_round(self) -> None:
        scenario = self._scenario
        members = {name: self._peers[name] for name in sorted(self._peers) if self._peers[name].ready}
        if members:
            self._expire()
            group = self._form_group(members)
            self._on_round(group)
            plan = make_plan(group, self._layout, _ELEMENTS)
            started = time.process_time()
            outcome = reassign_group(group, plan, scenario.num_experts, scenario.rules)
            self._report.reassign_s.append(time.process_time() - started)
            self._note_training(members, plan)
            self._commit(plan)
            self._apply(members, outcome)
        else:
            self._report.empty_rounds += 1
        pace = sum(peer.speed for peer in members.values()) / max(1, len(members))
        self._first_pace = self._first_pace or pace
        faster = pace / self._first_pace if scenario.follows_speed and pace else 1.0
        self._after(scenario.round_s / faster, self._hold_round)

    def _form_group(self, members: Mapping[str, _Peer]) -> Group:
        """Builds the group of the members' statements, without signatures."""
        number = self._report.rounds + 1
        seen = bitmap({e for experts in self._leases.values() for e in experts}, self._scenario.num_experts)
        seen_before, self._seen_before = self._seen_before or seen, seen
        commits, marks = self._lineage.to_lists()
        digests = [version.to_bytes(32, "big") for version in self._versions]
        statements = []
        for name, peer in members.items():
            trained_s = self._now - max(peer.trains_since, self._committed_at)
            tokens = int(trained_s * peer.speed * _STEPS_PER_S) * _TOKENS_PER_STEP
            statement = Statement(
                round=number,
                held=list(peer.held),
                tokens=tokens,
                routed=[tokens // 8] * len(peer.held),
                rms=[0.0] * (1 + len(peer.held)),
                usual_rms=[0.0, 0.0],
                vouched=b"",
                bandwidth_mbps=peer.upload_mbps,
                reachable=peer.reachable,
                versions=self._versions,
                digests=digests,
                commits=commits,
                marks=marks,
                room=peer.room,
                fixed=peer.fixed,
                leaving=peer.leaving,
                leased=seen_before if self._rng.random() < self._scenario.stale else seen,
                certificate=b"",
            )
            statements.append(Member(name, statement))
        return Group("simulation", number, tuple(statements), ())

    def _note_training(self, members: Mapping[str, _Peer], plan: Plan) -> None:
        report, num_experts = self._report, self._scenario.num_experts
        report.rounds += 1
        report.peers.append(len(members))
        report.room.append(sum(peer.room for peer in members.values()))
        report.expected += num_experts
        report.possible += min(num_experts, report.room[-1])
        for expert in range(num_experts):
            if 1 + expert in plan.blocks and plan.blocks[1 + expert].contributions:
                report.trained += 1
                if (orphan := self._orphans.pop(expert, None)) is not None:
                    rounds = report.rounds - orphan.died_round
                    report.takeovers.append(
                        Takeover(self._now - orphan.died_at, rounds, orphan.waited, orphan.had_room)
                    )
            else:
                report.untrained[self._reason(expert)] += 1

    def _reason(self, expert: int) -> str:
        orphan = self._orphans.get(expert)
        if self._holders[expert]:
            return "holder has just come"
        if orphan is not None and orphan.died_at > self._committed_at:
            return "last holder has just died"
        return "reserved for an absent holder" if expert in self._reserved else "no room"

    def _commit(self, plan: Plan) -> None:
        self._versions = [
            plan.blocks[index].new_version(plan.round) if index in plan.blocks else version
            for index, version in enumerate(self._versions)
        ]
        self._report.ages.update(plan.round - version for version in self._versions[1:])
        self._lineage = self._lineage.after(plan.round, plan.round.to_bytes(32, "big"))
        self._committed_at = self._now
        for orphan in self._orphans.values():
            if not orphan.adopted and orphan.lease_ends <= self._now:
                orphan.waited += 1
                orphan.had_room = orphan.had_room and self._report.room[-1] >= self._scenario.num_experts

    def _apply(self, members: Mapping[str, _Peer], outcome: Mapping[str, tuple[int, ...]]) -> None:
        """Applies what the members hold from now on, and removes the leaving ones."""
        held_before = {e for peer in members.values() if not peer.leaving for e in peer.held}
        for name, peer in members.items():
            new = set(outcome.get(name, ())) - set(peer.held)
            if peer.leaving:
                del self._leases[name]
                self._go(peer)
            elif outcome[name] != peer.held:
                for expert in new:
                    swapped = len(outcome[name]) == len(peer.held)
                    reason = "evening out" if swapped else "more room than it used"
                    self._report.gained[reason if expert in held_before else "had no holder"] += 1
                for expert in set(peer.held) - set(outcome[name]):
                    self._holders[expert].discard(name)
                peer.held = outcome[name]
                for expert in new:
                    self._gain(peer, expert)
                self._publish_lease(peer)
        dead = {e for name in self._lease_ends for e in self._leases[name]}
        self._reserved = {expert for expert in dead if not self._holders[expert]}
