"""What a reducer claims by signing a result, and what members of the exchange can show about it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.averaging import proof
from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, Commitment, Opening
from spes_swarm.protocol.averaging.proof import SignedContribution
from spes_swarm.protocol.averaging.recipe import Recipe, judge
from spes_swarm.protocol.averaging.signed_result import Head, SignedResult, contribution_leaf
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.plan import Form, Part
from spes_swarm.protocol.rounds.reducing import opposition
from spes_swarm.protocol.rounds.results import Result
from spes_swarm.protocol.rounds.round_state import RoundState


@dataclass(eq=False)
class Claim:
    """A signed result, with those of its contributions that have been fetched."""

    state: RoundState
    part: Part
    members: list[int]  # that it includes
    recipe: Recipe
    payload: bytes
    signed: SignedResult
    contributions: dict[int, SignedContribution] = field(default_factory=dict)
    opposition: dict[int, float] = field(default_factory=dict)  # of its contributors, once `wrong_result` has judged it

    @classmethod
    def of(cls, state: RoundState, index: int) -> Claim:
        """What the reducer of a part claims; the part is one for which `can_audit` returns True."""
        part, result = state.plan.parts[index], _result(state, index)
        assert result is not None
        assert result.signed is not None
        recipe = state.averaging.recipe(part, result.included)
        return cls(state, part, sorted(result.included), recipe, result.data, result.signed)

    @property
    def reducer(self) -> str:
        """Peer id of the reducer."""
        return self.state.averaging.peer_ids[self.part.reducer]

    @property
    def lacking(self) -> list[int]:
        """The members whose contributions have not been fetched."""
        return [member for member in self.members if member not in self.contributions]

    def take(self, member: int, frame: Frame) -> bool:
        """Takes in a contribution; returns False if it is another one than the reducer has signed for.

        Raises:
            ProtocolError: it has no opening.
        """
        opening = Opening.from_wire(frame.extra)
        root = opening.root(contribution_leaf(self.part.index, frame.payload))
        if Commitment(root, opening.signature) != self.signed.commitments[self.members.index(member)]:
            return False
        credentials = self.state.group.members[member].credentials
        self.contributions[member] = SignedContribution(credentials, frame.payload, opening)
        return True

    def false_quote(self) -> bytes | None:
        """A proof that the result includes work that its alleged contributor has not signed; None if there is none."""
        exchange, members = self.state.group.exchange, self.state.group.members
        what = exchange, members[self.part.reducer].credentials, self.recipe, self.signed.head.payload, self.signed
        for i, (member, root) in enumerate(zip(self.members, self.signed.commitments, strict=True)):
            if not members[member].signer.has_signed(CONTRIBUTION, exchange, root):
                return proof.forged_contribution(*what, i, members[member].credentials)
            if member == self.state.me and (shown := self.state.contributions.absence(self.part, root)) is not None:
                return proof.misquoted_contribution(*what, i, *shown)
        return None

    def wrong_result(self) -> bytes | None:
        """A proof that the result does not follow from its contributions, all of which are here; None if it does.

        Raises:
            ProtocolError: nothing follows from the contributions, or the proof would be too long.
        """
        contributions = [self.contributions[member] for member in self.members]
        fault, agreement = judge(self.recipe, self.payload, [each.payload for each in contributions])
        if agreement is not None:
            self.opposition = opposition(self.part, self.members, agreement, self.state.me)
        if fault is None:
            return None
        reducer = self.state.group.members[self.part.reducer].credentials
        return proof.wrong_result(
            self.state.group.exchange, reducer, self.recipe, self.payload, self.signed, contributions
        )

    def other_result(self, head: Head, opening: Opening) -> bytes | None:
        """A proof that the reducer has signed another result as well; None if it has not signed this one.

        Raises:
            ProtocolError: the reducer has not signed it.
        """
        if head == self.signed.head or head.part != self.part.index:
            return None
        reducer, mine = self.state.group.members[self.part.reducer], (self.signed.head, self.signed.opening)
        data = proof.two_results(self.state.group.exchange, reducer.credentials, mine, (head, opening))
        proof.open_proof(data)
        return data


def _result(state: RoundState, index: int) -> Result | None:
    return state.results.known.get(index) or state.results.excessive.get(index)


def can_audit(state: RoundState, index: int) -> bool:
    """Returns True if a part's result can be judged by its contributions, and is not its reducer's own work alone.

    Full values say nothing to those without the base that they came from.
    """
    part, result = state.plan.parts[index], _result(state, index)
    if result is None or result.signed is None or part.reducer == state.me or result.included <= {part.reducer}:
        return False
    contributions = state.plan.block_of(part).contributions
    return all(c.form is Form.DELTA for c in contributions if c.member in result.included)


def lacking(claims: Iterable[Claim]) -> dict[int, list[Claim]]:
    """By member: the claims whose contributions are still to be fetched from it."""
    by_member: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claims:
        for member in claim.lacking:
            by_member[member].append(claim)
    return dict(by_member)


def own_contribution(state: RoundState, part: Part) -> Frame | None:
    """This member's contribution to a part, made again; None if it has made none, or keeps too little for that."""
    if all(c.member != state.me for c in state.plan.block_of(part).contributions):
        return None
    try:
        return state.contributions.again(part, partial(values_then, state))
    except LookupError:
        return None


def values_then(state: RoundState, part: Part) -> tuple[FloatArray, FloatArray]:
    """This member's live weights and reference in an exchange that has been committed.

    Raises:
        LookupError: they are not kept.
    """
    return state.previous.contributed(slice(part.start, part.start + part.size), part.block)


def with_seen(state: RoundState, frame: Frame) -> bytes:
    """What goes along with a contribution in an audit: its opening, and head and opening of the result that came."""
    result = _result(state, frame.part)
    seen = b"" if result is None or result.signed is None else result.signed.head.wire + result.signed.opening.wire
    return bytes([len(frame.extra)]) + frame.extra + seen


def read_seen(extra: bytes) -> tuple[bytes, tuple[Head, Opening] | None]:
    """The inverse of `with_seen`; the opening of the contribution is not decoded.

    Raises:
        ProtocolError: (`malformed`) the opening of the result is not one.
    """
    end = extra[0] + 1 if extra else 1
    opening, seen = extra[1:end], extra[end:]
    if len(seen) <= Head.SIZE:
        return opening, None
    return opening, (Head.from_wire(seen[: Head.SIZE]), Opening.from_wire(seen[Head.SIZE :]))
