"""Whose claims count: this peer's history with the others in the rounds that it has committed.

A signed record proves who wrote it, not that its writer does any work, and identities cost nothing. So a record alone
has no effect: the swarm's round, the pace, the clock and the candidates for leading a round depend only on *members*,
the peers whose work is in a round that this peer has committed. Before its first such round, a peer that has fetched
its reference from a swarm, as a newcomer or because it has missed too many rounds, follows its initial peers. A peer
with a reference of its own (the swarm is founded, or resumes from disk), or one that finds none of its initial peers,
follows all peers that answer.

How long a round waits for a peer follows from the same history. A punctual member is waited for until the window ends
(longer while it follows a leader that failed: see protocol/meeting), and one that has missed two of its last eight
rounds, or has no duty, for a tenth of a round's length, but at least for a quarter of a second, or it could never come
back to a swarm with short rounds. A peer that has never taken part is waited for once, if it answers calls, and only if
no recent round has waited for a newcomer in vain: otherwise an attacker with a new identity for each round could double
the length of all rounds.

A peer that has never taken part and delivers nothing of what it owes in two groups in a row is left out of the next
eight, twice as many after each further one: otherwise it could stop a founder that is still alone, whose rounds then
all depend on it.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice

# Rounds remembered per member, and how many of them a punctual member may miss.
_REMEMBERED_ROUNDS = 8
_TOLERATED_MISSES = 1
MAX_PEERS = 4096  # remembered; the least recently heard are evicted first
# How long a round waits for members that missed recent rounds, and for newcomers: shares of a round's length.
GRACE_SHARE = 0.1
NEWCOMER_SHARE = 0.5
MEMBER_GRACE_S = 0.25  # at least, for members only: new identities cost nothing
MAX_NEWCOMERS = 16  # waited for at a time
# Groups in which a peer may deliver nothing before it is left out, and groups that it is then left out of, at most.
_TOLERATED_IDLE, _MAX_LEFT_OUT = 1, 1024
CLOCK_MEMORY_S = 3600.0  # how long a member's clock counts after its last round


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A live peer that may take part in a round."""

    peer_id: str
    reachable: bool
    in_electorate: bool = True  # its claims count
    wait_s: float = math.inf  # how long a round waits for it; the window or more: until it ends


@dataclass(slots=True)
class _Member:
    last_commit: float  # monotonic time
    missed: deque[bool] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_ROUNDS))  # newest last


