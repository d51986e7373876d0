"""Which peer trains which expert: deterministic rules on the table of leases, without I/O.

A joining peer chooses from the leases in the DHT (`choose_experts`, `resolve`). From then on the table consists of the
signed statements of a round's group (`reassign`): every member computes the same outcome at the commit and takes its
own row of it, without negotiation, and no two peers decide differently. In this order:

1. a peer that holds more experts than it has room for, than one member may hold (`Rules.most_each`), or than the
   replication target needs, gives up those with the most holders;
2. a peer with room adopts the experts with the fewest holders, of these the longest untrained first;
3. if one expert has two holders more than another (and a quarter more, if there are many), one of them moves: this
   covers orphans when no peer has room, resolves duplicates after a partition, and evens out replicas when peers join;
4. if the swarm lacks room for all experts, every few rounds those that have waited longest replace others, so that no
   expert waits for more than a full turn.

The limit on one member never costs an expert its last holder: a member keeps or adopts experts that no other peer has
room for, until a peer with room takes them over.

A holder gives up an expert only in a round in which the expert took part, because its work since then would be lost;
experts without a holder are adopted in any round.

Experts of absent peers stay reserved until their leases expire. If a user has named experts (`Holding.fixed`), the
member adopts no others and gives up only those beyond the limit. Such a claim costs nothing and may be a lie, so it
counts when others choose what to adopt, but no holder gives up an expert or moves because of it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

ExpertsByPeer = Mapping[str, Collection[int]]


def priority(peer_id: str, expert: int) -> bytes:
    """Rendezvous hash of a peer and an expert; the peer with the smallest has the best claim."""
    return blake3(f"{peer_id}|{expert}".encode()).digest()


def coverage(leases: ExpertsByPeer, num_experts: int) -> list[int]:
    """Number of holders of each expert."""
    counts = Counter(expert for experts in leases.values() for expert in experts)
    return [counts[expert] for expert in range(num_experts)]


# Joining.


def choose_experts(
    leases: ExpertsByPeer, me: str, num_experts: int, want: int, rules: Rules | None = None
) -> tuple[int, ...]:
    """Chooses the `want` experts with the fewest other holders; ties are broken by rendezvous hash.

    With a replication target only experts with fewer holders are chosen, but at least one: one of the peer that holds
    most, which can give it up. Beyond the limit on one member only experts that no other peer holds are chosen.
    """
    rules = rules or Rules()
    leases = {peer: experts for peer, experts in leases.items() if peer != me}
    others = coverage(leases, num_experts)
    ranked = sorted(range(num_experts), key=lambda expert: (others[expert], priority(me, expert)))
    limit = rules.limit(num_experts)
    needed = [
        expert
        for place, expert in enumerate(ranked[:want])
        if (rules.replicas is None or others[expert] < rules.replicas) and (place < limit or not others[expert])
    ]
    most = {expert: len(held) for held in sorted(leases.values(), key=len) for expert in held}
    return tuple(sorted(needed)) or (min(ranked, key=lambda expert: (others[expert], -most.get(expert, 0))),)


def reserving(leases: ExpertsByPeer, num_experts: int, rules: Rules) -> set[int]:
    """Experts that these leases keep for their holders while they are absent.

    A lease is a claim like any other: it reserves no more than one member may hold, the experts with the smallest hash.
    """
    limit = rules.limit(num_experts)
    reserved: set[int] = set()
    for peer, experts in leases.items():
        known = {expert for expert in experts if expert < num_experts}
        if len(known) > limit:
            known = set(sorted(known, key=lambda expert: priority(peer, expert))[:limit])
        reserved |= known
    return reserved


def resolve(leases: ExpertsByPeer, me: str, num_experts: int) -> tuple[int, ...]:
    """What `me` should hold after several peers chose at the same time.

    An expert that others hold too is given up for one without a holder, unless this peer has the best claim to it.
    Repeated by all peers until nothing changes, this covers every expert that there is room for.
    """
    mine = sorted(leases[me])
    counts = coverage(leases, num_experts)
    uncovered = sorted((e for e in range(num_experts) if counts[e] == 0), key=lambda e: priority(me, e))
    for expert in list(mine):
        holders = [peer for peer, experts in leases.items() if expert in experts]
        if uncovered and len(holders) > 1 and min(holders, key=lambda peer: priority(peer, expert)) != me:
            mine[mine.index(expert)] = uncovered.pop(0)
    return tuple(sorted(mine))


# From round to round.


@dataclass(frozen=True, slots=True)
class Holding:
    """One peer's row in the table."""

    experts: tuple[int, ...]
    room: int  # the most experts that it can hold
    fixed: bool = False  # the user named the experts: no others are adopted


