"""The plan of a round: what must hold for any group."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.protocol.rounds.plan import Plan, make_plan
from spes_swarm.protocol.rounds.statement import Group, Statement
from tests.helpers.plans import contributors
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import MAX_PART, group, member


@st.composite
def groups(draw: st.DrawFn) -> tuple[Layout, Group]:
    """Anything that passes the checks on statements: other bases, client mode, idle and absurdly busy members."""
    num_experts = draw(st.integers(1, 4))
    layout = small_layout(num_experts, draw(st.integers(2, 300)), draw(st.integers(3, 120)))
    members = []
    for number in range(draw(st.integers(1, 6))):
        held = sorted(draw(st.sets(st.integers(0, num_experts - 1))))
        base = draw(st.lists(st.sampled_from([4, 5, 5, 5, 6]), min_size=num_experts + 1, max_size=num_experts + 1))
        forks = draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=num_experts + 1, max_size=num_experts + 1))
        members.append(
            member(
                f"peer{number}",
                layout,
                held=held,
                tokens=draw(st.sampled_from([0, 1, 100, 10**9])),
                routed=[draw(st.sampled_from([0, 1, 50, 10**9])) for _ in held],
                bandwidth_mbps=draw(st.sampled_from([1.0, 10.0, 1000.0])),
                reachable=draw(st.booleans()),
                versions=base,
                digests=[bytes([version, fork]) * 16 for version, fork in zip(base, forks, strict=True)],
            )
        )
    return layout, group(members)


def parts_cover_their_blocks_exactly_once(layout: Layout, of: Group, plan: Plan) -> None:
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))
    for block in layout.blocks:
        covered = [
            i for part in plan.parts if part.block == block.index for i in range(part.start, part.start + part.size)
        ]
        assert covered == (list(range(block.start, block.stop)) if block.index in plan.blocks else [])
    assert all(0 < part.size <= MAX_PART for part in plan.parts)


def reducers_can_be_reached_and_have_the_base(layout: Layout, of: Group, plan: Plan) -> None:
    for part in plan.parts:
        statement = of.members[part.reducer].statement
        block = plan.block_of(part)
        assert statement.reachable
        assert statement.versions[part.block] == block.base_version
        assert part.reducer in block.in_base
        assert {of.members[i].statement.digests[part.block] for i in block.in_base} == {statement.digests[part.block]}


def the_base_is_what_most_members_have_of_what_can_be_reached(layout: Layout, of: Group, plan: Plan) -> None:
    for index, block in plan.blocks.items():
        reported = [(m.statement.versions[index], m.statement.digests[index]) for m in of.members]
        reachable = {base for base, m in zip(reported, of.members, strict=True) if m.statement.reachable}
        (base,) = {reported[i] for i in block.in_base}
        assert base[0] == block.base_version
        assert base in reachable
        assert all(reported.count(base) >= reported.count(other) for other in reachable)
        assert block.in_base == {i for i, theirs in enumerate(reported) if theirs == base}


def has_trained(statement: Statement, block: int) -> bool:
    """True for a holder whose tokens went to an expert in earlier rounds without experts, too."""
    if block == SHARED_BLOCK:
        return statement.tokens > 0
    routed = dict(zip(statement.held, statement.routed, strict=True))
    return block - 1 in routed and (statement.tokens > 0 or routed[block - 1] > 0)


def only_those_contribute_who_have_trained(layout: Layout, of: Group, plan: Plan) -> None:
    for index in plan.blocks:
        for i, contribution in contributors(plan, index).items():
            assert has_trained(of.members[i].statement, index)
            assert contribution.weight > 0
    everybody_trains = {i for i, m in enumerate(of.members) if m.statement.tokens > 0}
    if SHARED_BLOCK in plan.blocks:
        assert contributors(plan, SHARED_BLOCK).keys() == everybody_trains


def a_block_is_left_out_only_when_nothing_happens_to_it_or_nobody_can_reduce_it(
    layout: Layout, of: Group, plan: Plan
) -> None:
    nobody_reachable = not any(m.statement.reachable for m in of.members)
    for block in layout.blocks:
        bases = {(m.statement.versions[block.index], m.statement.digests[block.index]) for m in of.members}
        trained = any(has_trained(m.statement, block.index) for m in of.members)
        assert (block.index in plan.blocks) == ((trained or len(bases) > 1) and not nobody_reachable)


def pushes_and_results_are_what_the_parts_need(layout: Layout, of: Group, plan: Plan) -> None:
    members = range(len(of.members))
    pushed = {
        (part.index, sender) for sender in members for reducer in members for part in plan.pushes(sender, reducer)
    }
    needed = {(p.index, i) for p in plan.parts for i in contributors(plan, p.block) if i != p.reducer}
    assert pushed == needed
    for i in members:
        # Everybody who does not have the new values already: all where something is trained, else who lags behind.
        expected = [p for p in plan.parts if plan.block_of(p).contributions or i not in plan.block_of(p).in_base]
        assert plan.wanted(i) == expected


@pytest.mark.slow
@settings(max_examples=100)
@given(groups(), st.randoms(use_true_random=False))
def test_every_member_makes_the_same_plan(given_group: tuple[Layout, Group], rng: random.Random) -> None:
    layout, of = given_group
    members = list(of.members)
    rng.shuffle(members)
    assert make_plan(group(members), layout, MAX_PART) == make_plan(of, layout, MAX_PART)


def an_expert_is_reduced_by_one_who_trains_it_where_that_is_possible(layout: Layout, of: Group, plan: Plan) -> None:
    for part in plan.parts:
        if part.block == SHARED_BLOCK:
            continue
        able = {i for i in contributors(plan, part.block) if i in plan.block_of(part).in_base}
        able = {i for i in able if of.members[i].statement.reachable}
        assert not able or part.reducer in able


PROPERTIES = (
    parts_cover_their_blocks_exactly_once,
    reducers_can_be_reached_and_have_the_base,
    the_base_is_what_most_members_have_of_what_can_be_reached,
    only_those_contribute_who_have_trained,
    a_block_is_left_out_only_when_nothing_happens_to_it_or_nobody_can_reduce_it,
    pushes_and_results_are_what_the_parts_need,
    an_expert_is_reduced_by_one_who_trains_it_where_that_is_possible,
)


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_every_property_holds_for_any_group(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    for holds in PROPERTIES:
        holds(layout, of, plan)
