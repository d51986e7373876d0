"""Contributions and results are signed: nobody speaks in another's name, and who passes a result on cannot change it.

Each member has a key of its own here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.averaging.commitments import (
    CONTRIBUTION,
    MAX_BATCH,
    RESULT,
    SIGNATURE_BYTES,
    Commitment,
    Credentials,
    Opening,
    Signer,
    SigningKey,
)
from spes_swarm.protocol.averaging.proof import misquoted_contribution, open_proof
from spes_swarm.protocol.averaging.recipe import Recipe, fault_of
from spes_swarm.protocol.averaging.signed_result import SignedResult, contribution_leaf, decode, encode
from spes_swarm.protocol.consensus.codec import get_codec
from spes_swarm.protocol.rounds.frames import Frame
from spes_swarm.protocol.rounds.outcome import Bounds
from spes_swarm.protocol.rounds.plan import Part, Plan, make_plan
from spes_swarm.protocol.rounds.round_state import RoundState
from spes_swarm.protocol.rounds.statement import Group
from tests.helpers.rounds import BOUNDED, UNBOUNDED, FakePeer, form, identities, open_round, peer, small_layout
from tests.helpers.signing import resigned_contribution, resigned_result, signed_result, signed_roots

LAYOUT = small_layout(4, shared=2400)
HOLDINGS = ([0, 1], [1], [2])
OTHER, REDUCER, ME = 0, 1, 2


def trained_peers() -> list[FakePeer]:
    """Three peers with one base, of which each has trained the shared block and its experts."""
    rng = np.random.default_rng(3)
    start_N = rng.normal(0, 0.1, LAYOUT.num_elements).astype(np.float32)
    peers = [peer(LAYOUT, start_N, held, tokens=100, routed=(100,) * len(held)) for held in HOLDINGS]
    for who in peers:
        for block in who.reference.layout.trained_blocks(who.held):
            who.live_N[block.start : block.stop] += rng.normal(0, 0.01, block.size).astype(np.float32)
    return peers


def begun(
    codec: str = "fp16", result_codec: str | None = None, bounds: Bounds = UNBOUNDED
) -> tuple[Plan, list[RoundState]]:
    peers = trained_peers()
    keys = [SigningKey.generate() for _ in peers]
    formed = form(peers, 1)
    members = [
        dataclasses.replace(m, signer=Signer(m.peer_id, key.public))
        for m, key in zip(formed.members, keys, strict=True)
    ]
    group = Group(formed.run_id, formed.round, tuple(members), formed.sealed)
    plan = make_plan(group, LAYOUT, 40, clip=1.5 if bounds.bounded else 0.0)
    codecs = get_codec(codec), get_codec(result_codec or codec)
    states = [
        open_round(group, plan, i, p.reference, p.live_N, codecs[0], bounds, keys[i], result_codec=codecs[1])
        for i, p in enumerate(peers)
    ]
    return plan, states


def contribute(plan: Plan, states: list[RoundState]) -> dict[tuple[int, int], Frame]:
    """Delivers all contributions; returns them by (member, part), with those to a member's own parts."""
    sent = {}
    for sender in states:
        for part, _ in plan.contributed(sender.me, sender.me):
            sent[sender.me, part.index] = sender.contributions.push_frame(part)
        for target in states:
            for part in plan.pushes(sender.me, target.me):
                sent[sender.me, part.index] = frame = sender.contributions.push_frame(part)
                target.reduction.accept(sender.me, frame)
    return sent


def reduced() -> tuple[Plan, list[RoundState], Part]:
    """A round whose contributions have been averaged, and a part of it to which all contribute."""
    plan, states = begun()
    contribute(plan, states)
    return plan, states, next(part for part in plan.parts if part.block == 0 and part.reducer == REDUCER)


def result_of(states: list[RoundState], part: Part, member: int = ME) -> Frame:
    frame = states[part.reducer].results.frame(part.index, member)
    assert frame is not None
    return frame


def content(frame: Frame) -> tuple[frozenset[int], Opening, tuple[Commitment, ...]]:
    return decode(frame.extra, len(HOLDINGS), [])


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ProtocolError) as caught:
        call()
    return caught.value.kind


# Contributions.


