"""How well the others have done their part in recent exchanges: whom to doubt, whom to wait for, and how fast they are.

A member that answers just before each deadline, whatever the deadline is, would slow all rounds for ever. So what
counts as late is decided by the others: a member is late if it took more than twice as long as the median one, and a
small share of a round on top. One that is late in two of its last eight exchanges is no longer waited for beyond that
measure; what has arrived from it until then counts. A reducer waits longer, for whomever, in two of eight exchanges at
most: its own results are late then, and one whose results are late in three of eight rests from reducing.

A member with a slow line is late in this sense through no fault of its own: its work is in the rounds as far as it
arrives, and nothing else follows. Doubts are another matter. A member is doubted for what no slow line explains: work
or results that never came, results or contributions outside their bounds, rounds that it led and did not close, and
work that it hides from auditors. One of which a lie is proven is doubted until it is pardoned.
Doubts are one peer's opinion, and have an effect only where most agree; see vouchers.py.

A member whose work is included in a result and that does not show it to auditors protects the reducer, which may be
itself. One crash is such a silence, too. But a peer that has crashed comes back as another process with another signing
key, so a peer *hides* only after several silences with the key that it has, or after many: those with other keys, or
with the excuse that it has no such commit, count less. One that hides is doubted, and if most say so, its work does
not count: all the work that does can be audited.

Neither does the work of a member that *opposes* the others: what it sent for the shared layers of several rounds points
against this peer's own work and most others', where these agree (see averaging/agreement.py), or is next to nothing
for the tokens that it claims. Clipping takes only a part of its harm away, and nothing from experts with one or two
holders. A single part says little: text in another script than all others' pulls at some rows of the embedding in the
other direction.

If a commit is taken back (see taking_back.py), nothing shows which of its reducers did harm, if any. Half of them rest:
those that reduced in the largest number of such commits since a commit of theirs last stood, and of equals a draw by
hash. The rest doubles with every such commit. So liars soon reduce nothing, though nobody knows who they are.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

from blake3 import blake3

from spes_swarm.protocol.admission.exclusion import Exclusions

_REMEMBERED = 8  # exchanges, or rounds
# Of these: how often a member may be late, a reducer may wait for somebody, its results may be late, a peer may fail.
_TOLERATED_LATE, _TOLERATED_WAITS, _TOLERATED_RESULTS, _TOLERATED_FAULTS = 1, 2, 2, 2
_REST_ROUNDS = 2 * _REMEMBERED  # in which a peer reduces nothing whose results were late too often
_MAX_DOUBLINGS = 6  # of the rest after commits that were taken back: to a thousand rounds
# Leading is a duty of one round in as many as there are members, and a leader that fails costs a whole window.
_LEADER_REMEMBERED, _TOLERATED_STALLS = 64, 1
# Rounds in which work was not shown: of the last 64, so many with the present key, and so many in all, are tolerated.
_SILENCE_REMEMBERED, _TOLERATED_SILENCES, _TOLERATED_ALL_SILENCES = 64, 2, 8
# A peer opposes the others if its opposition is larger than this on average, over at least so many parts in so many of
# the last rounds. That is remembered for as long as silences are.
_MATERIAL_OPPOSITION, _OPPOSED_PARTS, _OPPOSED_ROUNDS, _OPPOSITION_REMEMBERED = 0.5, 16, 4, 16
_MAX_PEERS = 4096  # remembered; those met least recently are forgotten first
_NOISE_S = 0.25  # times that are shorter say more about the other processes of a machine than about a line
_LATE_FACTOR = 2.0  # see `limit_s`
_PACES = 3  # the usual pace is the median of so many exchanges: one that is slow for a reason changes it at once
# Faults that are held against a peer. A stream that could not be opened is not: it may be this peer's line.
FAULTS = frozenset({"lost", "missing", "clipped", "norm", "weight", "form", "part", "shape", "malformed", "signature"})


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one member delivered to this peer in an exchange."""

    elements: int  # values that it sends in the exchange, to all reducers together
    share: float  # of what it sends to this peer: how much has arrived
    num_bytes: float  # that it has sent to all reducers meanwhile, if they have got as much as this peer
    contributed_s: float  # when the last of its contributions arrived, in seconds after the beginning; inf: not all


class _Silence(NamedTuple):
    """A round whose work a peer did not show, the key that it had (empty: it excused itself), and the reducers."""

    round: int
    key: bytes
    reducers: frozenset[str]


