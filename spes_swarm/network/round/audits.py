"""Audits: after a commit, each member checks a few results that others have reduced, without saying which.

It fetches the contributions that went into them from their contributors, which can make them again from what they keep
to take back the commit, and repeats the reducer's work. All of it is signed, so a result that does not follow from its
contributions is a proof against its reducer (proofs.py). A contributor also shows which result it got, so a reducer
that hands out two different ones is found in the same way.

After a commit has been taken back, the members share out all of its parts. Audits end when the next exchange begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from random import SystemRandom

import numpy as np
from hivemind.p2p import P2P

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import STREAM_ERRORS, Channel, FaultSink, Guests, open_channel, serve_channel
from spes_swarm.network.round.proofs import Proofs
from spes_swarm.network.run_state import RunState
from spes_swarm.protocol.averaging import proof
from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, RESULT, Commitment, Opening
from spes_swarm.protocol.averaging.lottery import draw, num_audits, shared_out
from spes_swarm.protocol.averaging.proof import SignedContribution
from spes_swarm.protocol.averaging.recipe import Recipe, fault_of
from spes_swarm.protocol.averaging.signed_result import Head, SignedResult, contribution_leaf
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Form, Part
from spes_swarm.protocol.rounds.round_state import RoundState

_MAX_HELLO_BYTES = 1 << 16
_SERVED_PARTS = 64  # that one member may ask for after a commit, or twice an equal share of all parts
_LOGGER = logging.getLogger(__name__)


@dataclass(eq=False)
class _Claim:
    """A result under audit, with those of its contributions that have been fetched."""

    part: Part
    members: list[int]  # that it includes
    recipe: Recipe
    payload: bytes
    signed: SignedResult
    contributions: dict[int, SignedContribution] = field(default_factory=dict)

    @classmethod
    def of(cls, state: RoundState, index: int) -> _Claim:
        """What the reducer of a part, which can be audited, claims."""
        part, result = state.plan.parts[index], state.results[index]
        assert result.signed is not None
        recipe = state.averaging.recipe(part, result.included)
        return cls(part, sorted(result.included), recipe, result.data, result.signed)

    def root_of(self, member: int) -> Commitment:
        """The signed root above a member's contribution, according to the reducer."""
        return self.signed.commitments[self.members.index(member)]