def opened(key: SigningKey, state: RoundState, frame: Frame, kind: bytes = CONTRIBUTION, **changes: object) -> Frame:
    """A contribution that a key signs for an exchange with these changes."""
    leaf = contribution_leaf(frame.part, frame.payload)
    (opening,) = key.commit(kind, state.group.exchange._replace(**changes), [leaf])  # type: ignore[arg-type]
    return dataclasses.replace(frame, extra=opening.wire)


NOT_SIGNED: dict[str, tuple[Callable[[list[RoundState], Frame], Frame], str]] = {
    "nothing": (lambda states, frame: dataclasses.replace(frame, extra=b""), "malformed"),
    "half a signature": (lambda states, frame: dataclasses.replace(frame, extra=frame.extra[:32]), "malformed"),
    "zeros": (lambda states, frame: dataclasses.replace(frame, extra=bytes(SIGNATURE_BYTES)), "signature"),
    "by another member": (lambda states, frame: resigned_contribution(states[OTHER], frame), "signature"),
    "by nobody": (lambda states, frame: opened(SigningKey.generate(), states[ME], frame), "signature"),
    "as a result": (lambda states, frame: opened(states[ME].key, states[ME], frame, RESULT), "signature"),
    "for another run": (lambda states, frame: opened(states[ME].key, states[ME], frame, run_id="other"), "signature"),
    "for another round": (lambda states, frame: opened(states[ME].key, states[ME], frame, round=2), "signature"),
    "for another group": (
        lambda states, frame: opened(states[ME].key, states[ME], frame, group_id=bytes(32)),
        "signature",
    ),
}


@pytest.mark.parametrize("signed", NOT_SIGNED)
def test_a_contribution_that_its_sender_has_not_signed_is_left_out(signed: str) -> None:
    spoil, kind = NOT_SIGNED[signed]
    plan, states = begun()
    reducer = states[REDUCER]
    pushed = plan.pushes(ME, REDUCER)
    assert len(pushed) > 1
    for part in pushed:
        wrong = spoil(states, states[ME].contributions.push_frame(part))
        assert refusal(lambda frame=wrong: reducer.reduction.accept(ME, frame)) == kind  # type: ignore[misc]
        assert part.index not in reducer.reduction.outstanding().get(ME, [])
    for part in plan.pushes(OTHER, REDUCER):
        reducer.reduction.accept(OTHER, states[OTHER].contributions.push_frame(part))
    assert reducer.reduction.refused == {ME}
    for part in pushed:
        assert part.index in reducer.reduction.reduced
        result = reducer.results.known.get(part.index)
        assert result is None or ME not in result.included


def test_a_signature_is_good_for_one_part_and_what_is_in_it() -> None:
    plan, states = begun()
    first, second, *_ = [part for part in plan.pushes(ME, REDUCER) if part.block == 0]
    one, two = states[ME].contributions.push_frame(first), states[ME].contributions.push_frame(second)
    exchanged = dataclasses.replace(one, extra=two.extra)
    as_another = dataclasses.replace(one, part=second.index)
    for wrong in (exchanged, as_another):
        assert refusal(lambda frame=wrong: states[REDUCER].reduction.accept(ME, frame)) == "signature"  # type: ignore[misc]


def test_parts_for_one_reducer_are_signed_together() -> None:
    plan, states = begun()
    parts = plan.pushes(ME, REDUCER)
    assert len(parts) > 2 * MAX_BATCH
    openings = [Opening.from_wire(states[ME].contributions.push_frame(part).extra) for part in parts]
    num_signatures = len({opening.signature for opening in openings})
    assert len(parts) / MAX_BATCH <= num_signatures <= len(parts) / MAX_BATCH + 1
    to_other = [Opening.from_wire(states[ME].contributions.push_frame(part).extra) for part in plan.pushes(ME, OTHER)]
    assert {opening.signature for opening in openings}.isdisjoint(opening.signature for opening in to_other)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_a_contribution_can_be_made_again_in_any_order(codec: str) -> None:
    plan, states = begun(codec)
    parts = plan.pushes(ME, REDUCER)
    first = {part.index: states[ME].contributions.push_frame(part) for part in parts}
    again = {part.index: states[ME].contributions.push_frame(part) for part in reversed(parts)}
    assert again == first


