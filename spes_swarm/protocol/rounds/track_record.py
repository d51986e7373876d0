"""This peer's record of the others in the commits that it shared with them.

It outlives the process (storage/track_record_file.py). Otherwise, after most members have restarted at once, a few
hostile ones that vouch for each other would be the only ones that anybody trusts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO
from spes_swarm.protocol.rounds.conduct import Conduct, ConductRecord
from spes_swarm.protocol.rounds.vouchers import ESTABLISHED_COMMITS, MAX_EARNED_RATIO, vouchers

# Consecutive commits in which a larger ratio must have been claimed and borne out before the earned ratio doubles.
SPAN = 16
# A newcomer's optimiser has no moments: with AdamW its first round moved it 2.8 times as far as the others, its second
# one 2.2 times.
NUM_FIRST_COMMITS = 5
# After eight rounds without the others, clipping took a quarter of an honest member's deviation.
_ROUNDS_AWAY = 4
_MAX_DOUBLINGS = 3  # to MAX_EARNED_RATIO
# A peer may reduce if its work is in one of the last rounds, and none of the parts that it reduced in them was missing.
RECENT_ROUNDS = 8
# After so many rounds in a row with missing parts of the shared layers, peers raise an alarm: a fault of this kind.
STANDSTILL_ROUNDS, STANDSTILL = 3, "standstill"
_FORGET_ROUNDS = 256  # a peer that took part in none of so many rounds is forgotten
# The remembered RMS decays by at most this factor per round: a round that is called early says little about it.
_FADING = 0.8


@dataclass(slots=True)
class TrackRecord:
    """What is remembered of one peer. A new field needs a default, or older files cannot be read."""

    commits: int = 0  # shared with it
    last_commit: int | None = None  # of these
    delivered: int | None = None  # the last round with its work in it
    worked: int = 0  # commits with its work in them
    failed: int | None = None  # the last round in which parts that it reduces were missing
    claimed: list[float] = field(default_factory=list)  # ratios above the cap, in the last consecutive commits
    borne_out: int = 0  # number of these commits
    agreement: float = 1.0  # share of its deviations left, newer rounds weighing more


@dataclass(frozen=True, slots=True)
class Memory:
    """What a peer remembers of the others, by peer. A new field needs a default, or older files cannot be read."""

    round: int  # its last commit
    usual_rms: tuple[float, float]
    tracks: dict[str, TrackRecord]
    conduct: dict[str, ConductRecord]


class TrackRecords:
    """Counts the others' commits and remembers what they claimed."""

    def __init__(self) -> None:
        self.conduct = Conduct()
        self.usual_rms = (0.0, 0.0)  # usual RMS of differences of the shared block and of experts
        self.stalled_rounds = 0  # consecutive commits in which parts of the shared block were missing
        self._round = 0  # of the last commit
        self._peers: dict[str, TrackRecord] = {}
        self._has_committed = False  # in this session
        self._met: set[str] = set()  # those in these commits

    @property
    def memory(self) -> Memory:
        """What this peer remembers, for the next session; not a copy."""
        return Memory(self._round, self.usual_rms, self._peers, self.conduct.known)

    def recall(self, memory: Memory) -> None:
        """Remembers what was known at the end of the last session; `resume_at` follows.

        Results that were missing are forgotten, since this peer may have been cut off before the end.
        """
        self._round, self.usual_rms = memory.round, memory.usual_rms
        self._peers = {peer: replace(record, failed=None) for peer, record in memory.tracks.items()}
        self.conduct.recall(memory.conduct, memory.round)

    def resume_at(self, round_number: int) -> None:
        """Takes this round as the one after the last commit, until there is a commit in this session.

        A peer may go on from an older checkpoint, and others may have held rounds without it. If what it remembers
        aged with these, a few that stay would be rid of doubts, and the only ones that anybody trusts.
        """
        rounds = round_number - 1 - self._round
        if self._has_committed or rounds == 0:
            return
        self._round += rounds
        for record in self._peers.values():
            record.last_commit = None if record.last_commit is None else record.last_commit + rounds
            record.delivered = None if record.delivered is None else record.delivered + rounds
            record.failed = None if record.failed is None else record.failed + rounds
        self.conduct.move(rounds)

    def _of(self, peer_id: str) -> TrackRecord:
        return self._peers.setdefault(peer_id, TrackRecord())

    def _known(self, peer_id: str) -> TrackRecord:
        return self._peers.get(peer_id) or TrackRecord()

    def committed(
        self,
        round_number: int,
        ratios: Iterable[tuple[str, float]],
        in_order: Collection[str],
        median_rms: tuple[float, float | None] = (0.0, 0.0),
        *,
        delivered: Collection[str] = (),
        failed: Collection[str] = (),
        stalled: bool = False,
    ) -> None:
        """Records a commit.

        Args:
            round_number: of the commit.
            ratios: for each member, its claimed tokens over the group's lower median.
            in_order: the members whose contributions are in the results and bear out their claims.
            median_rms: lower medians of the stated RMS, of the shared block and of experts; None if the experts did
                not take part, so that what is remembered is the length of a whole difference.
            delivered: the members whose contributions are in the results.
            failed: the members that did not deliver parts that they reduce.
            stalled: parts of the shared block were missing.
        """
        self.stalled_rounds = self.stalled_rounds + 1 if stalled else 0
        self._round, self._has_committed = round_number, True
        for record in map(self._of, delivered):
            record.delivered = round_number
            record.worked += 1
        shared, expert = (
            usual if now is None else max(_FADING * usual, now)
            for usual, now in zip(self.usual_rms, median_rms, strict=True)
        )
        self.usual_rms = shared, expert
        for peer_id, ratio in ratios:
            self._met.add(peer_id)
            record = self._of(peer_id)
            record.last_commit = round_number
            record.commits += 1
            if peer_id in in_order and ratio > MAX_WEIGHT_RATIO:
                record.borne_out += 1
                record.claimed = [*record.claimed, ratio][-SPAN:]
            else:
                record.borne_out, record.claimed = 0, []
        self.reducers_failed(round_number, failed)
        for peer_id, record in list(self._peers.items()):
            if record.last_commit is not None and round_number - record.last_commit > _FORGET_ROUNDS:
                del self._peers[peer_id]
                self._met.discard(peer_id)

    def reducers_failed(self, round_number: int, peers: Iterable[str]) -> None:
        """Records which members did not deliver parts that they reduce, maybe in a round that was not committed."""
        for record in map(self._of, peers):
            record.failed = round_number
        for peer_id, record in list(self._peers.items()):
            if record.last_commit is None and (record.failed is None or round_number - record.failed > RECENT_ROUNDS):
                del self._peers[peer_id]  # it has never been in a commit

    def may_reduce(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer has delivered in recent rounds; see RECENT_ROUNDS."""
        record, oldest = self._known(peer_id), round_number - RECENT_ROUNDS
        has_delivered = record.delivered is not None and record.delivered >= oldest
        return has_delivered and (record.failed is None or record.failed < oldest)

    def standstill(self) -> ProtocolError | None:
        """Returns an alarm after every STANDSTILL_ROUNDS commits in a row without parts of the shared block."""
        if self.stalled_rounds == 0 or self.stalled_rounds % STANDSTILL_ROUNDS:
            return None
        what = f"parts of the shared layers have not been averaged for {self.stalled_rounds} rounds in a row"
        return ProtocolError(STANDSTILL, f"{what}; `missing` faults name who failed to deliver them")

    def agreement(self, peer_id: str, left: float) -> float:
        """The usual share of a peer's deviations that clipping leaves: half this round's `left`, half so far.

        One round with few parts says little: honest steps on little text occasionally deviate far.
        """
        return (self._known(peer_id).agreement + left) / 2

    def note_agreement(self, peer_id: str, left: float) -> None:
        """Records the share of a commit."""
        self._of(peer_id).agreement = self.agreement(peer_id, left)

    def is_new(self, peer_id: str) -> bool:
        """Returns True if this peer has shared fewer than NUM_FIRST_COMMITS commits with a peer."""
        return self._known(peer_id).commits < NUM_FIRST_COMMITS

    def may_deviate(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer is new, or was away, or this peer was: its work may point elsewhere."""
        since = self.rounds_since(peer_id, round_number)
        return self.is_new(peer_id) or since is None or not 0 < since <= _ROUNDS_AWAY

    def rounds_since(self, peer_id: str, round_number: int) -> int | None:
        """Number of rounds from the last commit with a peer to this round; None if there was none in this session.

        Since an earlier one, either peer may have gone back to an older checkpoint.
        """
        last = self._known(peer_id).last_commit if peer_id in self._met else None
        return round_number - last if last is not None else None

    def earned(self, peer_id: str) -> float:
        """The ratio that a peer has earned: doubled for every SPAN commits, at most its smallest recent claim."""
        record = self._known(peer_id)
        doublings = min(record.borne_out // SPAN, _MAX_DOUBLINGS)
        if doublings == 0:
            return MAX_WEIGHT_RATIO
        return min(MAX_WEIGHT_RATIO * 2.0**doublings, MAX_EARNED_RATIO, *record.claimed)

    def to_vouchers(self, round_number: int) -> bytes:
        """The vouchers for this peer's statement of a round."""
        last_commits = {
            peer: record.last_commit for peer, record in self._peers.items() if record.last_commit is not None
        }
        recent = {peer for peer, last in last_commits.items() if last >= round_number - RECENT_ROUNDS}
        return vouchers(
            {peer_id: self.earned(peer_id) for peer_id, record in self._peers.items() if record.borne_out},
            {peer_id for peer_id in self._peers if self.may_reduce(peer_id, round_number)},
            round_number,
            doubted=self.conduct.doubted(round_number) & last_commits.keys(),
            resting=self.conduct.resting(round_number) & recent,
            ignored=self.conduct.ignored(round_number) & last_commits.keys(),
            established={peer_id for peer_id in recent if self._peers[peer_id].worked >= ESTABLISHED_COMMITS},
            rates={peer_id: rate for peer_id, rate in self.conduct.rates().items() if peer_id in recent},
        )
