"""How well the others have done their part in recent exchanges: whom to doubt, whom to wait for, and how fast they are.

A member that answers just before each deadline, whatever the deadline is, would slow all rounds for ever. So what
counts as late is decided by the others: a member is late if it took more than twice as long as the median one, and a
small share of a round on top. One that is late now and then costs nothing but that time. One that is late in two of
its last eight exchanges is no longer waited for beyond that measure; what has arrived from it until then counts. A
member with a slow line is late in this sense through no fault of its own: its work is in the rounds as far as it
arrives, and nothing else follows.

Doubts are another matter. A member is doubted for what no slow line explains: work or results that never came, results
or contributions outside their bounds, and a round that it led and did not close. They are one peer's opinion, and have
an effect only where most agree; see vouchers.without_duty.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

_REMEMBERED = 8  # exchanges
_TOLERATED_LATE, _TOLERATED_FAULTS = 1, 2  # of these
# A peer whose results were late twice in _REMEMBERED rounds reduces nothing in the next ones.
_REST_ROUNDS = 2 * _REMEMBERED
# Leading is a duty of one round in as many as there are members, and a leader that fails costs a whole window.
_LEADER_REMEMBERED = 64
_MAX_PEERS = 4096  # remembered; those met least recently are forgotten first
_NOISE_S = 0.25  # times that are shorter say more about the other processes of a machine than about a line
_LATE_FACTOR = 2.0  # see `limit_s`
_PACES = 3  # the usual pace is the median of so many exchanges: one that is slow for a reason changes it at once
# Faults that are held against a peer. A stream that could not be opened is not: it may be this peer's line.
FAULTS = frozenset({"lost", "missing", "clipped", "norm", "weight", "form", "part", "shape", "malformed", "leader"})


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one member delivered to this peer in an exchange."""

    elements: int  # values that it sends in the exchange, to all reducers together
    share: float  # of what it sends to this peer: how much has arrived
    num_bytes: float  # that it has sent to all reducers meanwhile, if they have got as much as this peer
    contributed_s: float  # when the last of its contributions arrived, in seconds after the beginning; inf: not all


@dataclass(slots=True)
class _Record:
    late: deque[bool] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    failed: deque[str] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # kind of fault, "" for none
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # Mbit/s
    late_results: int | None = None  # the last round in which its results were late
    rests_until: int = 0  # it reduces nothing before this round
    stalled: int | None = None  # the last round that it led and did not close


def limit_s(usual_s: float, slack_s: float) -> float:
    """What takes longer than this is late, in seconds."""
    return _LATE_FACTOR * usual_s + slack_s


def late(times_s: Mapping[str, float], usual_s: float, slack_s: float) -> set[str]:
    """Those that took more than twice as long as the median one, or as is usual, and `slack_s` on top."""
    if not times_s:
        return set()
    limit = limit_s(max(usual_s, median_low(times_s.values())), slack_s)
    return {peer for peer, seconds in times_s.items() if seconds > limit}


class Conduct:
    """One peer's record of the others' conduct, kept in memory only."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Record] = OrderedDict()
        self._faults: dict[str, str] = {}  # of the round under way
        self._paces: deque[float] = deque(maxlen=_PACES)

    def _of(self, peer_id: str) -> _Record:
        record = self._peers.setdefault(peer_id, _Record())
        self._peers.move_to_end(peer_id)
        while len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        return record

    def note_fault(self, peer_id: str, kind: str, round_number: int) -> None:
        """Notes a fault of a peer in the round under way; one that is not in FAULTS changes nothing."""
        if kind == "leader":
            self._of(peer_id).stalled = round_number
        elif kind in FAULTS:
            self._faults.setdefault(peer_id, kind)

    def exchanged(
        self,
        round_number: int,
        deliveries: Mapping[str, Delivery],
        results_s: Mapping[str, float],
        *,
        usual_s: float,
        slack_s: float,
        waited_s: float,
    ) -> None:
        """Notes the end of an exchange, with all others that were in its group.

        Args:
            round_number: of the exchange.
            deliveries: of each member that owed contributions to this peer.
            results_s: of each reducer, when the last of its results arrived here; inf if some did not.
            usual_s: the usual time of this exchange by the group's statements; 0 if unknown.
            slack_s: what may be taken longer; see `late`.
            waited_s: for how long contributions were awaited at most.
        """
        contributed_s = {peer: delivery.contributed_s for peer, delivery in deliveries.items()}
        for peer in contributed_s.keys() | results_s.keys() | self._faults.keys():
            self._of(peer).failed.append(self._faults.get(peer, ""))
        self._faults = {}
        late_contributors = late(contributed_s, usual_s, slack_s)
        for peer, delivery in deliveries.items():
            record = self._of(peer)
            record.late.append(peer in late_contributors)
            if delivery.share > 0:
                took_s = max(min(delivery.contributed_s, waited_s), _NOISE_S)
                record.rates.append(8e-6 * delivery.num_bytes / took_s)
        for peer in late(results_s, usual_s, slack_s):
            record = self._of(peer)
            if record.late_results is not None and round_number - record.late_results <= _REMEMBERED:
                record.rests_until = round_number + _REST_ROUNDS
            record.late_results = round_number
        # Whoever did not deliver all would have taken longer: if that holds for most, the next exchange waits longer.
        paces = [min(d.contributed_s, 2 * waited_s) / d.elements * 1e6 for d in deliveries.values() if d.elements > 0]
        if paces:
            self._paces.append(median_low(paces))

    @property
    def pace(self) -> float:
        """Seconds that the median member recently took for 10^6 values that it sends; 0 if nothing was measured."""
        return float(median(self._paces)) if self._paces else 0.0

    def is_late(self, peer_id: str) -> bool:
        """Returns True if a peer's contributions were late more often than may happen."""
        record = self._peers.get(peer_id)
        return record is not None and sum(record.late) > _TOLERATED_LATE

    def rests(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer's results were late more often than may happen: it should reduce nothing."""
        record = self._peers.get(peer_id)
        return record is not None and round_number < record.rests_until

    def doubts(self, peer_id: str, round_number: int) -> tuple[str, ...]:
        """Why a peer is doubted in a round: the kinds of its faults; none if it is not."""
        record = self._peers.get(peer_id)
        if record is None:
            return ()
        kinds = [kind for kind in record.failed if kind]
        stalled = record.stalled is not None and round_number - record.stalled <= _LEADER_REMEMBERED
        return tuple(sorted({*(kinds if len(kinds) > _TOLERATED_FAULTS else ()), *(["leader"] if stalled else ())}))

    def doubted(self, round_number: int) -> set[str]:
        """The peers that are doubted in a round."""
        return {peer_id for peer_id in self._peers if self.doubts(peer_id, round_number)}

    def rates(self) -> dict[str, float]:
        """The usual upload rate of each peer that was measured, in Mbit/s."""
        return {peer: float(median_low(r.rates)) for peer, r in self._peers.items() if r.rates}

    def forget_round(self) -> None:
        """Drops the faults of a round that was not committed: then it is the group that has failed."""
        self._faults = {}
