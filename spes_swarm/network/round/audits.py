"""Audits: after a commit, each member checks a few results that others have reduced, without saying which.

It fetches the contributions that went into them from their contributors, which can make them again from what they keep
to take back the commit, and repeats the reducer's work. All of it is signed, so a result that does not follow from its
contributions is a proof against its reducer (proofs.py). A contributor also shows which result it got, so a reducer
that hands out two different ones is found in the same way.

A contributor that does not show its work makes the results that include it unverifiable. The auditor then asks for it
through other members, and whoever gets nothing notes that (silence.py; what follows: protocol/rounds/conduct.py).

After a commit has been taken back, its members share out all of its parts. Audits end when the next exchange begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from random import Random
from secrets import randbits
from typing import Any

import numpy as np

from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import Channel, FaultSink, Guests, open_channel, serve_channel
from spes_swarm.network.round.claims import Claim, can_audit, lacking, own_contribution, read_seen, with_seen
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.round.silence import NO_COMMIT, Answer, Silence, can_reach
from spes_swarm.network.run_state import RunState
from spes_swarm.network.transport.interface import STREAM_ERRORS, Transport
from spes_swarm.protocol.averaging.lottery import draw, num_audits, shared_out
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.round_state import RoundState

_MAX_HELLO_BYTES = 1024
_AT_A_TIME = 8  # parts whose contributions are in memory
# Parts that one member may ask for after a commit, partly for others; or four times an equal share of all parts.
_SERVED_PARTS = 96
_LOGGER = logging.getLogger(__name__)


class Audits:
    """Audits the last commit, and shows this member's contributions to other auditors."""

    def __init__(
        self,
        transport: Transport,
        run: RunState,
        on_fault: FaultSink,
        guests: Guests,
        current: Callable[[], RoundState | None],
        proofs: Proofs,
    ) -> None:
        """`current` returns the newest exchange, if any."""
        self._transport = transport
        self._run = run
        self.proofs = proofs
        self._on_fault = on_fault
        self._guests = guests
        self._current = current
        self._name = f"{run.run_id}/audit"
        self._stall_s = run.run.round.stall_timeout_s
        self._silence = Silence(run, self._fetch)
        self._state: RoundState | None = None  # of the last commit that was not a return
        self._is_returned = False  # the last round has taken it back
        self._begun = Changes()  # notified when audits of a commit begin
        self._served: Counter[str] = Counter()  # parts of it, by member
        self._task: asyncio.Task[None] | None = None
        self._examining: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Registers the handlers."""
        await self.proofs.start()
        await serve_channel(self._transport, self._name, self._serve, self._stall_s, self._on_fault, self._guests)

    def end(self, *, keep: bool) -> None:
        """Ends the audits, as an exchange begins; `keep`: it takes back the commit, all of which is audited then."""
        if self._task is not None:
            self._task.cancel()
        for task in self._examining:
            task.cancel()
        self._silence.end(keep=keep)
        if not keep:
            self._state = None
            self._served.clear()

    def begin(self, committed: RoundState) -> None:
        """Begins the audits of a commit, or of the one that it has taken back."""
        taken_back = committed.plan.taken_back
        self._is_returned = taken_back is not None
        if taken_back is None:
            state = self._state = committed
            chosen = self._draw(state)
        elif self._state is not None and self._state.plan.round == taken_back.round:
            state = self._state
            parts = [part.index for part in state.plan.parts]
            chosen = shared_out(parts, len(state.group.members), state.me, committed.group.id)
        else:
            return  # this peer has missed that commit
        self._begun.notify()
        self._task = asyncio.create_task(self._run_audits(state, chosen))

    def _draw(self, state: RoundState) -> list[int]:
        random = Random(randbits(128))
        order = draw(list(state.results.wanted), len(state.results.wanted), random)
        drawn = islice(
            (i for i in order if can_audit(state, i) and not self._is_proven(state, i)),
            num_audits(state.plan.num_members),
        )
        # Besides, one of the results of each reducer that are wrong at first sight.
        suspect = {state.plan.parts[i].reducer: i for i in (*state.results.excessive, *state.results.misquoted)}
        return sorted({*drawn, *suspect.values()})

    def _is_proven(self, state: RoundState, index: int) -> bool:
        reducer = state.averaging.peer_ids[state.plan.parts[index].reducer]
        return self._run.tracks.conduct.exclusions.is_culprit(reducer)

    # Auditing.

    async def _run_audits(self, state: RoundState, chosen: Sequence[int]) -> None:
        try:
            for begin in range(0, len(chosen), _AT_A_TIME):
                indices = chosen[begin : begin + _AT_A_TIME]
                await self._audit(
                    state,
                    [Claim.of(state, i) for i in indices if can_audit(state, i) and not self._is_proven(state, i)],
                )
        except Exception:  # a task's error would be reported when nobody looks for it
            _LOGGER.exception("the audits of round %d have failed", state.plan.round)

    async def _audit(self, state: RoundState, claims: Collection[Claim]) -> None:
        """Examines a few claims."""
        false = []
        for claim in claims:
            if (lie := claim.false_quote()) is not None:
                self.proofs.add_soon(lie)
                false.append(claim)
            elif state.me in claim.members and (own := own_contribution(state, claim.part)) is not None:
                claim.take(state.me, own)
                await self._judge(claim)
            await asyncio.sleep(0)
        claims = [claim for claim in claims if claim not in false]  # nobody can show what has never been
        asked = await self._gather(state, claims)
        if asked.keys() & lacking(claims).keys():
            # A peer that has begun the next exchange shows nothing of the last one. Then this one does so, too, soon.
            await asyncio.sleep(self._stall_s / 4)
            await self._gather(state, claims)
        await self._silence.resolve(state, asked.keys(), claims)
        if self._examining:
            await asyncio.wait(self._examining)

    async def _gather(self, state: RoundState, claims: Collection[Claim]) -> dict[int, list[Claim]]:
        """Fetches contributions; returns what was lacking before, by member."""
        asked = {
            member: wanted
            for member, wanted in lacking(claims).items()
            if member != state.me and can_reach(state, member)
        }
        answers = await asyncio.gather(*(self._fetch(state, member, wanted) for member, wanted in asked.items()))
        for member, answer in zip(asked, answers, strict=True):
            self._silence.heed(member, answer)
        return asked

    async def _fetch(
        self, state: RoundState, member: int, claims: Sequence[Claim], through: int | None = None
    ) -> Answer:
        """Asks a member for its contributions, and which results it got. All must come within two stall timeouts.

        `through`: another member, which is asked to ask it; that one has two stall timeouts for itself.
        """
        wanted = {claim.part.index: claim for claim in claims}
        most = max(state.codec.num_bytes(claim.part.size) for claim in claims)
        hello: dict[str, Any] = {"group": state.group.id, "parts": np.array(sorted(wanted), dtype="<u4").tobytes()}
        peer_id, asked, stall_s = state.averaging.peer_ids[member], member, self._stall_s
        if through is not None:
            hello["of"], asked, stall_s = peer_id, through, 3 * self._stall_s
        frames: list[Frame] = []
        end: bytes | None = None
        with suppress(*STREAM_ERRORS, ProtocolError):
            async with (
                asyncio.timeout(max(stall_s, 2 * self._stall_s)),
                open_channel(self._transport, state.averaging.peer_ids[asked], self._name, stall_s) as channel,
            ):
                await channel.send_hello(**hello)
                while (frame := await channel.receive(most)).kind is FrameKind.DATA and frame.part in wanted:
                    frames.append(frame)
                    await self._take(wanted.pop(frame.part), member, frame)
                end = frame.extra if frame.kind is FrameKind.END else None
        return Answer(frames, end)

    async def _take(self, claim: Claim, member: int, frame: Frame) -> None:
        """Takes in what has been shown of a claim.

        Raises:
            ProtocolError: it is malformed.
        """
        if member not in claim.lacking:
            return  # it has come another way
        opening, seen = read_seen(frame.extra)
        if not claim.take(member, replace(frame, extra=opening)):
            who = claim.state.averaging.peer_ids[member]
            _LOGGER.info("what is shown of %s is not what the reducer has signed for", who)
        if seen is not None:
            with suppress(ProtocolError):  # nothing follows from what the reducer has not signed
                if (lie := claim.other_result(*seen)) is not None:
                    self.proofs.add_soon(lie)
        await self._judge(claim)

    async def _judge(self, claim: Claim) -> None:
        """Judges a claim, once all contributions to it are here.

        It goes on if this is cancelled: whoever brings the last contribution ends the fetches from all other members.
        """
        if not claim.lacking:
            task = asyncio.create_task(self._examine(claim))
            self._examining.add(task)
            task.add_done_callback(self._examining.discard)
            await asyncio.shield(task)

    async def _examine(self, claim: Claim) -> None:
        with suppress(ProtocolError):  # nothing follows
            if (lie := await asyncio.to_thread(claim.wrong_result)) is not None:
                self.proofs.add_soon(lie)
        if not self._is_returned:
            state = claim.state
            empty = state.reduction.agreements.empty(state.plan.claims)
            for member, found in claim.opposition.items():
                peer_id, counted = state.averaging.peer_ids[member], 1.0 if member in empty else found
                self._run.tracks.conduct.note_opposition(peer_id, state.plan.round, [counted])

    # Being audited.

    async def _serve(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_HELLO_BYTES)
        group_id, listed = hello.get("group"), hello.get("parts")
        if not isinstance(group_id, bytes) or not isinstance(listed, bytes) or len(listed) % 4:
            raise ProtocolError("malformed", "an audit names a group and lists parts as 32-bit numbers")
        of = hello.get("of")  # the member whose contributions are asked for, if it is not this one
        end, state = NO_COMMIT, await self._committed(group_id)
        if state is not None:
            indices: list[int] = np.unique(np.frombuffer(listed, dtype="<u4")).tolist()
            if of is None:
                end = b""
                await self._show(state, channel, indices)
            else:
                end = await self._silence.help(state, channel, of, indices)
        await channel.send(Frame(FrameKind.END, extra=end))

    async def _committed(self, group_id: bytes) -> RoundState | None:
        """The commit of a group; waits a while for it if it is under way. Until then, others could fit theirs to it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stall_s / 4):
                while self._state is None or self._state.group.id != group_id:
                    under_way = self._current()
                    if under_way is None or under_way.group.id != group_id:
                        return None
                    await self._begun.wait()
                return self._state
        return None

    async def _show(self, state: RoundState, channel: Channel, indices: list[int]) -> None:
        if state.group.index_of(channel.peer_id) is None:
            raise ProtocolError("sender", "the auditor is not a member of the group")
        num_parts = len(state.plan.parts)
        self._served[channel.peer_id] += len(indices)
        if self._served[channel.peer_id] > max(_SERVED_PARTS, 4 * num_parts // len(state.group.members)):
            raise ProtocolError("busy", "too many audits")
        for index in indices:
            frame = own_contribution(state, state.plan.parts[index]) if index < num_parts else None
            if frame is not None:
                await channel.send(replace(frame, extra=with_seen(state, frame)))