@dataclass(slots=True)
class ConductRecord:
    """What is remembered of one peer. A new field needs a default, or older files cannot be read."""

    late: deque[bool] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))  # Mbit/s
    # Rounds in which its results were late, it failed (with the kind of fault), and it led without closing the group.
    late_results: deque[int] = field(default_factory=lambda: deque(maxlen=_TOLERATED_RESULTS + 1))
    failed: deque[tuple[int, str]] = field(default_factory=lambda: deque(maxlen=_TOLERATED_FAULTS + 1))
    stalled: deque[int] = field(default_factory=lambda: deque(maxlen=_TOLERATED_STALLS + 1))
    silences: deque[_Silence] = field(default_factory=lambda: deque(maxlen=_TOLERATED_ALL_SILENCES + 1))
    # Its opposition in the last rounds: the round, the sum over parts, and their number.
    opposition: deque[tuple[int, float, int]] = field(default_factory=lambda: deque(maxlen=_OPPOSITION_REMEMBERED + 1))
    opposes_until: int = 0  # it opposes the others before this round
    key: bytes = b""  # with which it signs
    rests_until: int = 0  # it reduces nothing before this round
    taken_back: int = 0  # commits with its results that were taken back, since the last one that stood

    def moved(self, rounds: int, until: float = math.inf) -> ConductRecord:
        """The same, so many rounds later, without what happened after the round `until`."""
        record = ConductRecord(key=self.key, rests_until=self.rests_until + rounds, taken_back=self.taken_back)
        record.late.extend(self.late)
        record.rates.extend(self.rates)
        record.late_results.extend(number + rounds for number in self.late_results if number <= until)
        record.failed.extend((number + rounds, kind) for number, kind in self.failed if number <= until)
        record.stalled.extend(number + rounds for number in self.stalled if number <= until)
        opposition = (each for each in self.opposition if each[0] <= until)
        record.opposition.extend((number + rounds, total, parts) for number, total, parts in opposition)
        record.opposes_until = self.opposes_until + rounds
        silences = (silence for silence in self.silences if silence.round <= until)
        record.silences.extend(silence._replace(round=silence.round + rounds) for silence in silences)
        return record


def limit_s(usual_s: float, slack_s: float) -> float:
    """What takes longer than this is late, in seconds."""
    return _LATE_FACTOR * usual_s + slack_s


def late(times_s: Mapping[str, float], trusted: Collection[str], usual_s: float, slack_s: float) -> set[str]:
    """Those that took more than twice as long as the median trusted one, or as is usual, and `slack_s` on top."""
    measure = [seconds for peer, seconds in times_s.items() if peer in trusted]
    if not measure:
        return set()
    limit = limit_s(max(usual_s, median_low(measure)), slack_s)
    return {peer for peer, seconds in times_s.items() if seconds > limit}