@dataclass(frozen=True, slots=True)
class Rules:
    """The ownership settings of a run."""

    replicas: int | None = None  # target number of holders per expert; None: peers hold all they have room for
    rotate_every_rounds: int = 10  # how long an expert is trained while others wait for its place
    most_each: int | None = None  # the most that one member holds while others can hold the rest; None: no limit
    expert_every: int = 1  # rounds from one synchronisation of all experts to the next

    def limit(self, num_experts: int) -> int:
        """The most experts of `num_experts` that one member holds while others can hold the rest."""
        return num_experts if self.most_each is None else min(self.most_each, num_experts)

    def rotates(self, round_number: int) -> bool:
        """Returns True if experts rotate after this round: the first at or past each multiple with all experts."""
        if round_number % self.expert_every:
            return False
        before = round_number - self.expert_every
        return round_number // self.rotate_every_rounds > before // self.rotate_every_rounds


def reserved_experts(held: Iterable[int], views: Collection[Collection[int]]) -> set[int]:
    """Experts that no member of the group holds, but on which at least half of the members see an unexpired lease.

    The leases of members that are leaving end with this round, so `held` includes their experts.
    """
    seen = Counter(expert for view in views for expert in view)
    return {expert for expert, count in seen.items() if 2 * count >= len(views)} - set(held)


def reassign(
    table: Mapping[str, Holding],
    num_experts: int,
    *,
    round_number: int,
    trained_in: Sequence[int],
    reserved: Collection[int] = (),
    kept: Collection[int] = (),
    rules: Rules | None = None,
) -> dict[str, tuple[int, ...]]:
    """What each peer of the table holds from now on; see the top of this file.

    Between rotations, a second call with the outcome of the first changes nothing.

    Args:
        table: the members of the group that has just committed, without those that are leaving.
        num_experts: E; experts are 0 to E - 1.
        round_number: the round that was committed.
        trained_in: for each expert, the round in which it was last trained.
        reserved: experts that no peer in the table holds, but on which an absent peer has an unexpired lease.
        kept: experts that did not take part in the round: no holder gives them up.
        rules: of the run; None: the defaults.
    """
    moves = _Moves(table, num_experts, round_number, trained_in, reserved, kept, rules or Rules())
    moves.shed_room()
    # With a replication target, one rule may trigger another. This terminates: the number of replicas up to the
    # target only grows, and the number beyond it only shrinks or spreads.
    rules_in_order = (moves.shed_replicas, moves.fill, moves.make_way, moves.even_out, moves.occupy_idle)
    while True:
        beyond, holdings = moves.beyond_limit, moves.holdings
        shed = moves.shed_beyond_limit()
        while any(rule() for rule in rules_in_order):
            pass
        moves.give_back(shed)
        # An adoption may allow the old holder to give up other experts. This terminates: the number of experts
        # beyond the limit never grows, and while it stays the same, more experts are held after each pass.
        if moves.beyond_limit >= beyond and moves.holdings <= holdings:
            break
    moves.adopt_beyond_limit()
    moves.rotate()
    return {peer: tuple(sorted(experts)) for peer, experts in moves.held.items()}


