"""The exchange of one round: push parts to their reducers, pull the results, repair what is missing.

`Exchange` serves the streams of the other members and drives this member's own; `RoundState` does the bookkeeping.
deadlines.py says how long it waits, workers.py where it computes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import ProtocolError, RoundError
from spes_swarm.base.wording import plural
from spes_swarm.network.diagnosis import exchange_lines
from spes_swarm.network.link.rpc import RemoteError, Rpc
from spes_swarm.network.link.wire import Channel, FaultSink, Guests, open_channel, serve_channel
from spes_swarm.network.round.deadlines import Deadlines, ExchangeLimits, Timing, a_batch, answers_within
from spes_swarm.network.round.workers import Workers
from spes_swarm.network.transport.interface import STREAM_ERRORS, Transport
from spes_swarm.protocol.averaging.commitments import MAX_BATCH, Commitment
from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.rounds import conduct, round_faults
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.protocol.rounds.plan import Part
from spes_swarm.protocol.rounds.round_state import RoundState

_MAX_PUSH_HELLO_BYTES = 1024
_MAX_PULL_HELLO_BYTES = 2 << 20
_GROUP_ID_BYTES = 32
_LOOK_S = 0.05  # how often to look for members that are late
_LOGGER = logging.getLogger(__name__)


class Exchange:
    """Serves the round streams of one run and drives this member's side of a round."""

    def __init__(
        self,
        transport: Transport,
        rpc: Rpc,
        run_id: str,
        limits: ExchangeLimits,
        on_fault: FaultSink,
        guests: Guests,
        num_threads: int | None = None,
    ) -> None:
        """`num_threads`: how many threads encode, decode and average."""
        self._transport = transport
        self._rpc = rpc
        self._limits = limits
        self._guests = guests
        self.on_fault = on_fault
        self._push_name = f"{run_id}/push"
        self._pull_name = f"{run_id}/pull"
        self._round: RoundState | None = None
        self._timing: Timing  # of this round; there is none before the first one
        self._open: defaultdict[int, set[asyncio.Timeout]] = defaultdict(set)  # limits of open streams, by reducer
        self._begun = Changes()  # notified when a round begins
        self._reduced = Changes()  # notified when a part of this round has been reduced here
        self._served = Changes()  # notified when a member of this round has been served
        self._last_heard: dict[int, float] = {}  # by member, in this round
        self._completing: list[asyncio.Task[None]] = []  # of this round
        self._error: Exception | None = None  # in this round, which is nobody's fault
        self._workers = Workers(num_threads)

    async def start(self) -> None:
        """Registers the handlers."""
        stall_s, guests = self._limits.stall_timeout_s, self._guests
        await serve_channel(self._transport, self._push_name, self._serve_push, stall_s, self.on_fault, guests)
        await serve_channel(self._transport, self._pull_name, self._serve_pull, stall_s, self.on_fault, guests)
        await self._rpc.serve("have", self._serve_have)

    async def run(
        self, state: RoundState, slack_s: float = math.inf, on_late: Callable[[], None] = lambda: None
    ) -> CommitReport:
        """Takes part in a round up to and including the commit. Any member may take `slack_s` longer than the others;
        `on_late` is called at the first deadline, before anybody is given up.

        Raises:
            RoundError: nothing was committed; the reference and the contribution are unchanged.
        """
        self._begin(state, slack_s)
        in_time = True
        late = asyncio.get_running_loop().call_later(self.deadlines(state).collect_s, on_late)
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._transfer(state)
        except TimeoutError:
            in_time = False
        finally:
            late.cancel()
        self._report(state, await self._workers.compute_in_thread(state.results.refuse_excessive))
        self._report(state, state.reduction.clipped())
        missing = state.results.missing()
        did_not_come = [state.results.wanted[i] for i in missing if i not in state.results.excessive]
        self._report(state, round_faults.missing(state.plan, state.me, did_not_come, state.ended))
        if missing and not in_time:
            raise RoundError(f"{plural(len(missing), 'part')} missing after {self._limits.timeout_s:.0f} s")
        self._record_conduct(state)
        # Once the commit has begun, the round can no longer be cancelled.
        return state.finish(await self._workers.compute_uncancellably(state.apply))

    def deadlines(self, state: RoundState) -> Deadlines:
        """The deadlines of a round's exchange."""
        return Deadlines.of(self._limits, state.plan)

    def _record_conduct(self, state: RoundState) -> None:
        ids, plan = [member.peer_id for member in state.group.members], state.plan
        state.tracks.conduct.exchanged(
            plan.round,
            {ids[i]: delivery for i, delivery in self._timing.deliveries().items()},
            {ids[i]: seconds for i, seconds in self._timing.results_s.items()},
            trusted={ids[i] for i in plan.trusted},
            usual_s=plan.usual_s,
            slack_s=self._timing.slack_s,
            passed_s=self._timing.passed_s(),
            waited=self._timing.waited,
        )

    @property
    def current(self) -> RoundState | None:
        """The newest exchange, which is served until the next one."""
        return self._round

    def describe(self) -> Iterator[str]:
        """Lines for the log."""
        return exchange_lines(self._round, self._last_heard)

    def _begin(self, state: RoundState, slack_s: float = math.inf) -> None:
        """Starts serving the streams of this round."""
        self._round, self._timing = state, Timing(state.plan, state.me, slack_s)
        self._open.clear()
        self._completing.clear()
        self._error = None
        state.tracks.conduct.begin(member.peer_id for i, member in enumerate(state.group.members) if i != state.me)
        self._last_heard = dict.fromkeys(range(state.plan.num_members), time.monotonic())
        loop = asyncio.get_running_loop()
        state.reduction.on_reduced = partial(loop.call_soon_threadsafe, self._reduced.notify)
        self._begun.notify()

    def _report(self, state: RoundState, faults: list[tuple[int, ProtocolError]]) -> None:
        for member, error in faults:
            self.on_fault(state.group.members[member].peer_id, error)

    async def traffic(self) -> tuple[int, int]:
        """Payload bytes (sent, received) of the last round, once the others have pulled their results from here."""
        state = self._round
        if state is None:
            return 0, 0
        with suppress(TimeoutError):  # a member never came; the bytes sent so far count
            async with asyncio.timeout(self._limits.stall_timeout_s):
                while state.unserved:
                    await self._served.wait()
        return state.payload_bytes_sent, state.payload_bytes_received

    async def _transfer(self, state: RoundState) -> None:
        begun = asyncio.get_running_loop().time()
        deadlines, latest = self.deadlines(state), Deadlines.configured(self._limits)
        plan, me = state.plan, state.me
        reducers = sorted({part.reducer for part in plan.parts} - {me})
        senders = {r: [part for part, _ in state.contributions.to(r)] for r in reducers}
        sources: dict[int, set[int]] = {r: set() for r in reducers}
        for part in state.results.wanted.values():
            if part.reducer != me:
                sources[part.reducer].add(part.index)
        self._timing.results_s.update({r: math.inf for r, parts in sources.items() if parts})
        pushed, pulled = begun + latest.collect_s, begun + latest.result_s
        tasks = [asyncio.ensure_future(self._push(state, r, parts, pushed)) for r, parts in senders.items() if parts]
        tasks += [asyncio.ensure_future(self._pull(state, r, parts, pulled)) for r, parts in sources.items() if parts]
        tasks.append(asyncio.ensure_future(self._reduce(state, begun + deadlines.collect_s, pushed)))
        watch = asyncio.ensure_future(self._give_up_reducers(begun + deadlines.result_s, len(reducers)))
        try:
            await asyncio.gather(*tasks)
            watch.cancel()
            state.finished = True
            if state.results.missing():
                await self._repair(state, begun + deadlines.repair_s)
        finally:
            for task in (*tasks, watch):
                if not task.cancelling():  # a second time, it would not end its pieces of work
                    task.cancel()
            await asyncio.wait(tasks)
            state.finished = True

    @asynccontextmanager
    async def _with(self, reducer: int, deadline: float) -> AsyncIterator[None]:
        """Has a stream with a reducer end at a deadline, or when the reducer is given up."""
        async with asyncio.timeout_at(deadline) as limit:
            self._open[reducer].add(limit)
            try:
                yield
            finally:
                self._open[reducer].discard(limit)

    def _end_streams(self, reducer: int) -> None:
        for limit in self._open[reducer]:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())

    async def _give_up_reducers(self, deadline: float, num_reducers: int) -> None:
        """Ends the streams with late reducers at a deadline, or once these are no more than half of all."""
        while True:
            await asyncio.sleep(max(deadline - asyncio.get_running_loop().time(), self._limits.stall_timeout_s / 20))
            late = [reducer for reducer, limits in self._open.items() if limits]
            if 2 * len(late) <= num_reducers:
                for reducer in late:
                    self._end_streams(reducer)

    async def _push(self, state: RoundState, reducer: int, parts: list[Part], deadline: float) -> None:
        """Sends this member's contributions to one reducer. If it is gone, its results are left to `_repair`."""
        peer_id = state.group.members[reducer].peer_id
        try:
            async with (
                self._with(reducer, deadline),
                open_channel(self._transport, peer_id, self._push_name, self._limits.stall_timeout_s) as channel,
            ):
                await channel.send_hello(group=state.group.id)
                mine = state.contributions
                async with aclosing(self._workers.compute_ahead(parts, mine.num_to_encode, mine.push_frame)) as frames:
                    async for frame in frames:
                        await channel.send(frame)
                        state.payload_bytes_sent += len(frame.payload)
                await channel.end()
        except ProtocolError as exc:
            self.on_fault(peer_id, exc)
        except STREAM_ERRORS as exc:
            if math.isinf(self._timing.results_s.get(reducer, math.inf)):  # otherwise it has averaged without the rest
                self.on_fault(peer_id, ProtocolError("push", f"could not push to reducer: {_reason(exc)}"))

    async def _pull(
        self, state: RoundState, source: int, wanted: set[int], deadline: float, *, repair: bool = False
    ) -> None:
        """Fetches results from one member until it has sent all that are wanted, or fails."""
        peer_id = state.group.members[source].peer_id
        remaining, timing, roots = set(wanted), self._timing, list[Commitment]()
        max_bytes = _max_payload(state, max(state.plan.parts[i].size for i in wanted))
        try:
            async with (
                self._with(source, deadline),
                open_channel(self._transport, peer_id, self._pull_name, self._limits.stall_timeout_s) as channel,
            ):
                parts = np.array(sorted(wanted), dtype="<u4").tobytes() if repair else b""
                await channel.send_hello(group=state.group.id, parts=parts)
                while remaining:
                    frame = await channel.receive(max_bytes)
                    if frame.kind is FrameKind.END:
                        if not repair:
                            state.ended.add(source)
                        break
                    if frame.kind is FrameKind.ERROR:
                        raise ProtocolError("refused", frame.error_text())
                    if repair and frame.kind is FrameKind.KEEPALIVE:
                        raise ProtocolError("malformed", "a keepalive in place of a part that the member holds")
                    if frame.kind is FrameKind.DATA:
                        if frame.part not in remaining:
                            raise ProtocolError("part", f"result {frame.part} is not this reducer's, or came twice")
                        remaining.discard(frame.part)
                        await self._workers.compute(_size(state, frame.part), state.results.store, frame, roots)
        except ProtocolError as exc:
            self.on_fault(peer_id, exc)
        except STREAM_ERRORS as exc:
            self.on_fault(peer_id, ProtocolError("pull", f"could not pull results: {_reason(exc)}"))
        finally:
            if remaining:
                state.unreliable.add(source)
            if not repair and (not remaining or source in state.ended):
                timing.note_results(source)
                self._end_streams(source)  # it needs no more contributions

    async def _reduce(self, state: RoundState, deadline: float, latest: float) -> None:
        """Waits until all parts reduced here are complete, giving up contributors that fall silent or are too slow."""
        loop, stall_s = asyncio.get_running_loop(), self._limits.stall_timeout_s
        late_s = conduct.limit_s(state.plan.usual_s, self._timing.slack_s) if state.plan.usual_s else math.inf
        look_at = min(loop.time() + late_s, deadline)  # until then, members known to be late are waited for
        num_owing = len(state.reduction.outstanding())
        probes: dict[int, asyncio.Task[bool]] = {}
        own = self._begin_reducing(self._accept_own(state))
        try:
            while self._error is None and len(state.reduction.reduced) < state.reduction.num_to_reduce:
                for task in filter(asyncio.Task.done, (own, *self._completing)):
                    task.result()  # raises what went wrong
                until = next((at for at in (look_at, deadline, latest) if loop.time() < at), latest)
                if not await self._reduced.wait(min(stall_s / 8, max(until - loop.time(), 0.0) + 0.01)):
                    now = time.monotonic()
                    for member in state.reduction.outstanding():
                        silent_s = now - self._last_heard[member]
                        if silent_s > stall_s / 8 and member not in probes:
                            probes[member] = asyncio.create_task(self._is_gone(state, member))
                        if silent_s > stall_s:
                            self._give_up(state, member, "sent nothing")
                        elif member in probes and probes[member].done() and probes[member].result():
                            self._give_up(state, member, "is gone")
                if loop.time() > look_at:
                    look_at = loop.time() + _LOOK_S
                    self._give_up_late(state, num_owing, loop.time() > deadline, loop.time() > latest)
            if self._error is not None:
                raise self._error
        finally:
            for probe in probes.values():
                probe.cancel()
            own.cancel()
            try:
                await asyncio.wait([own])
            finally:
                self._stop_awaiting(state, state.me)  # it may change its weights once the round has failed

    def _begin_reducing(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts work of which `_reduce` raises what goes wrong."""
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._reduced.notify())
        return task

    async def _accept_own(self, state: RoundState) -> None:
        """Takes in this member's own contributions, and averages parts that nobody contributes to."""
        try:
            for part, contribution in state.reduction.own_parts():
                num_values = state.contributions.num_to_encode(part) + part.size
                await self._workers.compute(num_values, state.reduction.accept_own, part, contribution)
        finally:
            if state.reduction.own_faults:
                self.on_fault(self._name(state, state.me), state.reduction.own_faults[0])
        await self._complete_ready(state)

    async def _complete_ready(self, state: RoundState) -> None:
        """Averages parts whose last contributor has been given up."""
        for index in state.reduction.ready():
            await self._workers.compute(_size(state, index), state.reduction.complete, index)

    async def _is_gone(self, state: RoundState, member: int) -> bool:
        """Returns True if no process listens at a silent member's address, so waiting for it is pointless.

        A frozen process still accepts connections, and a cut link swallows the call: in neither case is the member
        known to be gone.
        """
        if not state.group.members[member].statement.reachable:
            return False  # only it can open a connection
        try:
            await self._ask_have(state, member)
        except (TimeoutError, RemoteError, ProtocolError):
            return False
        except OSError:
            return True
        return False

    def _give_up_late(self, state: RoundState, num_owing: int, is_over: bool, is_past: bool) -> None:
        """Gives up members known to be late, and all that are late if the deadline `is_over` and they are few.

        `num_owing`: members that owed contributions at the beginning. `is_past`: even the configured deadline is over.
        """
        for member in filter(partial(self._is_late, state), state.reduction.outstanding()):
            parts = plural(self._stop_awaiting(state, member), "part")
            _LOGGER.info("%s is late again: %s averaged without it", self._name(state, member), parts)
        late = state.reduction.outstanding()
        few = 2 * len(late) <= num_owing
        if is_past or (few and (is_over or not state.tracks.conduct.may_wait)):
            for member in late:
                self._give_up(state, member, "was too slow", "late")
        elif late:
            self._timing.waited = True

    def _is_late(self, state: RoundState, member: int) -> bool:
        """Returns True if a member is not waited for longer than the median one."""
        return member in state.plan.without_duty or state.tracks.conduct.is_late(self._name(state, member))

    def _name(self, state: RoundState, member: int) -> str:
        return state.group.members[member].peer_id

    def _give_up(self, state: RoundState, member: int, why: str, kind: str = "lost") -> None:
        num_parts = self._stop_awaiting(state, member)
        if num_parts and state is self._round and not state.results.committed:
            error = ProtocolError(kind, f"{why}; {plural(num_parts, 'part')} averaged without it")
            self.on_fault(state.group.members[member].peer_id, error)

    def _stop_awaiting(self, state: RoundState, member: int) -> int:
        num_parts = state.reduction.give_up(member)
        # The results of an earlier round, or of one that has failed here, are sent to nobody.
        if num_parts and state is self._round and self._error is None:
            self._completing.append(self._begin_reducing(self._complete_ready(state)))
        return num_parts

    async def _repair(self, state: RoundState, deadline: float) -> None:
        """Fetches missing results from members that hold them.

        Ends when no member that answers holds what is missing here, and all have finished or its reducers have ended
        without it; or at the deadline. A member that claims to hold parts and delivers none of them is not asked again.
        One that has failed before is asked only for parts that no other member holds. So false claims do not use up the
        time.

        Raises:
            RoundError: results are missing and no other member answers: this peer is cut off.
        """
        others = [i for i in range(state.plan.num_members) if i != state.me]
        cut_off = True
        while True:
            timeout_s = (deadline - asyncio.get_running_loop().time()) / 4  # a frozen member must not use up the time
            known = await answers_within({i: self._ask_held(state, i) for i in others}, timeout_s)
            cut_off = cut_off and not known
            if cut_off:
                raise RoundError(f"{plural(len(state.results.missing()), 'part')} missing and no other member answers")
            if asyncio.get_running_loop().time() > deadline:
                return
            fetch: dict[int, set[int]] = {}
            for index in state.results.missing():
                holders = [i for i, (_, held) in known.items() if index in held]
                holders = [i for i in holders if i not in state.unreliable] or holders
                if holders:  # spread over the holders
                    fetch.setdefault(holders[index % len(holders)], set()).add(index)
            now = asyncio.get_running_loop().time()
            soon = now + (deadline - now) / 2  # leaves time to ask another member
            await asyncio.gather(*(self._pull(state, i, parts, soon, repair=True) for i, parts in fetch.items()))
            missing = set(state.results.missing())
            if not missing:
                return
            others = [i for i in others if i not in fetch or not fetch[i] <= missing]
            if not fetch:
                given_up = all(state.plan.parts[index].reducer in (state.me, *state.ended) for index in missing)
                if given_up or all(finished for finished, _ in known.values()):
                    return
                await asyncio.sleep(self._limits.stall_timeout_s / 20)

    async def _ask_held(self, state: RoundState, member: int) -> tuple[bool, set[int]] | None:
        peer_id = state.group.members[member].peer_id
        if not state.group.members[member].statement.reachable:
            return None
        try:
            answer = await self._ask_have(state, member)
            if not isinstance(answer.get("finished"), bool) or not isinstance(answer.get("held"), bytes):
                raise ProtocolError("malformed", "an answer to `have` lacks its fields")
            return answer["finished"], set(members_of(answer["held"], len(state.plan.parts)))
        except ProtocolError as exc:
            self.on_fault(peer_id, exc)
        except STREAM_ERRORS:
            pass  # no answer: `_repair` does not wait for this member
        return None

    async def _ask_have(self, state: RoundState, member: int) -> dict[str, Any]:
        peer_id = state.group.members[member].peer_id
        return await self._rpc.call(peer_id, "have", {"group": state.group.id}, self._limits.stall_timeout_s / 2)

    # Serving.

    async def _find_round(self, group_id: Any, peer_id: str) -> tuple[RoundState, int]:
        """Returns the round of a group and the peer's index in it; waits a while for the round to begin here, too."""
        if not isinstance(group_id, bytes) or len(group_id) != _GROUP_ID_BYTES:
            raise ProtocolError("malformed", "a group is named by its digest")
        try:
            async with asyncio.timeout(self._limits.stall_timeout_s / 2):
                while self._round is None or self._round.group.id != group_id:
                    await self._begun.wait()
        except TimeoutError:
            raise ProtocolError("group", "no round of that group is open here") from None
        member = self._round.group.index_of(peer_id)
        if member is None:
            raise ProtocolError("sender", "the sender is not a member of the group")
        return self._round, member

    async def _serve_push(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_PUSH_HELLO_BYTES)
        state, member = await self._find_round(hello.get("group"), channel.peer_id)
        owed = state.plan.pushes(member, state.me)
        max_bytes = _max_payload(state, max((part.size for part in owed), default=0))
        num_frames, timing = 0, self._timing
        try:
            while state is self._round:
                frame = await channel.receive(max_bytes)
                if frame.kind is FrameKind.END:
                    break
                if frame.kind is not FrameKind.DATA:
                    raise ProtocolError("malformed", f"a {frame.kind.name} frame among contributions")
                self._last_heard[member] = time.monotonic()
                timing.note_contribution(member, frame.part, len(frame.payload))
                try:
                    await self._workers.compute(_size(state, frame.part), state.reduction.accept, member, frame)
                except ProtocolError as exc:
                    self.on_fault(channel.peer_id, exc)
                except Exception as exc:  # `_reduce` raises it, too: the sender is not to blame
                    if state is self._round:
                        self._error = exc
                        self._reduced.notify()
                    self._stop_awaiting(state, member)
                    raise
                num_frames += 1
                if num_frames > len(owed):
                    raise ProtocolError("oversized", f"more than the {plural(len(owed), 'part')} that the sender owes")
            await channel.send(Frame(FrameKind.END))
        finally:
            # Whatever is still owed will not come over another stream.
            self._give_up(state, member, "its stream ended early")

    async def _serve_pull(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_PULL_HELLO_BYTES)
        state, member = await self._find_round(hello.get("group"), channel.peer_id)
        listed = hello.get("parts")
        if not isinstance(listed, bytes) or len(listed) % 4:
            raise ProtocolError("malformed", "a pull lists its parts as 32-bit numbers")
        if listed:
            sent = dict[Commitment, int]()
            for index in np.unique(np.frombuffer(listed, dtype="<u4")).tolist():
                await self._send_result(state, channel, index, member, sent)
            await channel.send(Frame(FrameKind.END))
        else:
            try:
                await self._stream_reduced(state, member, channel)
                await channel.send(Frame(FrameKind.END))
                # The other side closes once it has everything; this peer may leave only then.
                await channel.wait_until_closed()
            finally:
                state.served(member)
                self._served.notify()

    async def _stream_reduced(self, state: RoundState, member: int, channel: Channel) -> None:
        position, sent = 0, dict[Commitment, int]()
        while position < state.reduction.num_to_reduce and state is self._round and self._error is None:
            if position == len(state.reduction.reduced):
                if not await self._reduced.wait(self._limits.stall_timeout_s / 4):
                    await channel.send(Frame(FrameKind.KEEPALIVE))
                continue
            index = state.reduction.reduced[position]
            if state.results.is_unsigned(index):
                several = min(position + MAX_BATCH, state.reduction.num_to_reduce)  # which are signed together
                await a_batch(self._reduced, state.reduction.reduced, several)
            position += 1
            if state.plan.block_of(state.plan.parts[index]).receives(member):
                await self._send_result(state, channel, index, member, sent)

    async def _send_result(
        self, state: RoundState, channel: Channel, index: int, member: int, sent: dict[Commitment, int]
    ) -> None:
        """Sends a result, if this peer holds it in a form that the member can use."""
        if state.results.is_unsigned(index):  # all that are unsigned are signed together, which may be many
            frame = await self._workers.compute_in_thread(state.results.frame, index, member, sent)
        else:
            frame = await self._workers.compute(_size(state, index), state.results.frame, index, member, sent)
        if frame is None:
            return
        if state is not self._round:
            raise ProtocolError("group", "that round is over")
        await channel.send(frame)
        state.payload_bytes_sent += len(frame.payload)

    async def _serve_have(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        state, member = await self._find_round(request.get("group"), peer_id)
        del member  # any member may ask
        return {"finished": state.finished, "held": bitmap(list(state.results.known), len(state.plan.parts))}


def _size(state: RoundState, index: int) -> int:
    """Values of a part; none if there is no such part, of which nothing is computed."""
    parts = state.plan.parts
    return parts[index].size if 0 <= index < len(parts) else 0


def _max_payload(state: RoundState, num_elements: int) -> int:
    """Longest payload that this many values may take."""
    codecs = EXACT, state.codec, state.result_codec or state.codec
    return max(codec.num_bytes(num_elements) for codec in codecs)


def _reason(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
