"""Which peers are in the swarm right now, according to their signed records and this peer's own calls.

Every peer with a live record is *present*. The swarm's round, its tokens and its pace are derived only from the
*electorate*, the peers whose claims count; see reputation.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from statistics import median_high, median_low

from spes_swarm.protocol.members.records import Progress
from spes_swarm.protocol.members.reputation import Neighbour, Reputation
from spes_swarm.protocol.members.routing_report import count_claims

# Records are written and read about once a second; for this long, a peer's answer counts as newer than its record.
_ANSWER_NEWER_S = 4.0
# An H200 processes about this many times as many tokens per step as a laptop.
MAX_STEP_RATIO = 64
_MAX_GONE = 1024


@dataclass(frozen=True, slots=True)
class PeerView:
    """One other live peer."""

    peer_id: str
    progress: Progress
    seen_at: float  # local monotonic time at which this version of its record was first seen


@dataclass
class Roster:
    """The other peers of the run.

    Remote clocks are never compared with the local one: what counts is when a record was first seen here. A record
    that has not been renewed for twice the lifetime of an honest one is stale, however late it claims to expire.
    """

    me: str  # this peer's id
    progress_ttl_s: float = math.inf  # lifetime of an honest progress record
    reputation: Reputation = field(default_factory=Reputation)  # which of the others have taken part in rounds
    peers: dict[str, PeerView] = field(default_factory=dict)  # all peers with an unexpired record
    admits: Callable[[str], bool] = lambda peer_id: True  # whether a peer may take part; others are not present
    committed_at: float = field(default_factory=time.monotonic)  # monotonic time of this peer's last commit
    # Peer -> expiration of its record when it was lost.
    _lost: dict[str, float] = field(default_factory=dict, init=False)
    # Peer -> monotonic time until which it counts as live.
    _vouched: dict[str, float] = field(default_factory=dict, init=False)
    # Peer -> reported round, valid until.
    _heard: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)
    # The last record of peers whose records have expired.
    _gone: dict[str, PeerView] = field(default_factory=dict, init=False)

    def update(self, records: Mapping[str, Progress]) -> list[str]:
        """Takes in freshly read progress records; returns the peers that are new."""
        now = time.monotonic()
        views: dict[str, PeerView] = {}
        for peer_id, progress in records.items():
            if peer_id == self.me:
                continue
            known = self.peers.get(peer_id)
            same = known is not None and known.progress.expires == progress.expires
            views[peer_id] = known if known is not None and same else PeerView(peer_id, progress, now)
        self._vouched = {peer: until for peer, until in self._vouched.items() if until > now}
        for peer_id, view in self.peers.items():
            if peer_id not in views and peer_id in self._vouched and view.progress.state != "leaving":
                views[peer_id] = view
        self._gone.update((peer, view) for peer, view in self.peers.items() if peer not in views)
        for peer_id in (*views, *list(self._gone)[:-_MAX_GONE]):
            self._gone.pop(peer_id, None)
        new = [peer_id for peer_id in views if peer_id not in self.peers]
        self.peers = views
        self._heard = {p: heard for p, heard in self._heard.items() if heard[1] > now}
        self._lost = {p: expires for p, expires in self._lost.items() if p in views}
        return new

    def vouch(self, peers: Collection[str], for_s: float) -> None:
        """Notes that these peers have just taken part in a commit: for `for_s` they count as live in any case.

        While a part of the swarm is cut off, the DHT waits for nodes that do not answer, and records that are written
        in time arrive too late. Without this, peers that work together would count each other as gone.
        """
        self._vouched.update(dict.fromkeys(peers, time.monotonic() + for_s))
        for peer_id in peers:
            self._lost.pop(peer_id, None)
            view = self._gone.pop(peer_id, None)  # its record may have expired while the round was held
            if view is not None and view.progress.state != "leaving":
                self.peers.setdefault(peer_id, view)

    def hear_round(self, peer_id: str, round_number: int) -> None:
        """Notes the committed round that a peer has just reported in a call; its record may be older."""
        self._heard[peer_id] = round_number, time.monotonic() + _ANSWER_NEWER_S

    def lose(self, peer_id: str) -> None:
        """Notes that a peer did not answer: it is not live until it writes a newer record."""
        self._vouched.pop(peer_id, None)
        if peer_id in self.peers:
            self._lost[peer_id] = self.peers[peer_id].progress.expires

    def committed(self, took_part: Collection[str] = (), absent: Collection[str] = ()) -> None:
        """Notes that a round was committed just now, which restarts all token counts: whose work is in it (maybe this
        peer's), and which live peers in training were absent or delivered nothing.
        """
        self.committed_at = time.monotonic()
        if took_part or absent:
            self.reputation.committed(self.committed_at, {*took_part} - {self.me}, {*absent} - {self.me})

    def present(self) -> list[PeerView]:
        """All other peers with a live record, whatever they are doing."""
        now = time.monotonic()
        return [
            view
            for peer, view in self.peers.items()
            if self._lost.get(peer, -1.0) < view.progress.expires
            and self.admits(peer)
            and (now - view.seen_at <= 2 * self.progress_ttl_s or peer in self._vouched)
        ]

    def answering(self) -> list[PeerView]:
        """The present peers that have answered a call, which proves that a process is behind the record."""
        return [view for view in self.present() if self.reputation.has_answered(view.peer_id)]

    def training(self) -> list[PeerView]:
        """The present peers whose records say that they are training."""
        return [view for view in self.present() if view.progress.state == "training"]

    def absent(self, members: Collection[str]) -> set[str]:
        """Peers in training that are not among the members of a group, although they have answered a call."""
        answered = filter(self.reputation.has_answered, (view.peer_id for view in self.training()))
        return set(answered).difference(members)

    def electorate(self) -> list[PeerView]:
        """The other peers in training whose claims count; see reputation.py."""
        training = self.training()
        electorate = self.reputation.electorate(view.peer_id for view in training)
        return [view for view in training if view.peer_id in electorate]

    @property
    def defers(self) -> bool:
        """Returns True if this peer leaves leading rounds to its initial peers."""
        return self.reputation.defers(view.peer_id for view in self.training())

    def neighbours(self, window_s: float) -> list[Neighbour]:
        """The peers in training that may take part in a round, with how long the round waits for each of them."""
        training = {v.peer_id: v for v in self.training() if self.reputation.has_answered(v.peer_id)}
        training |= {view.peer_id: view for view in self.electorate()}
        wait_s = self.reputation.wait_times(training, window_s)
        electorate = self.reputation.electorate(training)
        return [
            Neighbour(peer, view.progress.reachable, in_electorate=peer in electorate, wait_s=wait_s[peer])
            for peer, view in training.items()
        ]

    def median_round(self, own_round: int) -> int:
        """The upper median of the committed rounds that the electorate reports, with `own_round` included.

        Not the maximum: one peer's claim must not move the swarm. With two peers it is the larger.
        """
        now = time.monotonic()
        heard = {peer: number for peer, (number, until) in self._heard.items() if until > now}
        rounds = [max(view.progress.round, heard.get(view.peer_id, 0)) for view in self.electorate()]
        return median_high([own_round, *rounds])

    def swarm_round(self, own_round: int) -> int:
        """The round that the swarm has committed, never below this peer's own."""
        return max(own_round, self.median_round(own_round))

    def swarm_tokens(self, at_round: int) -> int:
        """The lower median of the swarm's token counts that the electorate at this round reports; 0 without any."""
        present = self.present()
        electorate = self.reputation.electorate(view.peer_id for view in present)
        at_this_round = [view for view in present if view.peer_id in electorate and view.progress.round == at_round]
        counts = [view.progress.swarm_tokens for view in at_this_round]
        return median_low([count for count in counts if count] or [0])

    def data_positions(self) -> tuple[int, ...]:
        """Returns the furthest position of any peer of the electorate in each data set that the peers divide.

        The maximum avoids repeating what any of them has trained on. A false claim moves a newcomer to another place in
        the order, never to other data.
        """
        claims = [view.progress.data for view in self.electorate() if view.progress.data]
        length = max(map(len, claims), default=0)
        return tuple(max(claim[i] for claim in claims if len(claim) == length) for i in range(length))

    def dead_votes(self) -> tuple[dict[int, int], int]:
        """Returns how many of the electorate call each expert dead, and how many have judged; see routing_report.py."""
        claims = [view.progress.dead for view in self.electorate() if view.progress.dead is not None]
        return dict(count_claims(claims)), len(claims)

    def largest_step(self, own: int) -> int:
        """The most tokens per step that a peer is credited with: MAX_STEP_RATIO times the lower median, `own` included.

        Without the bound, one record with an absurd number would keep rounds from ever being due.
        """
        sizes = [own, *(view.progress.tokens_per_step for view in self.electorate())]
        return MAX_STEP_RATIO * median_low([size for size in sizes if size > 0] or [1])

    def tokens_per_step(self, own: int) -> int:
        """Sum of the other peers' tokens per step, each capped at `largest_step`."""
        limit = self.largest_step(own)
        return sum(min(view.progress.tokens_per_step, limit) for view in self.electorate())

    def tokens_since_commit(self, own_round: int, horizon_s: float) -> float:
        """Estimate of the tokens that the others have processed since the last commit.

        A record's count is extrapolated at the peer's own rate, for at most `horizon_s`.
        """
        now = time.monotonic()
        total = 0.0
        for view in self.electorate():
            progress = view.progress
            if progress.round >= own_round and view.seen_at >= self.committed_at:
                base, since = float(progress.tokens), view.seen_at
            else:
                base, since = 0.0, max(self.committed_at, view.seen_at - horizon_s)
            total += base + progress.tokens_per_second * min(now - since, horizon_s)
        return total