class Audits:
    """Audits the last commit, and shows this member's contributions to other auditors."""

    def __init__(
        self,
        p2p: P2P,
        run: RunState,
        on_fault: FaultSink,
        guests: Guests,
        current: Callable[[], RoundState | None],
    ) -> None:
        """`current` returns the exchange that is served, if any."""
        self._p2p = p2p
        self._run = run
        self.proofs = Proofs(p2p, run, on_fault, guests)
        self._on_fault = on_fault
        self._guests = guests
        self._current = current
        self._name = f"{run.run_id}/audit"
        self._stall_s = run.run.round.stall_timeout_s
        self._random = SystemRandom()
        self._state: RoundState | None = None  # of the last commit that was not a return
        self._served: Counter[str] = Counter()  # parts of it, by member
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Registers the handlers."""
        await self.proofs.start()
        await serve_channel(self._p2p, self._name, self._serve, self._stall_s, self._on_fault, self._guests)

    def end(self, *, keep: bool) -> None:
        """Ends the audits, as an exchange begins; `keep`: it takes back the commit, all of which is audited then."""
        if self._task is not None:
            self._task.cancel()
        if not keep:
            self._state = None
            self._served.clear()

    def begin(self, committed: RoundState) -> None:
        """Begins the audits of a commit, or of the one that it has taken back."""
        if committed.plan.taken_back is None:
            self._state = committed
            chosen = self._draw(committed)
        elif self._state is None:
            return
        else:
            group, parts = committed.group, [part.index for part in self._state.plan.parts]
            chosen = shared_out(parts, len(group.members), committed.me, group.id)
        self._task = asyncio.create_task(self._audit(self._state, chosen))

    def _draw(self, state: RoundState) -> list[int]:
        proven, ids = self._run.tracks.conduct.proven, state.averaging.peer_ids
        parts = [i for i in state.wanted if _can_audit(state, i) and ids[state.plan.parts[i].reducer] not in proven]
        return sorted({*draw(parts, num_audits(len(ids)), self._random), *state.misquoted})

    # Auditing.

    async def _audit(self, state: RoundState, chosen: Collection[int]) -> None:
        claims = {index: _Claim.of(state, index) for index in chosen if _can_audit(state, index)}
        for claim in claims.values():
            if (lie := _false_quote(state, claim)) is not None:
                await self.proofs.add(lie)
            elif state.me in claim.members and (own := _contribution(state, claim.part)) is not None:
                self._take(state, claim, state.me, own)
        await self._gather(state, claims.values())
        if lacking := _lacking(claims.values()):
            # A peer that has begun the next exchange shows nothing of the last one. Then this one does so, too, soon.
            await asyncio.sleep(self._stall_s / 4)
            await self._gather(state, claims.values())
            self._note_unanswered(state, lacking.keys() & _lacking(claims.values()).keys())
        for claim in claims.values():
            if len(claim.contributions) == len(claim.members):
                await self._judge(state, claim)

    def _note_unanswered(self, state: RoundState, silent: set[int]) -> None:
        if 2 * len(silent) >= max(len(state.group.members) - 1, 3):
            return  # it may be this peer's line
        for member in silent:
            _LOGGER.info("%s does not show its contributions to round %d", self._id(state, member), state.plan.round)
            self._run.tracks.conduct.note_unanswered(self._id(state, member), state.plan.round)

    async def _gather(self, state: RoundState, claims: Collection[_Claim]) -> None:
        asked = _lacking(claims)
        await asyncio.gather(*(self._fetch(state, member, wanted) for member, wanted in asked.items()))

    async def _fetch(self, state: RoundState, member: int, claims: list[_Claim]) -> None:
        """Asks a member for its contributions, and which results it got."""
        wanted = {claim.part.index: claim for claim in claims}
        most = max(state.codec.num_bytes(claim.part.size) for claim in claims)
        listed = np.array(sorted(wanted), dtype="<u4").tobytes()
        with suppress(*STREAM_ERRORS, ProtocolError):
            async with open_channel(self._p2p, self._id(state, member), self._name, self._stall_s) as channel:
                await channel.send_hello(group=state.group.id, parts=listed)
                while wanted:
                    frame = await channel.receive(most)
                    if frame.kind is not FrameKind.DATA:
                        return
                    claim = wanted.pop(frame.part, None)
                    if claim is None:
                        return
                    opening, seen = _read_extra(frame.extra)
                    self._take(state, claim, member, replace(frame, extra=opening))
                    if seen is not None:
                        await self._compare(state, claim, *seen)

    def _take(self, state: RoundState, claim: _Claim, member: int, frame: Frame) -> None:
        """Takes in a contribution, if it is what the reducer says it got."""
        opening = Opening.from_wire(frame.extra)
        leaf = contribution_leaf(frame.part, frame.payload)
        if Commitment(opening.root(leaf), opening.signature) != claim.root_of(member):
            _LOGGER.warning("%s shows another contribution than it sent", self._id(state, member))
            return
        credentials = state.group.members[member].credentials
        claim.contributions[member] = SignedContribution(credentials, frame.payload, opening)

    async def _compare(self, state: RoundState, claim: _Claim, head: Head, opening: Opening) -> None:
        """Compares the result that another member got."""
        reducer, exchange = state.group.members[claim.part.reducer], state.group.exchange
        if head == claim.signed.head or head.part != claim.part.index:
            return
        with suppress(ProtocolError):  # nothing follows from what the reducer has not signed
            reducer.signer.commitment(RESULT, exchange, head.leaf, opening)
            mine = claim.signed.head, claim.signed.opening
            await self.proofs.add(proof.two_results(exchange, reducer.credentials, mine, (head, opening)))

    async def _judge(self, state: RoundState, claim: _Claim) -> None:
        contributions = [claim.contributions[member] for member in claim.members]
        payloads = [contribution.payload for contribution in contributions]
        try:
            fault = await asyncio.to_thread(fault_of, claim.recipe, claim.payload, payloads)
        except ProtocolError:
            return  # a reducer that includes such a contribution has refused nothing; see RoundState.accept
        if fault is not None:
            reducer = state.group.members[claim.part.reducer].credentials
            content = claim.recipe, claim.payload, claim.signed, contributions
            await self.proofs.add(proof.wrong_result(state.group.exchange, reducer, *content))

    def _id(self, state: RoundState, member: int) -> str:
        return state.group.members[member].peer_id

    # Being audited.

    async def _serve(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_HELLO_BYTES)
        group_id, listed = hello.get("group"), hello.get("parts")
        if not isinstance(group_id, bytes) or not isinstance(listed, bytes) or len(listed) % 4:
            raise ProtocolError("malformed", "an audit names a group and lists parts as 32-bit numbers")
        state = next((s for s in (self._state, self._current()) if s is not None and s.group.id == group_id), None)
        if state is not None:
            await self._show(state, channel, np.unique(np.frombuffer(listed, dtype="<u4")).tolist())
        await channel.send(Frame(FrameKind.END))

    async def _show(self, state: RoundState, channel: Channel, indices: list[int]) -> None:
        if state.group.index_of(channel.peer_id) is None:
            raise ProtocolError("sender", "the auditor is not a member of the group")
        num_parts = len(state.plan.parts)
        self._served[channel.peer_id] += len(indices)
        if self._served[channel.peer_id] > max(_SERVED_PARTS, 4 * num_parts // len(state.group.members)):
            raise ProtocolError("busy", "too many audits")
        for index in indices:
            frame = _contribution(state, state.plan.parts[index]) if index < num_parts else None
            if frame is None:
                return
            result = state.results.get(index)
            seen = b"" if result is None or result.signed is None else _wire_of(result.signed)
            await channel.send(replace(frame, extra=bytes([len(frame.extra)]) + frame.extra + seen))


def _can_audit(state: RoundState, index: int) -> bool:
    """Returns True if a part's result can be judged by its contributions, and is not its reducer's own work alone.

    Full values say nothing to those without the base that they came from.
    """
    part, result = state.plan.parts[index], state.results.get(index)
    if result is None or result.signed is None or part.reducer == state.me or result.included <= {part.reducer}:
        return False
    contributions = state.plan.block_of(part).contributions
    return all(c.form is Form.DELTA for c in contributions if c.member in result.included)


def _contribution(state: RoundState, part: Part) -> Frame | None:
    """This member's contribution to a part, made again; None if it has made none, or keeps too little for that."""
    if all(c.member != state.me for c in state.plan.block_of(part).contributions):
        return None
    try:
        return state.contributions.again(part, partial(_values, state))
    except LookupError:
        return None