@pytest.mark.parametrize("has_sent", [True, False])
def test_one_contribution_can_be_made_again_without_the_others(has_sent: bool) -> None:
    plan, states = begun("int4")
    me, parts = states[ME], plan.pushes(ME, REDUCER)
    encoded = []

    def values(part: Part) -> tuple[FloatArray, FloatArray]:
        encoded.append(part)
        return me.values(part)

    if has_sent:
        first = {part.index: me.contributions.push_frame(part) for part in parts}
        assert all(me.contributions.again(part, values) == first[part.index] for part in parts)
        assert encoded == parts
    else:
        shown = me.contributions.again(parts[0], values)
        states[REDUCER].reduction.accept(ME, shown)
        assert shown == me.contributions.push_frame(parts[0])


# Results.


@pytest.mark.parametrize("bounds", [UNBOUNDED, BOUNDED], ids=["unbounded", "bounded"])
@pytest.mark.parametrize(
    ("codec", "result_codec"), [("fp32", "fp32"), ("fp16", "fp16"), ("int8", "fp16"), ("int4", "int4")]
)
def test_whoever_has_the_contributions_finds_that_a_result_is_right(
    codec: str, result_codec: str, bounds: Bounds
) -> None:
    """The reducer's own contribution is in it as encoded as all others."""
    plan, states = begun(codec, result_codec, bounds)
    sent = contribute(plan, states)
    for part in plan.parts:
        frame = result_of(states, part, (part.reducer + 1) % 3)
        included, _, roots = content(frame)
        assert included == {c.member for c in plan.block_of(part).contributions}
        payloads = []
        for member, root in zip(sorted(included), roots, strict=True):
            contribution = sent[member, part.index]
            leaf = contribution_leaf(part.index, contribution.payload)
            opening = Opening.from_wire(contribution.extra)
            exchange = states[0].group.exchange
            assert states[0].group.members[member].signer.commitment(CONTRIBUTION, exchange, leaf, opening) == root
            payloads.append(contribution.payload)
        recipe = states[ME].averaging.recipe(part, included)
        assert fault_of(recipe, frame.payload, payloads) is None
        lie_N = get_codec(codec).decode(payloads[0], part.size) + np.float32(0.02)
        lie = states[0].averaging.codec_of_result(part).encode(lie_N)
        assert "differs from the mean" in str(fault_of(recipe, lie, payloads))


def without(frame: Frame, member: int) -> Frame:
    """A result that no longer says that it includes a member."""
    included, opening, roots = content(frame)
    rest = sorted(included - {member})
    signed = SignedResult(
        head=None,  # type: ignore[arg-type] # is not sent
        opening=opening,
        commitments=tuple(root for i, root in zip(sorted(included), roots, strict=True) if i != member),
    )
    return dataclasses.replace(frame, extra=encode(frozenset(rest), len(HOLDINGS), signed, {}))


def with_exchanged_roots(frame: Frame) -> Frame:
    """A result whose work seems to be another's."""
    included, opening, roots = content(frame)
    signed = SignedResult(None, opening, (roots[1], roots[0], *roots[2:]))  # type: ignore[arg-type]
    return dataclasses.replace(frame, extra=encode(included, len(HOLDINGS), signed, {}))


def with_other_values(frame: Frame) -> Frame:
    size = (len(frame.payload) - 4) // 2
    values_N = get_codec("fp16").decode(frame.payload, size) * np.float32(0.5)
    return dataclasses.replace(frame, payload=get_codec("fp16").encode(values_N))