class _Moves:
    """The working table of `reassign`; reserved experts are left out."""

    def __init__(
        self,
        table: Mapping[str, Holding],
        num_experts: int,
        round_number: int,
        trained_in: Sequence[int],
        reserved: Collection[int],
        kept: Collection[int],
        rules: Rules,
    ) -> None:
        self._round = round_number
        self._trained_in = trained_in
        self._rules = rules
        self._kept = frozenset(kept)
        self.held = {peer: set(holding.experts) for peer, holding in table.items()}
        self._limit = rules.limit(num_experts)
        # Only of peers whose experts no user has named. Their room beyond the limit is a last resort.
        self._whole_room = {
            peer: min(holding.room, num_experts) for peer, holding in table.items() if not holding.fixed
        }
        self._room = {peer: min(room, self._limit) for peer, room in self._whole_room.items()}
        self._count = [0] * num_experts  # holders of each expert, used to choose what to adopt
        # Of those, the peers whose experts no user has named: only they are a reason to give up an expert.
        self._movable: list[set[str]] = [set() for _ in range(num_experts)]
        for peer, experts in self.held.items():
            for expert in experts:
                self._count[expert] += 1
                if peer in self._room:
                    self._movable[expert].add(peer)
        reserved = {expert for expert in reserved if not self._count[expert]}
        self._experts = [expert for expert in range(num_experts) if expert not in reserved]
        self._gained: set[tuple[str, int]] = set()

    @cached_property
    def _turn(self) -> dict[str, int]:
        """The place of each peer in the order that breaks ties; it differs in each round, for fairness."""
        order = sorted(self.held, key=lambda peer: blake3(f"{self._round}|{peer}".encode()).digest())
        return {peer: place for place, peer in enumerate(order)}

    def _need(self, expert: int) -> tuple[int, int, int]:
        """Sort key of the experts to adopt: fewest holders, then longest untrained."""
        return self._count[expert], self._trained_in[expert], expert

    def _spare(self, expert: int) -> tuple[int, int, int, int]:
        """Sort key of the experts to keep: the last one is given up first."""
        return len(self._movable[expert]), *self._need(expert)

    def _free(self, peer: str) -> int:
        return self._room[peer] - len(self.held[peer])

    def _take(self, peer: str, expert: int) -> None:
        self.held[peer].add(expert)
        if peer in self._room:
            self._movable[expert].add(peer)
        self._count[expert] += 1
        self._gained.add((peer, expert))

    def _drop(self, peer: str, expert: int) -> None:
        self.held[peer].discard(expert)
        self._movable[expert].discard(peer)
        self._count[expert] -= 1

    def shed_room(self) -> None:
        """A peer that holds more than it has room for gives up the experts with the most holders."""
        for peer in sorted(peer for peer, room in self._whole_room.items() if len(self.held[peer]) > room):
            while len(self.held[peer]) > self._whole_room[peer] and (free := self.held[peer] - self._kept):
                self._drop(peer, max(free, key=self._spare))

    # The limit on one member.

    @property
    def beyond_limit(self) -> int:
        """Number of experts held beyond the limit, over all members."""
        return sum(max(0, len(experts) - self._limit) for experts in self.held.values())

    @property
    def holdings(self) -> int:
        """Number of experts held, over all members."""
        return sum(map(len, self.held.values()))

    def shed_beyond_limit(self) -> dict[int, list[str]]:
        """Members beyond the limit offer their experts with the most holders; returns expert -> offering peers.

        Members whose users have named experts go first, so that the others keep those that both hold.
        """
        shed: dict[int, list[str]] = {}
        for peer in sorted(self.held, key=lambda peer: (peer in self._room, self._turn[peer])):
            while len(self.held[peer]) > self._limit and (free := self.held[peer] - self._kept):
                expert = max(free, key=self._spare)
                self._drop(peer, expert)
                shed.setdefault(expert, []).append(peer)
        return shed

    def give_back(self, shed: Mapping[int, list[str]]) -> None:
        """Returns each expert that no peer took to a member that offered it."""
        for expert, peers in sorted(shed.items()):
            movable = [peer for peer in peers if peer in self._room]
            # A claim of named experts does not relieve another holder of an expert.
            if self._movable[expert] or not (movable or not self._count[expert]):
                continue
            peer = min(movable or peers, key=lambda peer: (len(self.held[peer]), self._turn[peer]))
            self._take(peer, expert)
            self._gained.discard((peer, expert))

    def adopt_beyond_limit(self) -> None:
        """An expert that the limit would leave without a holder goes to the member with the most room."""
        for *_, expert in sorted(self._need(expert) for expert in self._experts if not self._count[expert]):
            free = [peer for peer, room in self._whole_room.items() if len(self.held[peer]) < room]
            if not free:
                return
            self._take(min(free, key=lambda p: (len(self.held[p]) - self._whole_room[p], self._turn[p])), expert)

    # These rules return True if they have changed anything.

    def shed_replicas(self) -> bool:
        """Surplus holders of an expert beyond the target give it up, if they hold another one."""
        enough = self._rules.replicas
        if enough is None:
            return False
        changed = False
        for expert in self._experts:
            surplus = len(self._movable[expert]) - enough
            if surplus > 0 and expert not in self._kept:
                # The holders with the most experts go first; no peer is left without one.
                able = sorted(
                    (peer for peer in self._movable[expert] if len(self.held[peer]) > 1),
                    key=lambda peer: (-len(self.held[peer]), self._turn[peer]),
                )
                for peer in able[:surplus]:
                    self._drop(peer, expert)
                changed = changed or bool(able)
        return changed

    def fill(self) -> bool:
        """Peers with room adopt the experts with the fewest holders; the peer with the most room goes first."""
        free = [(-self._free(peer), self._turn[peer], peer) for peer in self._room if self._free(peer) > 0]
        if not free:
            return False
        changed = False
        heapq.heapify(free)
        queue = [self._need(expert) for expert in self._experts]
        heapq.heapify(queue)
        while free and queue:
            *_, expert = heapq.heappop(queue)
            if self._rules.replicas is not None and self._count[expert] >= self._rules.replicas:
                break  # all that follow have enough holders, too
            passed = []
            while free and expert in self.held[free[0][-1]]:
                passed.append(heapq.heappop(free))
            if free:
                *_, peer = heapq.heappop(free)
                self._take(peer, expert)
                changed = True
                heapq.heappush(queue, self._need(expert))
                if self._free(peer):
                    passed.append((-self._free(peer), self._turn[peer], peer))
            for entry in passed:
                heapq.heappush(free, entry)
        return changed

    def make_way(self) -> bool:
        """If only the holders of an expert that has too few have room left, others adopt it and pass theirs on to them.

        Only a replication target leaves room unused. This searches for augmenting paths, as in bipartite matching.
        """
        enough = self._rules.replicas
        if enough is None or not any(self._free(peer) > 0 for peer in self._room):
            return False
        changed = False
        exhausted: set[int] = set()
        for *_, expert in sorted(self._need(e) for e in self._experts if self._count[e] < enough):
            while self._count[expert] < enough and expert not in exhausted:
                steps = self._way_for(expert, exhausted)
                for peer, given_up, taken in steps:
                    if given_up is not None:
                        self._drop(peer, given_up)
                    self._take(peer, taken)
                changed = changed or bool(steps)
        return changed

    def _way_for(self, expert: int, exhausted: set[int]) -> list[tuple[str, int | None, int]]:
        """Returns moves (peer, expert given up, expert taken) that give `expert` one more holder.

        If there are none, adds `expert` and all experts that were tried to `exhausted`.
        """
        came_by: dict[int, tuple[str, int]] = {}  # expert -> the peer that would give it up, and for which one
        waiting = sorted(self._room, key=self._turn.__getitem__)
        queue = deque([expert])
        seen = {expert}
        while queue:
            wanted = queue.popleft()
            for peer in [peer for peer in waiting if wanted not in self.held[peer]]:
                if self._free(peer) > 0:
                    steps: list[tuple[str, int | None, int]] = [(peer, None, wanted)]
                    while wanted != expert:
                        given_up = wanted
                        peer, wanted = came_by[given_up]
                        steps.append((peer, given_up, wanted))
                    return steps
                for other in sorted(self.held[peer] - seen - self._kept):
                    seen.add(other)
                    came_by[other] = peer, wanted
                    queue.append(other)
            waiting = [peer for peer in waiting if wanted in self.held[peer]]
        exhausted |= seen
        return []

    def _too_many(self, expert: int) -> int:
        """How many holders another expert must have for one of them to move to this one.

        With many replicas, one holder more or less is not worth a peer starting over on another expert: without the
        quarter, a swarm of 256 peers with a dozen replicas made 2.5 moves per round (scripts/simulate.py), with it
        hardly any.
        """
        count, target = self._count[expert], self._rules.replicas
        tolerated = 0 if target is not None and count < target else count // 4
        return count + 2 + tolerated

    def even_out(self) -> bool:
        """Moves holders from one expert to another until none has too many compared with another."""
        changed = False
        again = True
        while again:
            again = False
            waiting = [self._need(expert) for expert in self._experts]
            heapq.heapify(waiting)
            movable = [e for e in self._experts if self._movable[e] and e not in self._kept]
            most = sorted(movable, key=lambda e: (-len(self._movable[e]), e))
            while waiting and most and self._too_many(waiting[0][-1]) <= len(self._movable[most[0]]):
                *_, expert = heapq.heappop(waiting)
                self._move_to(expert, most)
                heapq.heappush(waiting, self._need(expert))
                again = changed = True
        return changed

    def _move_to(self, expert: int, most: list[int]) -> None:
        """Moves a holder of the first of `most` to `expert`; `most` stays sorted by the number of holders.

        The first has more holders than `expert`, so at least one of them does not hold `expert`.
        """
        held_most = most[0]
        count = len(self._movable[held_most])
        able = (peer for peer in self._movable[held_most] if expert not in self.held[peer])
        peer = min(able, key=self._turn.__getitem__)
        self._drop(peer, held_most)
        self._take(peer, expert)
        # It now belongs after the last one with as many holders as it had.
        last = 0
        while last + 1 < len(most) and len(self._movable[most[last + 1]]) == count:
            last += 1
        most[0], most[last] = most[last], most[0]

    def occupy_idle(self) -> bool:
        """Peers with room but no expert adopt the one with the fewest holders, even beyond the target."""
        idle = sorted((p for p in self._room if self._free(p) > 0 and not self.held[p]), key=self._turn.__getitem__)
        if not self._experts:
            return False
        for peer in idle:
            self._take(peer, min(self._experts, key=self._need))
        return bool(idle)

    def rotate(self) -> None:
        """Experts without a holder replace others, those that have waited longest first.

        A rotation moves a member in any case, so it prefers experts that have other holders, even if only by name.
        """
        if not self._rules.rotates(self._round):
            return
        waiting = sorted(self._need(expert) for expert in self._experts if not self._count[expert])
        if not waiting:
            return
        places = sorted(
            (
                (peer, expert)
                for peer in self._room
                for expert in self.held[peer] - self._kept
                if (peer, expert) not in self._gained
            ),
            key=lambda place: (
                self._count[place[1]] == 1,
                blake3(f"{self._round}|{place[0]}|{place[1]}".encode()).digest(),
            ),
        )
        for (*_, expert), (peer, given_up) in zip(waiting, places, strict=False):
            self._drop(peer, given_up)
            self._take(peer, expert)
