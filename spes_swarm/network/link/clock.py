"""The swarm clock: one time for all peers of a run, whatever the clocks of their machines show.

Records in the DHT carry the time at which they expire, so peers must agree on the time. They agree among themselves,
without a time server. A joining peer takes the time from the peers that it meets, before it writes its first record.
The peers of a run compare their times once a minute and follow the median. Only agreement matters: if a founder's clock
is wrong, the wrong time becomes the swarm's time, and does no harm.

An offset is the time of a clock minus that of this machine's steady clock. Unlike a difference from the swarm clock, it
does not change if the swarm clock is corrected during a measurement.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from statistics import median, median_high
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import FaultSink

# Records live for many seconds, so this much disagreement does no harm. If smaller offsets were corrected, two peers
# would drive each other forward by their measurement errors, since the one that is behind follows the other.
TOLERANCE_S = 1.0
# The error of a sample is at most half its round trip: with this limit, no more than the tolerance.
CALL_TIMEOUT_S = 2 * TOLERANCE_S
NUM_SAMPLES = 4
MAX_PEERS_ASKED = 16
CHECK_EVERY_S = 60.0
# A clock that is ahead loses this many seconds per second.
SLEW = 0.9
# A peer further ahead than this may see the others' records as expired, so its clock is set back at once.
MAX_SLEW_S = 10.0
# No correction moves a clock further than this from both its initial time and its wall clock. Otherwise, records
# written before the correction would exceed the longest lifetime allowed. (libp2p's TLS refuses connections between
# clocks that are further apart.)
MAX_TOTAL_S = 3600.0
MAX_TIME_S = 1e10
REPORTED_ERROR_S = 5.0


def wall_clock() -> float:
    """This machine's wall clock in Unix seconds. It may be wrong, and may be set at any time."""
    return time.time()


def steady_clock() -> float:
    """Seconds since an arbitrary moment; never set. Unlike time.monotonic, it includes the time a laptop sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SwarmClock:
    """The swarm's time, which is the wall clock's at first.

    Between corrections it follows the steady clock, so setting the wall clock does not move it.
    """

    def __init__(self) -> None:
        self._start(self.wall_offset)
        self._settled = self._offset

    def _start(self, offset: float, excess_s: float = 0.0) -> None:
        self._started = steady_clock()
        self._offset = offset
        self._excess_s = excess_s  # how much of the offset is to be removed gradually

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

    def synchronise(self, offsets: Collection[float]) -> None:
        """Sets the clock to the median of other peers' offsets, by a step of any size.

        Of an even number, the wall clock decides between the two in the middle. Only for a peer that has not written
        any record that the step could make expire.
        """
        if offsets:
            votes = [*offsets] if len(offsets) % 2 else [*offsets, self.wall_offset]
            self._start(median(votes))
        self._settled = self._offset

    def correct(self, offsets: Mapping[str, float], electorate: Collection[str] = ()) -> float:
        """Corrects the clock to the upper median of the other peers' offsets (by peer id) and its own.

        Returns the step in seconds, 0 if the clock makes none. A single offset is ignored if the electorate has more.
        One peer cannot move a swarm of three or more. Of two peers, or two halves, the one that is behind adopts the
        other's time: no record expires early then, as the other's records would if the one that is ahead went back.
        The clock is set forward at once, because this peer's records have expired for peers that are ahead. To go back,
        it runs more slowly; it is set back only if it is so far ahead that the others seem to be gone. (The expirations
        of its own records do not go back: a newer record must always expire later.) All corrections together stay
        within MAX_TOTAL_S.
        """
        own = self.offset
        target = median_high([own, *offsets.values()])
        if not self._is_near(target) or (len(offsets) == 1 and not set(electorate) <= offsets.keys()):
            return 0.0
        step_s = target - own
        if abs(step_s) <= TOLERANCE_S:
            self._start(own)  # ends a gradual correction that is under way
            return 0.0
        if -MAX_SLEW_S <= step_s < 0:
            self._start(own, -step_s)
            return 0.0
        self._start(target)
        return step_s

    def _is_near(self, offset: float) -> bool:
        """Returns True if an offset is near the initial one or the wall clock's (the machine may have slept)."""
        return min(abs(offset - self._settled), abs(offset - self.wall_offset)) <= MAX_TOTAL_S


async def measure_offset(ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> float:
    """Measures the offset of another peer's swarm clock by the sample with the shortest round trip (Cristian 1989).

    Raises:
        OSError: no answer in time, or none at all.
        ProtocolError: (`malformed`) the answer is not a time.
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
        raise TimeoutError("the peer did not report its time")
    return min(samples)[1]


def parse_time(answer: Mapping[str, Any]) -> float:
    """Returns the time in another peer's answer, in Unix seconds.

    Raises:
        ProtocolError: (`malformed`) it has no valid time.
    """
    seconds = answer.get("time")
    if not (isinstance(seconds, float) and math.isfinite(seconds) and 0.0 < seconds < MAX_TIME_S):
        raise ProtocolError("malformed", "the answer to clock is not a time")
    return seconds


class Timekeeper:
    """Keeps a peer's swarm clock in step with the others, and answers their requests for its time."""

    def __init__(self, rpc: Rpc, run_id: str, me: str, on_fault: FaultSink) -> None:
        self.clock = SwarmClock()  # the swarm clock of this process
        self._rpc = rpc
        self._run_id = run_id
        self._me = me
        self._on_fault = on_fault
        self._reported = False

    async def serve(self) -> None:
        """Registers the service. Before that, this peer's clock may be wrong, and no other peer follows it."""
        await self._rpc.serve("clock", self._serve_clock)
        self._report()

    async def _serve_clock(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        if request.get("run") != self._run_id:
            return {"error": "this peer takes part in another run"}
        return {"time": self.clock.now()}

    async def synchronise(self, peers: Collection[str]) -> None:
        """Takes the time from those of `peers` that answer; to be called before this peer publishes anything."""
        self.clock.synchronise((await self._measure(peers)).values())

    async def check(self, electorate: Collection[str]) -> float:
        """Compares the clock with the electorate's, and corrects it; returns the step in seconds."""
        step_s = self.clock.correct(await self._measure(electorate), electorate)
        self._report()
        return step_s

    def until_check_s(self) -> float:
        """Time to the next check.

        All peers check when a minute of the swarm's time begins. So peers that agree with each other, but not with the
        majority, move together and do not lose each other.
        """
        return CHECK_EVERY_S - self.clock.now() % CHECK_EVERY_S

    async def _measure(self, peers: Collection[str]) -> dict[str, float]:
        async def measure(peer_id: str) -> tuple[str, float] | None:
            try:
                return peer_id, await measure_offset(
                    lambda: self._rpc.call(peer_id, "clock", {"run": self._run_id}, CALL_TIMEOUT_S)
                )
            except OSError:
                return None  # gone, in another run, or still joining
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
            detail = f"this machine's clock is {abs(ahead_s):.1f} s {side} the swarm's time, which is used instead"
            self._on_fault(self._me, ProtocolError("clock", detail))