CHANGED: dict[str, Callable[[list[RoundState], Frame], Frame]] = {
    "values": lambda states, frame: with_other_values(frame),
    "a member left out": lambda states, frame: without(frame, OTHER),
    "exchanged roots": lambda states, frame: with_exchanged_roots(frame),
    "signed by another member": lambda states, frame: resigned_result(states[OTHER], frame),
    "values, signed by another member": lambda states, frame: resigned_result(states[OTHER], with_other_values(frame)),
    "signed by whom it is for": lambda states, frame: resigned_result(states[ME], frame),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_result_that_its_reducer_has_not_signed_is_refused(what: str) -> None:
    _, states, part = reduced()
    frame, me = result_of(states, part), states[ME]
    held, received = dict(me.results.known), me.payload_bytes_received
    assert refusal(lambda: me.results.store(CHANGED[what](states, frame))) == "signature"
    assert (me.results.known, me.payload_bytes_received, me.results.misquoted) == (held, received, [])
    assert part.index in me.results.missing()
    me.results.store(frame)  # the right one is still welcome
    assert part.index not in me.results.missing()


def test_a_result_is_not_good_for_another_part() -> None:
    plan, states, part = reduced()
    other = next(p for p in plan.parts if p.reducer == REDUCER and p.block == 0 and p.size == part.size and p != part)
    moved = dataclasses.replace(result_of(states, part), part=other.index)
    assert refusal(lambda: states[ME].results.store(moved)) == "signature"


def test_a_result_can_be_passed_on_but_not_changed() -> None:
    _, states, part = reduced()
    original = result_of(states, part, OTHER)
    states[OTHER].results.store(original)
    passed_on = states[OTHER].results.frame(part.index, ME)
    assert passed_on == original
    for changed in (with_other_values(passed_on), without(passed_on, REDUCER)):
        assert refusal(lambda frame=changed: states[ME].results.store(frame)) == "signature"  # type: ignore[misc]
        resigned = resigned_result(states[OTHER], changed)
        assert refusal(lambda frame=resigned: states[ME].results.store(frame)) == "signature"  # type: ignore[misc]
    states[ME].results.store(passed_on)
    assert states[ME].results.known[part.index].signed == states[REDUCER].results.known[part.index].signed


def test_the_parts_of_a_block_share_most_of_their_recipe() -> None:
    plan, states = begun(bounds=BOUNDED)
    for included in ({OTHER, ME}, {OTHER, REDUCER, ME}):
        for part in plan.parts:
            afresh = dataclasses.replace(states[ME].averaging)
            assert states[ME].averaging.recipe(part, included) == afresh.recipe(part, included)
            assert afresh.recipe(part, included).part == part.index


def test_results_that_are_ready_together_are_signed_together() -> None:
    plan, states, _ = reduced()
    parts = [part for part in plan.parts if part.reducer == REDUCER]
    assert len(parts) > 2 * MAX_BATCH
    openings = [content(result_of(states, part, OTHER))[1] for part in parts]
    num_signatures = len({opening.signature for opening in openings})
    assert len(parts) / MAX_BATCH <= num_signatures <= len(parts) / MAX_BATCH + 1
    for part in reversed(parts):  # each is valid on its own
        if part.index in states[ME].results.wanted:
            states[ME].results.store(result_of(states, part))


def test_each_signed_root_goes_over_a_stream_once() -> None:
    _, states, _ = reduced()
    indices = [i for i in states[REDUCER].reduction.reduced if i in states[ME].results.wanted]
    sent: dict[Commitment, int] = {}
    on_stream = [states[REDUCER].results.frame(index, ME, sent) for index in indices]
    alone = [states[REDUCER].results.frame(index, ME) for index in indices]
    known: list[Commitment] = []
    roots = set()
    saved = 0
    for index, frame, complete in zip(indices, on_stream, alone, strict=True):
        assert frame is not None
        assert complete is not None
        later = complete.extra != frame.extra
        if later:
            fresh = begun_like(states, ME)
            assert refusal(lambda f=frame, s=fresh: s.results.store(f)) == "malformed"  # type: ignore[misc]
        saved += len(complete.extra) - len(frame.extra)
        states[ME].results.store(frame, known)
        signed = states[ME].results.known[index].signed
        assert signed is not None
        assert signed == states[REDUCER].results.known[index].signed
        roots |= set(signed.commitments)
    assert len(known) == len(roots) == len(sent)
    assert set(known) == roots
    num_listed = sum(len(set(content(frame)[2])) for frame in alone if frame is not None)
    assert saved == (num_listed - len(roots)) * Commitment.SIZE
    assert saved > 0
    fresh = begun_like(states, ME)
    for frame in reversed(alone):
        assert frame is not None
        fresh.results.store(frame)
    assert all(fresh.results.known[index] == states[ME].results.known[index] for index in indices)


def begun_like(states: list[RoundState], member: int) -> RoundState:
    """A member as it was when the exchange began."""
    state = states[member]
    return open_round(
        state.group, state.plan, member, state.reference, state.live_N, state.codec, state.bounds, state.key
    )


# Work in a member's name that is not its own.


def test_an_honest_exchange_misquotes_nobody() -> None:
    plan, states, _ = reduced()
    for state in states:
        for index, part in state.results.wanted.items():
            if part.reducer != state.me:
                state.results.store(result_of(states, plan.parts[index], state.me))
        assert state.results.misquoted == []
        assert state.results.missing() == []


@pytest.mark.parametrize("has_sent", [True, False])
def test_a_result_with_another_root_in_my_name_is_noted(has_sent: bool) -> None:
    """What it includes may be wrong, but all members must take the same results."""
    plan, states = begun()
    part = next(part for part in plan.parts if part.block == 0 and part.reducer == REDUCER)
    roots = signed_roots(states, part)
    me = states[ME] if has_sent else begun_like(states, ME)
    payload = get_codec("fp16").encode(np.full(part.size, 1e-3, np.float32))
    lie = dict(roots)
    if has_sent:
        lie[ME] = roots[OTHER]
    me.results.store(signed_result(states[REDUCER], part, payload, lie))
    assert me.results.misquoted == [part.index]
    assert part.index not in me.results.missing()
    without_me = next(p for p in plan.parts if p.block == 0 and p.reducer == REDUCER and p != part)
    others = {member: root for member, root in signed_roots(states, without_me).items() if member != ME}
    payload = get_codec("fp16").encode(np.full(without_me.size, 1e-3, np.float32))
    me.results.store(signed_result(states[REDUCER], without_me, payload, others))
    assert me.results.misquoted == [part.index]


def test_a_member_can_show_that_another_root_of_its_own_has_no_contribution_to_a_part() -> None:
    """Without that, a reducer that quotes such a root could hand out anything: nobody could open the root."""
    plan, states = begun()
    part, other = (next(p for p in plan.parts if p.block == 0 and p.reducer == to) for to in (REDUCER, OTHER))
    me, reducer, exchange = states[ME], states[REDUCER], states[ME].group.exchange
    roots, elsewhere = signed_roots(states, part), signed_roots(states, other)[ME]
    assert elsewhere != roots[ME]
    assert me.contributions.absence(part, roots[ME]) is None
    assert me.contributions.absence(part, roots[OTHER]) is None
    shown = me.contributions.absence(part, elsewhere)
    assert shown is not None
    payload = get_codec("fp16").encode(np.full(part.size, 1e-3, np.float32))
    (signed,) = reducer.averaging.sign(reducer.key, exchange, [(part, payload, {**roots, ME: elsewhere})])
    who = identities(len(HOLDINGS))[REDUCER]
    credentials = Credentials(who.public_key_der, reducer.key.certificate(who, exchange.run_id))
    content = reducer.averaging.recipe(part, roots), signed.head.payload, signed, sorted(roots).index(ME)
    proven = open_proof(misquoted_contribution(exchange, credentials, *content, *shown))
    assert (proven.kind, proven.part, proven.culprit) == ("misquoted", part.index, who.peer_id)


# Recipes.


@pytest.mark.parametrize("stated_rms", [5e-324, 1e-200, 1e-9, 1.0, 1e30])
@pytest.mark.parametrize("usual_rms", [0.0, 5e-324, 1.0, 1e30])
def test_whatever_is_stated_a_recipe_is_one_that_a_proof_may_have(stated_rms: float, usual_rms: float) -> None:
    plan, states = begun(bounds=BOUNDED)
    part = plan.parts[0]
    block = plan.block_of(part)
    first, *others = block.contributions
    stated = (dataclasses.replace(first, stated_rms=stated_rms, limit_rms=1e-3), *others)
    median = min(c.bound_rms for c in stated)
    changed = dataclasses.replace(block, contributions=stated, median_rms=median, usual_rms=usual_rms)
    averaging = dataclasses.replace(
        states[ME].averaging, plan=dataclasses.replace(plan, blocks={**plan.blocks, block.block: changed})
    )
    recipe = averaging.recipe(part, {c.member for c in stated})
    assert Recipe.from_content(recipe.content) == recipe
