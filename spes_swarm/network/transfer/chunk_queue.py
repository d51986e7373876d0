"""Which chunks a newcomer still wants, and which donors it has asked for them. Pure: callers pass in the time.

Every chunk is requested from one donor, until an idle donor would be much faster, so that slow donors do not delay the
end. What a failed donor has not delivered goes back to the front.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

# An idle donor is asked, too, if a chunk has been outstanding for this many times as long as the idle one takes for a
# chunk. A donor as fast as the idle one has two chunks outstanding at a time, and so takes up to twice as long.
_OVERDUE = 3.0
_MIN_OVERDUE_S = 0.5  # times are not measured more precisely than this on a busy machine
_PACE_WEIGHT = 0.7  # of the past, in the moving average


class ChunkQueue:
    """The wanted chunks of one pass, in the order in which they are to be requested.

    `default_pace_s` is assumed, per chunk, of a donor that has delivered none yet.
    """

    def __init__(self, wanted: Iterable[int], default_pace_s: float) -> None:
        self._pending: dict[int, None] = dict.fromkeys(wanted)
        self._asked: dict[int, dict[str, float]] = {}  # chunk -> donor -> when
        self._able: dict[str, set[int]] = {}
        self._pace_s: dict[str, float] = {}
        self._default_pace_s = default_pace_s

    @property
    def finished(self) -> bool:
        """True if all chunks have arrived."""
        return not self._pending and not self._asked

    @property
    def remaining(self) -> set[int]:
        """Chunks that have not arrived."""
        return {*self._pending, *self._asked}

    def add_donor(self, donor: str, able: Collection[int]) -> None:
        """Adds a donor with those of the wanted chunks that it has."""
        self._able[donor] = set(able)

    def lacks(self, donor: str, chunks: Collection[int]) -> None:
        """Notes that a donor no longer has these chunks."""
        self._able[donor].difference_update(chunks)
        for number in chunks:
            self._give_back(donor, number)

    def take(self, donor: str, now: float) -> int | None:
        """Returns the next chunk to request from a donor, None if there is none at the moment."""
        able = self._able[donor]
        number = next((n for n in self._pending if n in able), None)
        if number is not None:
            del self._pending[number]
        else:
            overdue = [(since, n) for since, n in self._with_others(donor) if now - since >= self._limit_s(donor)]
            if not overdue:
                return None
            number = min(overdue)[1]
        self._asked.setdefault(number, {})[donor] = now
        return number

    def idle_s(self, donor: str, now: float) -> float | None:
        """Returns the seconds until a donor should `take` again, None if it has none of the remaining chunks.

        It should also do so whenever a chunk has been given back.
        """
        times = [since for since, _ in self._with_others(donor)]
        if not times:
            return None
        return max(0.0, min(times) + self._limit_s(donor) - now)

    def _with_others(self, donor: str) -> list[tuple[float, int]]:
        """Chunks requested from other donors only, each with the time of its latest request."""
        able = self._able[donor]
        return [(max(d.values()), n) for n, d in self._asked.items() if donor not in d and n in able]

    def _limit_s(self, donor: str) -> float:
        return max(_OVERDUE * self._pace_s.get(donor, self._default_pace_s), _MIN_OVERDUE_S)

    def measured(self, donor: str, seconds: float) -> None:
        """Notes how long a donor took for a chunk."""
        past_s = self._pace_s.get(donor, seconds)
        self._pace_s[donor] = _PACE_WEIGHT * past_s + (1 - _PACE_WEIGHT) * seconds

    def done(self, number: int) -> bool:
        """Notes that a chunk has arrived. Returns True if it was still wanted."""
        was_wanted = number in self._pending or number in self._asked
        self._pending.pop(number, None)
        self._asked.pop(number, None)
        return was_wanted

    def give_up(self, donor: str) -> None:
        """Forgets a donor; chunks requested from no other donor go back to the front."""
        self._able.pop(donor, None)
        for number in list(self._asked):
            self._give_back(donor, number)

    def _give_back(self, donor: str, number: int) -> None:
        asked: Mapping[str, float] = self._asked.get(number, {})
        if donor not in asked:
            return
        del self._asked[number][donor]
        if not self._asked[number]:
            del self._asked[number]
            self._pending = {number: None, **self._pending}