class Reputation:
    """Which peers have taken part in rounds, and how reliably.

    Times are those of one monotonic clock, in seconds.
    """

    def __init__(self, initial_peers: Collection[str] = ()) -> None:
        self.without_duty: dict[str, int] = {}  # by the last group, since which round; see rounds/vouchers.py
        self._initial_peers = frozenset(initial_peers)
        self._follows = False
        self._members: OrderedDict[str, _Member] = OrderedDict()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._awaited: OrderedDict[str, None] = OrderedDict()  # newcomers that a round has waited for in vain
        self._rounds_since_vain = _REMEMBERED_ROUNDS
        self._num_groups = 0
        # Peer -> number of groups in which it delivered nothing, and until which group it is left out.
        self._idle: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._committed_at: float | None = None
        self._round_s = math.inf  # between the last two commits

    def defers(self, peers: Iterable[str]) -> bool:
        """Returns True if this peer follows its initial peers, and `peers` include one of them."""
        return self._follows and not self._members and not self._initial_peers.isdisjoint(peers)

    def follow(self) -> None:
        """Notes that this peer has fetched its reference: until its first commit it follows its initial peers."""
        self._follows = True

    def stop_following(self) -> None:
        """Notes that all of this peer's initial peers follow others: of two that follow each other, one must lead."""
        self._follows = False

    def is_member(self, peer_id: str) -> bool:
        """Returns True if the work of a peer is in a round that this peer has committed."""
        return peer_id in self._members

    def reserves_for(self, peer_id: str) -> bool:
        """Returns True if slots and upload are reserved for a peer: a member, or any that answers while there is none.

        The rest, strangers, share a small part, because identities cost nothing.
        """
        return peer_id in (self._members or self._answered)

    def note_answer(self, peer_id: str) -> None:
        """Notes that a peer answered or made a call, which proves that a process runs it."""
        _remember(self._answered, peer_id)

    def has_answered(self, peer_id: str) -> bool:
        """Returns True if a peer has ever answered a call or taken part in a round."""
        return peer_id in self._answered or peer_id in self._members

    def electorate(self, peers: Iterable[str]) -> set[str]:
        """Those of `peers` whose claims count."""
        peers = set(peers)
        if self._members:
            return peers & self._members.keys()
        if self.defers(peers):
            return peers & self._initial_peers
        return {peer for peer in peers if self.has_answered(peer)}

    def clock_electorate(self, peers: Iterable[str], now: float) -> set[str]:
        """Those of `peers` whose clocks count.

        These are the members within CLOCK_MEMORY_S of their last round, or all members if there is none such. Before
        this peer's first round they are its initial peers, or the electorate if none of these is present.
        """
        peers = set(peers)
        electorate = self.electorate(peers) if self._members else peers & self._initial_peers or self.electorate(peers)
        members = electorate & self._members.keys()
        recent = {peer for peer in members if now - self._members[peer].last_commit <= CLOCK_MEMORY_S}
        return recent or electorate

    def committed(self, now: float, took_part: Collection[str], absent: Collection[str]) -> None:
        """Notes which other peers' work is in a round, and which live peers in training were absent or delivered
        nothing.
        """
        if self._committed_at is not None:
            self._round_s = now - self._committed_at
        self._committed_at = now
        in_vain = self._newcomers_awaited(absent)
        for peer_id in in_vain:
            _remember(self._awaited, peer_id)
        self._rounds_since_vain = 0 if in_vain else self._rounds_since_vain + 1
        for peer_id in absent:
            if peer_id in self._members:
                self._members[peer_id].missed.append(True)
        for peer_id in took_part:
            member = self._members.setdefault(peer_id, _Member(now))
            member.last_commit = now
            member.missed.append(False)
            self._members.move_to_end(peer_id)
            self._awaited.pop(peer_id, None)
        while len(self._members) > MAX_PEERS:
            self._members.popitem(last=False)

    def exchanged(self, delivered: Collection[str], idle: Collection[str]) -> None:
        """Notes the end of an exchange: which other members delivered work, and which nothing of what they owed."""
        self._num_groups += 1
        for peer_id in delivered:
            self._idle.pop(peer_id, None)
        for peer_id in set(idle).difference(delivered):
            count = self._idle.pop(peer_id, (0, 0))[0] + 1
            excess = count - _TOLERATED_IDLE
            left_out = min(_REMEMBERED_ROUNDS << (excess - 1), _MAX_LEFT_OUT) if excess > 0 else 0
            self._idle[peer_id] = min(count, _REMEMBERED_ROUNDS), self._num_groups + left_out
        while len(self._idle) > MAX_PEERS:
            self._idle.popitem(last=False)

    def leaves_out(self, peer_id: str) -> bool:
        """Returns True if a round that this peer leads is held without a peer, since it only owes."""
        return self._num_groups < self._idle.get(peer_id, (0, 0))[1]

    @property
    def grace_s(self) -> float:
        """What a member may take longer than the others: a share of a round, in seconds; inf before two commits."""
        return max(GRACE_SHARE * self._round_s, MEMBER_GRACE_S)

    def wait_times(self, peers: Iterable[str], window_s: float) -> dict[str, float]:
        """How long a round waits for each of these live peers, in seconds; at most `window_s`."""
        peers = set(peers)
        awaited = self._newcomers_awaited(peers)
        shares = {peer: self._share(peer, awaited) for peer in peers}
        least = dict.fromkeys(peers & self._members.keys(), MEMBER_GRACE_S)
        return {
            peer: min(window_s, max(share * self._round_s, least.get(peer, 0.0))) if share else 0.0
            for peer, share in shares.items()
        }

    def _newcomers_awaited(self, peers: Collection[str]) -> set[str]:
        """Those of `peers` that a round waits for although they have never taken part in one."""
        if self._members and self._rounds_since_vain < _REMEMBERED_ROUNDS:
            return set()
        peers = set(peers)
        new = (p for p in self._answered if p in peers and p not in self._members and p not in self._awaited)
        return set(islice(new, MAX_NEWCOMERS))

    def _share(self, peer_id: str, newcomers: Collection[str]) -> float:
        """How long a round waits for a peer, as a share of a round's length."""
        if self.leaves_out(peer_id):
            return 0.0
        member = self._members.get(peer_id)
        if member is not None:
            punctual = sum(member.missed) <= _TOLERATED_MISSES and peer_id not in self.without_duty
            return math.inf if punctual else GRACE_SHARE
        if peer_id in newcomers:
            return NEWCOMER_SHARE if self._members else math.inf
        return GRACE_SHARE if peer_id in self._answered else 0.0


def _remember(peers: OrderedDict[str, None], peer_id: str) -> None:
    peers[peer_id] = None
    peers.move_to_end(peer_id)
    while len(peers) > MAX_PEERS:
        peers.popitem(last=False)
