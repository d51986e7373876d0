"""This peer's record of the others in the commits that it shared with them.

The record is kept in memory only: a peer that restarts begins with an empty one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO
from spes_swarm.protocol.rounds.conduct import Conduct
from spes_swarm.protocol.rounds.vouchers import ESTABLISHED_COMMITS, MAX_EARNED_RATIO, vouchers

# Consecutive commits in which a larger ratio must have been claimed and borne out before the earned ratio doubles.
SPAN = 16
# A newcomer's optimiser has no moments: with AdamW its first round moved it 2.8 times as far as the others, its second
# one 2.2 times.
NUM_FIRST_COMMITS = 5
_MAX_DOUBLINGS = 3  # to MAX_EARNED_RATIO
# A peer may reduce if its work is in one of the last rounds, and none of the parts that it reduced in them was missing.
RECENT_ROUNDS = 8
# After so many rounds in a row with missing parts of the shared layers, peers raise an alarm: a fault of this kind.
STANDSTILL_ROUNDS, STANDSTILL = 3, "standstill"
_FORGET_ROUNDS = 256  # a peer that took part in none of so many rounds is forgotten
# The remembered RMS decays by at most this factor per round: a round that is called early says little about it.
_FADING = 0.8


class TrackRecords:
    """Counts the others' commits and remembers what they claimed."""

    def __init__(self) -> None:
        self.conduct = Conduct()
        self.usual_rms = (0.0, 0.0)  # usual RMS of differences of the shared block and of experts
        self._commits: dict[str, int] = {}  # shared with each peer
        self._last_commit: dict[str, int] = {}
        self._delivered: dict[str, int] = {}  # the last round with a peer's work in it
        self._worked: Counter[str] = Counter()  # commits with a peer's work in them
        self._failed: dict[str, int] = {}  # the last round in which parts that a peer reduces were missing
        self.stalled_rounds = 0  # consecutive commits in which parts of the shared block were missing
        self._claimed: dict[str, list[float]] = {}  # ratios above the cap, in consecutive commits
        self._borne_out: dict[str, int] = {}  # number of these commits
        self._agreement: dict[str, float] = {}  # share of its deviations left, newer rounds weighing more

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
        self._delivered.update(dict.fromkeys(delivered, round_number))
        self._worked.update(delivered)
        self.reducers_failed(round_number, failed)
        shared, expert = (
            usual if now is None else max(_FADING * usual, now)
            for usual, now in zip(self.usual_rms, median_rms, strict=True)
        )
        self.usual_rms = shared, expert
        for peer_id, ratio in ratios:
            self._last_commit[peer_id] = round_number
            self._commits[peer_id] = self._commits.get(peer_id, 0) + 1
            if peer_id in in_order and ratio > MAX_WEIGHT_RATIO:
                self._borne_out[peer_id] = self._borne_out.get(peer_id, 0) + 1
                self._claimed[peer_id] = [*self._claimed.get(peer_id, []), ratio][-SPAN:]
            else:
                self._borne_out.pop(peer_id, None)
                self._claimed.pop(peer_id, None)
        for peer_id in [peer for peer, last in self._last_commit.items() if round_number - last > _FORGET_ROUNDS]:
            del self._commits[peer_id], self._last_commit[peer_id]
            self._borne_out.pop(peer_id, None)
            self._claimed.pop(peer_id, None)
            self._agreement.pop(peer_id, None)
            self._delivered.pop(peer_id, None)
            self._worked.pop(peer_id, None)

    def reducers_failed(self, round_number: int, peers: Iterable[str]) -> None:
        """Records which members did not deliver parts that they reduce, maybe in a round that was not committed."""
        recent = {peer: last for peer, last in self._failed.items() if round_number - last <= RECENT_ROUNDS}
        self._failed = recent | dict.fromkeys(peers, round_number)

    def may_reduce(self, peer_id: str, round_number: int) -> bool:
        """Returns True if a peer has delivered in recent rounds; see RECENT_ROUNDS."""
        delivered, failed = self._delivered.get(peer_id), self._failed.get(peer_id)
        oldest = round_number - RECENT_ROUNDS
        return delivered is not None and delivered >= oldest and (failed is None or failed < oldest)

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
        return (self._agreement.get(peer_id, 1.0) + left) / 2

    def note_agreement(self, peer_id: str, left: float) -> None:
        """Records the share of a commit."""
        self._agreement[peer_id] = self.agreement(peer_id, left)

    def is_new(self, peer_id: str) -> bool:
        """Returns True if this peer has shared fewer than NUM_FIRST_COMMITS commits with a peer."""
        return self._commits.get(peer_id, 0) < NUM_FIRST_COMMITS

    def rounds_since(self, peer_id: str, round_number: int) -> int | None:
        """Number of rounds from the last commit with a peer to this round; None if there was none."""
        last = self._last_commit.get(peer_id)
        return round_number - last if last is not None else None

    def earned(self, peer_id: str) -> float:
        """The ratio that a peer has earned: doubled for every SPAN commits, at most its smallest recent claim."""
        doublings = min(self._borne_out.get(peer_id, 0) // SPAN, _MAX_DOUBLINGS)
        if doublings == 0:
            return MAX_WEIGHT_RATIO
        return min(MAX_WEIGHT_RATIO * 2.0**doublings, MAX_EARNED_RATIO, *self._claimed[peer_id])

    def to_vouchers(self, round_number: int) -> bytes:
        """The vouchers for this peer's statement of a round."""
        reducers = {peer_id for peer_id in self._delivered if self.may_reduce(peer_id, round_number)}
        recent = {peer for peer, last in self._last_commit.items() if last >= round_number - RECENT_ROUNDS}
        return vouchers(
            {peer_id: self.earned(peer_id) for peer_id in self._borne_out},
            reducers,
            round_number,
            doubted=self.conduct.doubted(round_number) & self._last_commit.keys(),
            resting=self.conduct.resting(round_number) & recent,
            hiding=self.conduct.hiding(round_number) & self._last_commit.keys(),
            established={peer_id for peer_id in recent if self._worked[peer_id] >= ESTABLISHED_COMMITS},
            rates={peer_id: rate for peer_id, rate in self.conduct.rates().items() if peer_id in recent},
        )
