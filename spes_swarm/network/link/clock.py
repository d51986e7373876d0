"""The swarm clock: one time for all peers of a run, whatever the clocks of their machines say.

Records in the DHT carry the time at which they expire, so peers must agree on what time it is. They agree among
themselves, without a time server. Who joins takes the time from the peers that it meets, before its first record; the
peers of a run compare their times once a minute and go by the median. What matters is only that they agree: a founder
whose clock is wrong makes a wrong time the swarm's time, and nothing suffers from it.

An offset is what a clock shows minus this machine's steady clock: unlike a difference to the swarm clock, it does not
change when that one is corrected while others are being asked.
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from statistics import median, median_high
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.rpc import Rpc

# Records live for many seconds, so this much disagreement does no harm. If smaller ones were corrected, two peers, of
# which the one that is behind follows the other, would drive each other forward by their errors of measurement.
TOLERANCE_S = 1.0
# The error of a sample is at most half its round trip: with this limit, no more than the tolerance.
CALL_TIMEOUT_S = 2 * TOLERANCE_S
NUM_SAMPLES = 4
MAX_PEERS_ASKED = 16
CHECK_EVERY_S = 60.0
# A clock that is ahead loses so many seconds in each second.
SLEW = 0.9
# Who is further ahead than this may see the others' records as expired: the clock is set back at once.
MAX_SLEW_S = 10.0
# No correction takes a clock further than this from where it began, or from its wall clock: records that were written
# by the time before it would otherwise claim to live longer than any may. (The TLS of libp2p does not even connect
# clocks that are further apart.)
MAX_TOTAL_S = 3600.0
MAX_TIME_S = 1e10
REPORTED_ERROR_S = 5.0


def wall_clock() -> float:
    """The clock of this machine in Unix seconds; it may be wrong, and be set at any time."""
    return time.time()


def steady_clock() -> float:
    """Seconds since some moment; nobody sets it. Unlike time.monotonic, it counts the time that a laptop sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SwarmClock:
    """The swarm's time, which is at first the wall clock's.

    Between corrections it runs with the steady clock: a wall clock that is set meanwhile does not move it.
    """

    def __init__(self) -> None:
        self._start(self.wall_offset)
        self._settled = self._offset

    def _start(self, offset: float, excess_s: float = 0.0) -> None:
        self._started = steady_clock()
        self._offset = offset
        self._excess_s = excess_s  # how much of the offset is to be lost again, little by little

    def _offset_at(self, steady: float) -> float:
        return self._offset - min(self._excess_s, SLEW * (steady - self._started))

    def now(self) -> float:
        """The swarm's time in Unix seconds."""
        steady = steady_clock()
        return steady + self._offset_at(steady)

    @property
    def offset(self) -> float:
        """The swarm's time minus the steady clock."""
        return self._offset_at(steady_clock())

    @property
    def wall_offset(self) -> float:
        """The wall clock minus the steady clock."""
        return wall_clock() - steady_clock()

    def settle(self, offsets: Collection[float]) -> None:
        """Takes the time from peers of the swarm, by any step: for a peer without a record that could expire by it.

        It goes by their median; when they are an even number, the wall clock decides between the two in the middle.
        """
        if offsets:
            votes = [*offsets] if len(offsets) % 2 else [*offsets, self.wall_offset]
            self._start(median(votes))
        self._settled = self._offset

    def correct(self, offsets: Mapping[str, float], voices: Collection[str] = ()) -> float:
        """Follows the other peers: the upper median of their offsets (by peer id) and its own.

        So one peer cannot move a swarm of three or more, and of two halves, or two peers, the one that is behind goes
        to the other's time: that lets no record expire before its time, as going back would for the other's records.
        Forward the clock is set at once, because its records have expired for those who are ahead. Backward it runs
        slower; only when it is so far ahead that the others seem to be gone, it is set back. (The expirations of its
        own records do not go back with it: a newer one must always expire later.) All corrections together stay within
        MAX_TOTAL_S.

        Args:
            offsets: what was measured; the word of just one peer is not taken when others have a voice, too.
            voices: all peers that have one; see standing.py.

        Returns:
            The step in seconds; zero if the clock goes on without one.
        """
        own = self.offset
        target = median_high([own, *offsets.values()])
        if not self._is_near(target) or (len(offsets) == 1 and not set(voices) <= offsets.keys()):
            return 0.0
        step_s = target - own
        if abs(step_s) <= TOLERANCE_S:
            self._start(own)  # whatever was still to be lost is not to be lost any more
            return 0.0
        if -MAX_SLEW_S <= step_s < 0:
            self._start(own, -step_s)
            return 0.0
        self._start(target)
        return step_s

    def _is_near(self, offset: float) -> bool:
        """Returns True if it is near where this peer began, or near its wall clock (the machine may have slept)."""
        return min(abs(offset - self._settled), abs(offset - self.wall_offset)) <= MAX_TOTAL_S


