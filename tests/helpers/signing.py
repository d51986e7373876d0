"""Signatures of a hostile member's lies, so that they are not refused for want of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from spes_swarm.protocol.averaging.commitments import CONTRIBUTION, Commitment
from spes_swarm.protocol.averaging.signed_result import contribution_leaf, decode, encode
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from spes_swarm.protocol.rounds.plan import Form, Part
from spes_swarm.protocol.rounds.round_state import RoundState


def resigned_contribution(sender: RoundState, frame: Frame) -> Frame:
    """A contribution, whatever it says now, signed by its sender."""
    leaf = contribution_leaf(frame.part, frame.payload)
    (opening,) = sender.key.commit(CONTRIBUTION, sender.group.exchange, [leaf])
    return dataclasses.replace(frame, extra=opening.wire)


def signed_roots(states: Sequence[RoundState], part: Part) -> dict[int, Commitment]:
    """The signed roots of all that contribute to a part, by member."""
    members = [contribution.member for contribution in states[0].plan.block_of(part).contributions]
    for member in members:
        states[member].contributions.push_frame(part)
    return {member: states[member].contributions.commitments[part.index] for member in members}


def signed_result(reducer: RoundState, part: Part, payload: bytes, roots: Mapping[int, Commitment]) -> Frame:
    """A difference that a reducer signs as the result of a part, with these members' signed roots."""
    (signed,) = reducer.averaging.sign(reducer.key, reducer.group.exchange, [(part, payload, dict(roots))])
    extra = encode(frozenset(roots), reducer.plan.num_members, signed, {})
    return Frame(FrameKind.DATA, Form.DELTA, part.index, 0.0, extra, payload)


def resigned_result(reducer: RoundState, frame: Frame) -> Frame:
    """A result, whatever its payload is now, signed by its reducer."""
    included, _, roots = decode(frame.extra, reducer.plan.num_members, [])
    by_member = dict(zip(sorted(included), roots, strict=True))
    return signed_result(reducer, reducer.plan.parts[frame.part], frame.payload, by_member)