class Conduct:
    """One peer's record of the others' conduct."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, ConductRecord] = OrderedDict()  # those met last come last
        self._others: frozenset[str] = frozenset()  # the other members of the exchange under way
        self._faults: dict[str, str] = {}  # their faults in it
        self._reducers: frozenset[str] = frozenset()  # of the last commit
        self.exclusions = Exclusions()
        self._waits: deque[bool] = deque(maxlen=_REMEMBERED)  # whether this peer waited for a late member
        # By the order of magnitude of what a member sends: without experts, a round is short.
        self._paces: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_PACES))

    @property
    def known(self) -> dict[str, ConductRecord]:
        """What is remembered of each peer."""
        return self._peers

    def recall(self, known: Mapping[str, ConductRecord], last_commit: int) -> None:
        """Remembers what was known at the end of the last session, in which this was the last commit.

        What happened after it is left out: this peer may have been cut off, or the others about to end as well.
        """
        self._peers = OrderedDict((peer, record.moved(0, last_commit)) for peer, record in known.items())
        for record in self._peers.values():
            record.taken_back = 0  # the reducers of the last commit, with which it ends, are not remembered

    def move(self, rounds: int) -> None:
        """Takes all as having happened so many rounds later."""
        self._peers = OrderedDict((peer, record.moved(rounds)) for peer, record in self._peers.items())

    def _of(self, peer_id: str) -> ConductRecord:
        record = self._peers.setdefault(peer_id, ConductRecord())
        self._peers.move_to_end(peer_id)
        while len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        return record

    def note_fault(self, peer_id: str, kind: str) -> None:
        """Notes a fault of a member of the exchange under way; those of others, or not in FAULTS, change nothing."""
        if kind in FAULTS and peer_id in self._others:
            self._faults.setdefault(peer_id, kind)

    def note_stall(self, leader: str, round_number: int) -> None:
        """Notes that a leader did not close the group of a round."""
        stalled = self._of(leader).stalled
        if round_number not in stalled:
            stalled.append(round_number)

    def note_silence(self, peer_id: str, round_number: int, key: bytes, reducers: Collection[str] = ()) -> None:
        """Notes that a peer, with this signing key, did not show its contributions to a round.

        Args:
            peer_id: of the contributor.
            round_number: of the commit.
            key: its signing key; empty if it said that it had no such commit.
            reducers: those that have named the contributions. A liar can name some that were never made, so if all of
                them turn out to be culprits, the silence does not count.
        """
        record = self._of(peer_id)
        record.key = record.key or key
        if all(silence.round != round_number for silence in record.silences):
            record.silences.append(_Silence(round_number, key, frozenset(reducers)))

    def note_key(self, peer_id: str, key: bytes) -> None:
        """Notes the signing key that a peer has: it is another one in each process."""
        record = self._peers.get(peer_id)  # strangers are not remembered for their keys
        if record is not None:
            record.key = key

    def hides(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer hides its work from auditors, as far as this one has seen before a round."""
        record = self._peers.get(peer_id)
        if record is None:
            return False
        keys = [
            silence.key
            for silence in record.silences
            if round_number - silence.round <= _SILENCE_REMEMBERED
            and not (silence.reducers and all(map(self.exclusions.is_culprit, silence.reducers)))
        ]
        with_this_key = keys.count(record.key) if record.key else 0
        return with_this_key > _TOLERATED_SILENCES or len(keys) > _TOLERATED_ALL_SILENCES

    def note_opposition(self, peer_id: str, round_number: int, found: Sequence[float]) -> None:
        """Notes a peer's opposition in parts of a commit; see `reducing.opposition`.

        What was found in earlier commits, which this one has not taken back, decides whether it opposes the others.
        """
        record = self._of(peer_id)
        before = record.opposition.pop() if record.opposition and record.opposition[-1][0] == round_number else None
        _, total, parts = before or (round_number, 0.0, 0)
        record.opposition.append((round_number, total + sum(found), parts + len(found)))
        recent = [each for each in record.opposition if 0 < round_number - each[0] <= _OPPOSITION_REMEMBERED]
        total, parts = sum(each[1] for each in recent), sum(each[2] for each in recent)
        is_sure = len(recent) >= _OPPOSED_ROUNDS and parts >= _OPPOSED_PARTS
        if is_sure and total > _MATERIAL_OPPOSITION * parts:
            record.opposes_until = round_number + _SILENCE_REMEMBERED + 1

    def opposes(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer's work has pointed against the others' in several rounds before this one."""
        record = self._peers.get(peer_id)
        # A peer may go back to an older checkpoint.
        return record is not None and 0 < record.opposes_until - round_number <= _SILENCE_REMEMBERED

    def note_commit(self, reducers: Iterable[str]) -> None:
        """Notes a commit with its reducers; the one before it was not taken back."""
        for peer_id in self._reducers:
            self._of(peer_id).taken_back = 0
        self._reducers = frozenset(reducers)

    def note_return(self, round_number: int, group_id: bytes, taken_back: int) -> None:
        """Notes that a round has taken back the last commit, of the round `taken_back`."""
        reducers, self._reducers = self._reducers, frozenset()
        for peer_id in reducers:
            self._of(peer_id).taken_back += 1
        for record in self._peers.values():  # what most of them did in it was harm
            while record.opposition and record.opposition[-1][0] >= taken_back:
                record.opposition.pop()
        drawn = {peer_id: blake3(group_id + peer_id.encode()).digest() for peer_id in reducers}
        ranked = sorted(reducers, key=lambda peer_id: (-self._of(peer_id).taken_back, drawn[peer_id]))
        for record in map(self._of, ranked[: (len(ranked) + 1) // 2]):
            rest = _REST_ROUNDS << min(record.taken_back - 1, _MAX_DOUBLINGS)
            record.rests_until = max(record.rests_until, round_number + rest)

    def begin(self, others: Iterable[str]) -> None:
        """Notes that an exchange with these other members begins."""
        self._others, self._faults = frozenset(others), {}

    def exchanged(
        self,
        round_number: int,
        deliveries: Mapping[str, Delivery],
        results_s: Mapping[str, float],
        *,
        trusted: Collection[str],
        usual_s: float,
        slack_s: float,
        passed_s: float,
        waited: bool = False,
    ) -> None:
        """Notes the end of an exchange.

        Args:
            round_number: of the exchange.
            deliveries: of each member that owed contributions to this peer.
            results_s: of each reducer, when the last of its results arrived here; inf if some did not.
            trusted: those that may be a measure for the others; see vouchers.may_reduce.
            usual_s: the usual time of this exchange by the group's statements; 0 if unknown.
            slack_s: what may be taken longer; see `late`.
            passed_s: how long the exchange took.
            waited: this peer, as a reducer, waited for a member that was late.
        """
        self._record_faults(round_number)
        self._waits.append(waited)
        contributed_s = {peer: delivery.contributed_s for peer, delivery in deliveries.items()}
        late_contributors = late(contributed_s, trusted, usual_s, slack_s)
        for peer, delivery in deliveries.items():
            record = self._of(peer)
            record.late.append(peer in late_contributors)
            if delivery.share > 0:
                took_s = max(min(delivery.contributed_s, passed_s), _NOISE_S)
                record.rates.append(8e-6 * delivery.num_bytes / took_s)
        for peer in late(results_s, trusted, usual_s, slack_s):
            record = self._of(peer)
            record.late_results.append(round_number)
            if len(record.late_results) > _TOLERATED_RESULTS and round_number - record.late_results[0] < _REMEMBERED:
                record.rests_until = round_number + _REST_ROUNDS
        # Whoever did not deliver all would have taken longer: if that holds for most, the next exchange waits longer.
        measure = [deliveries[peer] for peer in deliveries if peer in trusted and deliveries[peer].elements > 0]
        if measure:
            paces = [1e6 * min(delivery.contributed_s, 2 * passed_s) / delivery.elements for delivery in measure]
            self._paces[max(delivery.elements for delivery in measure).bit_length()].append(median_low(paces))

    def _record_faults(self, round_number: int) -> None:
        failed, self._faults = self._faults, {}
        if 2 * len(failed) < max(len(self._others), 3):  # with half of them gone, this peer itself may be cut off
            for peer, kind in failed.items():
                self._of(peer).failed.append((round_number, kind))

    @property
    def pace(self) -> float:
        """Seconds that the median member recently took for 10^6 values that it sends; 0 if nothing was measured."""
        return float(median(self._paces[max(self._paces)])) if self._paces else 0.0

    @property
    def may_wait(self) -> bool:
        """Returns True if this peer may wait for a member that is late for once."""
        return sum(self._waits) < _TOLERATED_WAITS

    def is_late(self, peer_id: str) -> bool:
        """Returns True if a peer's contributions were late more often than may happen."""
        record = self._peers.get(peer_id)
        return record is not None and sum(record.late) > _TOLERATED_LATE

    def resting(self, round_number: int) -> set[str]:
        """The peers that should reduce nothing in a round, since their results were late more often than may happen."""
        return {peer_id for peer_id, record in self._peers.items() if round_number < record.rests_until}

    def doubts(self, peer_id: str, round_number: int) -> tuple[str, ...]:
        """Why a peer is doubted in a round: the kinds of its faults; none if it is not."""
        reasons = {"proven"} if self.exclusions.is_culprit(peer_id) else set()
        record = self._peers.get(peer_id)
        if record is not None:
            recent = [kind for number, kind in record.failed if round_number - number <= _REMEMBERED]
            if len(recent) > _TOLERATED_FAULTS:
                reasons |= set(recent)
            stalls = [number for number in record.stalled if round_number - number <= _LEADER_REMEMBERED]
            if len(stalls) > _TOLERATED_STALLS:
                reasons.add("leader")
            if self.hides(peer_id, round_number):
                reasons.add("audit")
            if self.opposes(peer_id, round_number):
                reasons.add("opposition")
        return tuple(sorted(reasons, key=lambda kind: (kind in FAULTS, kind)))  # the rarer and graver ones first

    def doubted(self, round_number: int) -> set[str]:
        """The peers that are doubted in a round."""
        return {peer_id for peer_id in (*self._peers, *self.exclusions.culprits) if self.doubts(peer_id, round_number)}

    def ignored(self, round_number: int) -> set[str]:
        """The peers whose work should not count: they hide it from auditors, or oppose the others."""
        return {p for p in self._peers if self.hides(p, round_number) or self.opposes(p, round_number)}

    def rates(self) -> dict[str, float]:
        """The usual upload rate of each peer that was measured, in Mbit/s."""
        return {peer: float(median_low(r.rates)) for peer, r in self._peers.items() if r.rates}