async def measure_offset(ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> float:
    """Offset of another peer's swarm clock, by the sample with the shortest round trip (Cristian 1989).

    Raises:
        OSError: no answer in time, or none at all.
        ProtocolError: (`malformed`) an answer that is no time.
    """
    samples: list[tuple[float, float]] = []
    for _ in range(NUM_SAMPLES):
        asked = steady_clock()
        try:
            answer = await ask()
        except TimeoutError:
            continue
        answered = steady_clock()
        samples.append((answered - asked, parse_time(answer) - (asked + answered) / 2))
    if not samples:
        raise TimeoutError("the peer did not tell its time")
    return min(samples)[1]


def parse_time(answer: Mapping[str, Any]) -> float:
    """The time in an answer of another peer, Unix seconds.

    Raises:
        ProtocolError: (`malformed`) there is none.
    """
    seconds = answer.get("time")
    if not (isinstance(seconds, float) and math.isfinite(seconds) and 0.0 < seconds < MAX_TIME_S):
        raise ProtocolError("malformed", "the answer to clock is not a time")
    return seconds


def give_to_hivemind(now: Callable[[], float]) -> None:
    """Makes the DHT of this process go by `now`: hivemind's modules have each imported their own name for time.time."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "hivemind" and vars(module).get("get_dht_time") is time.time:
            vars(module)["get_dht_time"] = now


class Timekeeper:
    """Keeps a peer's swarm clock with that of the others, and tells them its time.

    Attributes:
        clock: the swarm clock of this process.
    """

    def __init__(self, rpc: Rpc, run_id: str, me: str, on_fault: Callable[[str, ProtocolError], None]) -> None:
        self.clock = SwarmClock()
        self._rpc = rpc
        self._run_id = run_id
        self._me = me
        self._on_fault = on_fault
        self._reported = False

    async def serve(self) -> None:
        """Registers the service; until then, this peer's clock may be wrong and counts for nobody."""
        await self._rpc.serve("clock", self._serve_clock)
        self._report()

    async def _serve_clock(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        if request.get("run") != self._run_id:
            return {"error": "that is not the run of this peer"}
        return {"time": self.clock.now()}

    async def settle(self, peers: Collection[str]) -> None:
        """Takes the time from `peers`, as far as they know it; before this peer publishes anything."""
        self.clock.settle((await self._measure(peers)).values())

    async def check(self, voices: Collection[str]) -> float:
        """Compares with the peers that have a voice, and corrects; returns the step in seconds."""
        step_s = self.clock.correct(await self._measure(voices), voices)
        self._report()
        return step_s

    def until_check_s(self) -> float:
        """Time to the next check.

        All check when a minute of the swarm's time begins: peers that agree and find out that most others are at
        another time move together, and do not lose sight of each other.
        """
        return CHECK_EVERY_S - self.clock.now() % CHECK_EVERY_S

    async def _measure(self, peers: Collection[str]) -> dict[str, float]:
        async def measure(peer_id: str) -> tuple[str, float] | None:
            try:
                return peer_id, await measure_offset(
                    lambda: self._rpc.call(peer_id, "clock", {"run": self._run_id}, CALL_TIMEOUT_S)
                )
            except OSError:
                return None  # gone, of another run, or joining just now
            except ProtocolError as exc:
                self._on_fault(peer_id, exc)
                return None

        asked = random.sample(sorted(peers), min(len(peers), MAX_PEERS_ASKED))
        return dict(filter(None, await asyncio.gather(*(measure(peer_id) for peer_id in asked))))

    def _report(self) -> None:
        ahead_s = self.clock.wall_offset - self.clock.offset
        if abs(ahead_s) > REPORTED_ERROR_S and not self._reported:
            self._reported = True
            side = "ahead of" if ahead_s > 0 else "behind"
            self._on_fault(
                self._me,
                ProtocolError(
                    "clock",
                    f"this machine's clock is {abs(ahead_s):.1f} s {side} the swarm's time, which is used instead",
                ),
            )