def _values(state: RoundState, part: Part) -> tuple[FloatArray, FloatArray]:
    """This member's live weights and reference in an exchange, which may have been committed since."""
    where = slice(part.start, part.start + part.size)
    if state.committed:
        return state.previous.contributed(where, part.block)
    return state.live_N[where], state.reference.values_N[where]


def _false_quote(state: RoundState, claim: _Claim) -> bytes | None:
    """A proof that a reducer includes work that its alleged contributor has not signed; None if there is none."""
    exchange, members = state.group.exchange, state.group.members
    reducer, payload = members[claim.part.reducer].credentials, claim.signed.head.payload
    for i, (member, root) in enumerate(zip(claim.members, claim.signed.commitments, strict=True)):
        if not members[member].signer.has_signed(CONTRIBUTION, exchange, root):
            contributor = members[member].credentials
            return proof.forged_contribution(exchange, reducer, claim.recipe, payload, claim.signed, i, contributor)
        if member == state.me:
            with suppress(LookupError):
                if (shown := state.contributions.absence(claim.part, root, partial(_values, state))) is not None:
                    return proof.misquoted_contribution(
                        exchange, reducer, claim.recipe, payload, claim.signed, i, *shown
                    )
    return None


def _lacking(claims: Iterable[_Claim]) -> dict[int, list[_Claim]]:
    """By member: the claims whose contributions are still to be fetched from it."""
    lacking: defaultdict[int, list[_Claim]] = defaultdict(list)
    for claim in claims:
        for member in claim.members:
            if member not in claim.contributions:
                lacking[member].append(claim)
    return dict(lacking)


def _wire_of(signed: SignedResult) -> bytes:
    return signed.head.wire + signed.opening.wire


def _read_extra(data: bytes) -> tuple[bytes, tuple[Head, Opening] | None]:
    """What goes along with a contribution in an audit: its opening, and head and opening of the result."""
    end = data[0] + 1 if data else 1
    opening, seen = data[1:end], data[end:]
    if len(seen) <= Head.SIZE:
        return opening, None
    return opening, (Head.from_wire(seen[: Head.SIZE]), Opening.from_wire(seen[Head.SIZE :]))
