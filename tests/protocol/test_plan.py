"""The plan of a round: what must hold for any group, and the rules one by one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.averaging.clipping import MAX_WEIGHT_RATIO
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.rounds.plan import (
    MIN_PART_ELEMENTS,
    BlockPlan,
    Contribution,
    Form,
    Plan,
    common_lineage,
    make_plan,
)
from spes_swarm.protocol.rounds.statement import Group, Member, Statement
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import MAX_PART, ROUND, group, member


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


def contributors(plan: Plan, block: int) -> dict[int, Contribution]:
    return {c.member: c for c in plan.blocks[block].contributions}


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_parts_cover_their_blocks_exactly_once(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    assert [part.index for part in plan.parts] == list(range(len(plan.parts)))
    for block in layout.blocks:
        covered = [
            i for part in plan.parts if part.block == block.index for i in range(part.start, part.start + part.size)
        ]
        assert covered == (list(range(block.start, block.stop)) if block.index in plan.blocks else [])
    assert all(0 < part.size <= MAX_PART for part in plan.parts)


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_reducers_can_be_reached_and_have_the_base(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    for part in plan.parts:
        statement = of.members[part.reducer].statement
        block = plan.block_of(part)
        assert statement.reachable
        assert statement.versions[part.block] == block.base_version
        assert part.reducer in block.in_base
        assert {of.members[i].statement.digests[part.block] for i in block.in_base} == {statement.digests[part.block]}


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_the_base_is_what_most_members_have_of_what_can_be_reached(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
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


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_only_those_contribute_who_have_trained(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    for index in plan.blocks:
        for i, contribution in contributors(plan, index).items():
            assert has_trained(of.members[i].statement, index)
            assert contribution.weight > 0
    everybody_trains = {i for i, m in enumerate(of.members) if m.statement.tokens > 0}
    if SHARED_BLOCK in plan.blocks:
        assert contributors(plan, SHARED_BLOCK).keys() == everybody_trains


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_a_block_is_left_out_only_when_nothing_happens_to_it_or_nobody_can_reduce_it(
    given_group: tuple[Layout, Group],
) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    nobody_reachable = not any(m.statement.reachable for m in of.members)
    for block in layout.blocks:
        bases = {(m.statement.versions[block.index], m.statement.digests[block.index]) for m in of.members}
        trained = any(has_trained(m.statement, block.index) for m in of.members)
        assert (block.index in plan.blocks) == ((trained or len(bases) > 1) and not nobody_reachable)


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_pushes_and_results_are_what_the_parts_need(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
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


@pytest.mark.slow
@settings(max_examples=300)
@given(groups())
def test_an_expert_is_reduced_by_one_who_trains_it_where_that_is_possible(given_group: tuple[Layout, Group]) -> None:
    layout, of = given_group
    plan = make_plan(of, layout, MAX_PART)
    for part in plan.parts:
        if part.block == SHARED_BLOCK:
            continue
        able = {i for i in contributors(plan, part.block) if i in plan.block_of(part).in_base}
        able = {i for i in able if of.members[i].statement.reachable}
        assert not able or part.reducer in able


# The rules one by one.


def plan_of(layout: Layout, *members: Member, max_part: int = MAX_PART) -> Plan:
    return make_plan(group(members), layout, max_part)


def reduced(plan: Plan, block: int | None = None) -> dict[int, int]:
    """Elements that each member reduces."""
    sums: dict[int, int] = {}
    for part in plan.parts:
        if block in (None, part.block):
            sums[part.reducer] = sums.get(part.reducer, 0) + part.size
    return sums


def shares_of_three(declared: Sequence[float], measured: Mapping[str, float]) -> list[float]:
    """Shares of the reducing of p0, p1 and p2, where each states what it has measured of the others, in Mbit/s."""
    layout = small_layout(1, shared=200_000)
    names = ["p0", "p1", "p2"]
    members = [
        member(
            name,
            layout,
            bandwidth_mbps=mbps,
            vouched=vouchers({}, set(names) - {name}, rates={p: m for p, m in measured.items() if p != name}),
        )
        for name, mbps in zip(names, declared, strict=True)
    ]
    shares = reduced(plan_of(layout, *members, max_part=500), SHARED_BLOCK)
    return [shares.get(i, 0) / 200_000 for i in range(3)]


def test_shares_of_the_reducing_follow_the_measured_rates_up_to_two_equal_shares() -> None:
    rates = {"p0": 4.0, "p1": 16.0, "p2": 16.0}
    assert shares_of_three([1e3, 1e3, 1e3], rates) == pytest.approx([1 / 9, 4 / 9, 4 / 9], abs=0.01)
    assert shares_of_three([1e3, 1e3, 1e3], rates | {"p2": 512.0}) == pytest.approx([1 / 15, 4 / 15, 2 / 3], abs=0.01)


def test_rates_that_differ_by_no_more_than_a_busy_machine_count_as_equal() -> None:
    shares = shares_of_three([1e3, 1e3, 1e3], {"p0": 8.0, "p1": 16.0, "p2": 32.0})
    assert shares == pytest.approx([1 / 3] * 3, abs=0.01)


def test_a_declared_rate_only_lowers_what_was_measured() -> None:
    rates = {"p0": 32.0, "p1": 32.0, "p2": 32.0}
    assert shares_of_three([1e6, 1e6, 1e6], rates) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert shares_of_three([1e6, 32.0, 32.0], rates) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert shares_of_three([8.0, 1e6, 1e6], rates) == pytest.approx([1 / 9, 4 / 9, 4 / 9], abs=0.01)


def test_a_member_that_nobody_has_measured_reduces_at_most_an_equal_share() -> None:
    assert shares_of_three([1.0, 1.0, 1e6], {}) == pytest.approx([1 / 3] * 3, abs=0.01)
    known = {"p0": 32.0, "p1": 32.0}
    assert shares_of_three([100.0, 100.0, 1e6], known) == pytest.approx([1 / 3] * 3, abs=0.01)
    assert shares_of_three([100.0, 100.0, 8.0], known) == pytest.approx([4 / 9, 4 / 9, 1 / 9], abs=0.01)


@given(st.lists(st.floats(0.1, 1e6), min_size=3, max_size=9), st.data())
def test_no_rate_attracts_more_than_two_equal_shares(speeds: list[float], data: st.DataObject) -> None:
    num_experts = 4
    layout = small_layout(num_experts, shared=20_000, expert=300)
    names = [f"p{i}" for i in range(len(speeds))]
    held = [sorted(data.draw(st.sets(st.integers(0, num_experts - 1), max_size=1))) for _ in speeds]
    is_measured = data.draw(st.lists(st.booleans(), min_size=len(speeds), max_size=len(speeds)))
    rates = {name: s for name, s, known in zip(names, speeds, is_measured, strict=True) if known}
    members = [
        member(
            name,
            layout,
            bandwidth_mbps=s,
            held=held[i],
            vouched=vouchers({}, set(names) - {name}, rates={p: rate for p, rate in rates.items() if p != name}),
        )
        for i, (name, s) in enumerate(zip(names, speeds, strict=True))
    ]
    plan = plan_of(layout, *members, max_part=500)
    total = sum(part.size for part in plan.parts)
    largest = max(part.size for part in plan.parts)
    for number, elements in reduced(plan).items():
        assert elements <= (2 if names[number] in rates else 1) * total / len(speeds) + 300 + largest


def doubting(names: str, doubted: Mapping[str, str], layout: Layout) -> list[Member]:
    """Members that have all delivered; `doubted`: whom each of them doubts."""
    return [
        member(name, layout, vouched=vouchers({}, set(names) - {name}, doubted=set(doubted.get(name, ""))))
        for name in names
    ]


def test_who_is_doubted_by_most_reduces_nothing() -> None:
    layout = small_layout(1, shared=20_000)
    plan = plan_of(layout, *doubting("abcd", {"a": "d", "b": "d"}, layout))
    assert plan.without_duty == {3}
    assert reduced(plan, SHARED_BLOCK).keys() == {0, 1, 2}
    plan = plan_of(layout, *doubting("abcd", {"a": "d", "d": "a"}, layout))
    assert plan.without_duty == frozenset()
    assert reduced(plan, SHARED_BLOCK).keys() == {0, 1, 2, 3}


def test_before_the_first_commit_nobody_s_word_counts() -> None:
    """Two members that vouch for each other alone would reduce everything, and could leave out all others' work."""
    layout = small_layout(1, shared=20_000)
    first = {"round": 1, "versions": [0, 0]}
    said = {own: vouchers({}, set("ab") - {own}, doubted=set("cdef")) for own in "ab"}
    plan = plan_of(layout, *(member(name, layout, vouched=said.get(name, b""), **first) for name in "abcdef"))
    assert plan.trusted == {0, 1, 2, 3, 4, 5}
    assert plan.without_duty == frozenset()
    assert reduced(plan, SHARED_BLOCK).keys() == {0, 1, 2, 3, 4, 5}


def test_the_usual_time_follows_from_the_paces_that_members_state() -> None:
    layout = small_layout(1, shared=20_000, expert=1)
    paces = [0.0, 3.0, 5.0, 1e9]
    plan = plan_of(layout, *(member(f"p{i}", layout, pace=pace) for i, pace in enumerate(paces)))
    assert plan.pace == 5.0
    assert plan.sent_elements[0] == 20_000 - reduced(plan, SHARED_BLOCK)[0]
    most = max(20_000 - elements for elements in reduced(plan, SHARED_BLOCK).values())
    assert plan.usual_s == pytest.approx(5e-6 * most)
    assert plan_of(layout, member("a", layout), member("b", layout)).usual_s == 0
    assert plan_of(layout, *(member(name, layout, pace=9.0 * (name == "a")) for name in "abc")).pace == 0  # too few
    strangers = [member(f"s{i}", layout, pace=1e9) for i in range(5)]
    plan = plan_of(layout, vouching("a", layout, pace=2.0), vouching("b", layout, pace=2.0), *strangers)
    assert plan.trusted == {0, 1}
    assert plan.pace == 2.0


# Of these, a and b have delivered in recent rounds.
TRUSTED = ("a", "b")


def vouching(name: str, layout: Layout, **fields: Any) -> Member:
    return member(name, layout, vouched=vouchers({}, set(TRUSTED) - {name}), **fields)


def test_a_stranger_reduces_nothing_whatever_bandwidth_it_declares() -> None:
    layout = small_layout(2, shared=20_000)
    honest = [vouching("a", layout, held=[0]), vouching("b", layout, held=[1])]
    strangers = [member(f"s{i}", layout, tokens=0, bandwidth_mbps=1e6) for i in range(5)]
    plan = plan_of(layout, *honest, *strangers)
    assert {part.reducer for part in plan.parts} == {0, 1}


def test_the_expert_of_a_newcomer_is_reduced_by_a_peer_that_has_delivered() -> None:
    layout = small_layout(2)
    plan = plan_of(layout, vouching("a", layout), vouching("b", layout), member("c", layout, held=[0]))
    assert contributors(plan, 1).keys() == {2}
    assert {part.reducer for part in plan.parts if part.block == 1} <= {0, 1}


def test_while_nobody_has_delivered_all_reduce() -> None:
    layout = small_layout(1, shared=20_000)
    plan = plan_of(layout, *(member(name, layout) for name in "abc"))
    assert reduced(plan, SHARED_BLOCK).keys() == {0, 1, 2}


def test_a_block_whose_base_no_trusted_member_holds_is_reduced_by_those_that_hold_it() -> None:
    layout = small_layout(1)
    plan = plan_of(
        layout, vouching("a", layout, **at(layout, 4)), *(member(name, layout, **at(layout, 5)) for name in "cde")
    )
    assert {part.reducer for part in plan.parts} <= {1, 2, 3}


def test_shared_parts_make_up_for_uneven_experts() -> None:
    layout = small_layout(4, shared=60_000, expert=6_000)
    plan = plan_of(layout, member("a", layout, held=[0, 1, 2, 3]), member("b", layout), max_part=500)
    assert reduced(plan)[0] == pytest.approx(42_000, rel=0.03)
    assert reduced(plan)[1] == pytest.approx(42_000, rel=0.03)
    assert reduced(plan, SHARED_BLOCK)[1] == reduced(plan)[1]


def test_a_client_reduces_nothing_not_even_its_own_experts() -> None:
    layout = small_layout(2)
    plan = plan_of(layout, member("a", layout, held=[0], reachable=False), member("b", layout, held=[1]))
    assert {part.reducer for part in plan.parts} == {1}
    assert contributors(plan, 1).keys() == {0}


def test_nothing_happens_among_clients_alone() -> None:
    layout = small_layout(2)
    plan = plan_of(layout, *(member(name, layout, held=[0], reachable=False) for name in "ab"))
    assert plan.parts == ()
    assert plan.blocks == {}


def test_idle_members_that_agree_need_no_round() -> None:
    layout = small_layout(2)
    assert plan_of(layout, member("a", layout, tokens=0), member("b", layout, tokens=0)).parts == ()


def test_small_parts_are_not_worth_their_headers() -> None:
    layout = small_layout(1, shared=50_000)
    plan = plan_of(layout, *(member(f"p{i}", layout) for i in range(6)), max_part=1 << 16)
    sizes = [part.size for part in plan.parts if part.block == SHARED_BLOCK]
    assert set(sizes[:-1]) == {MIN_PART_ELEMENTS}


def forms(layout: Layout, *members: Member) -> tuple[BlockPlan, list[Form]]:
    """The shared block's plan, and in which form each member contributes to it."""
    block = plan_of(layout, *members).blocks[SHARED_BLOCK]
    return block, [c.form for c in block.contributions]


def at(layout: Layout, version: int, fork: int = 0) -> dict[str, Any]:
    num_blocks = len(layout.blocks)
    return {"versions": [version] * num_blocks, "digests": [bytes([version, fork]) * 16] * num_blocks}


def test_who_has_an_older_base_sends_its_work_and_gets_the_values() -> None:
    layout = small_layout(1)
    block, sent = forms(
        layout,
        member("a", layout, **at(layout, 5)),
        member("b", layout, **at(layout, 5)),
        member("c", layout, **at(layout, 3)),
    )
    assert block.base_version == 5
    assert block.in_base == {0, 1}
    assert sent == [Form.DELTA, Form.DELTA, Form.DELTA]
    assert [block.result_form(i) for i in range(3)] == [Form.DELTA, Form.DELTA, Form.FULL]


@pytest.mark.parametrize("version", [5, 7])
def test_who_went_another_way_sends_its_values(version: int) -> None:
    layout = small_layout(1)
    a, b, c = (
        member("a", layout, **at(layout, 5)),
        member("b", layout, **at(layout, 5)),
        member("c", layout, **at(layout, version, fork=1)),
    )
    block, sent = forms(layout, a, b, c)
    assert block.in_base == {0, 1}
    assert sent == [Form.DELTA, Form.DELTA, Form.FULL]
    assert block.result_form(2) is Form.FULL


def test_the_majority_decides_even_when_it_is_older() -> None:
    layout = small_layout(1)
    block, _ = forms(
        layout,
        member("a", layout, **at(layout, 4)),
        member("b", layout, **at(layout, 4)),
        member("c", layout, **at(layout, 8)),
    )
    assert block.base_version == 4


def test_of_two_equal_camps_the_newer_base_wins() -> None:
    layout = small_layout(1)
    block, sent = forms(layout, member("a", layout, **at(layout, 4)), member("b", layout, **at(layout, 8)))
    assert block.base_version == 8
    assert block.in_base == {1}
    assert sent == [Form.DELTA, Form.DELTA]


def test_a_base_that_only_clients_have_cannot_be_used() -> None:
    layout = small_layout(1)
    block, sent = forms(
        layout,
        member("a", layout, reachable=False, **at(layout, 8)),
        member("b", layout, reachable=False, **at(layout, 8)),
        member("c", layout, **at(layout, 4)),
    )
    assert block.base_version == 4
    assert block.in_base == {2}
    assert sent == [Form.FULL, Form.FULL, Form.DELTA]


def test_a_member_that_lags_behind_is_healed_where_nobody_trains() -> None:
    layout = small_layout(1)
    plan = plan_of(
        layout, member("a", layout, tokens=0, **at(layout, 8)), member("b", layout, tokens=0, **at(layout, 4))
    )
    for block in plan.blocks.values():
        assert block.contributions == ()
        assert block.new_version(ROUND) == 8  # nothing was trained: the version stays
        assert not block.receives(0)
        assert block.receives(1)
    assert plan.wanted(0) == []
    assert plan.wanted(1) == list(plan.parts)


def test_what_was_trained_gets_the_rounds_number() -> None:
    layout = small_layout(2)
    plan = plan_of(layout, member("a", layout, held=[0]))
    assert {index: block.new_version(ROUND) for index, block in plan.blocks.items()} == {0: ROUND, 1: ROUND}


# Weights.


def weights(plan: Plan, block: int) -> list[float]:
    return [c.weight for c in plan.blocks[block].contributions]


def test_shared_weights_are_tokens_and_expert_weights_are_routed_tokens() -> None:
    layout = small_layout(2)
    plan = plan_of(
        layout,
        member("a", layout, tokens=150, held=[0], routed=[50]),
        member("b", layout, tokens=100, held=[0, 1], routed=[30, 5]),
    )
    assert weights(plan, 0) == [150.0, 100.0]
    assert weights(plan, 1) == [50.0, 30.0]
    assert weights(plan, 2) == [5.0]


def test_an_absurd_claim_weighs_at_most_a_fixed_multiple_of_the_median() -> None:
    layout = small_layout(1)
    tokens = [90, 100, 110, 10**12]
    plan = plan_of(layout, *(member(f"p{i}", layout, tokens=t) for i, t in enumerate(tokens)))
    limit = MAX_WEIGHT_RATIO * 100  # the lower median
    assert weights(plan, 0) == [90.0, 100.0, 110.0, limit]


def test_a_holder_to_which_nothing_was_routed_leaves_the_expert_to_the_others() -> None:
    layout = small_layout(1)
    plan = plan_of(layout, member("a", layout, held=[0], routed=[0]), member("b", layout, held=[0], routed=[8]))
    assert contributors(plan, 1) == {1: Contribution(1, 8.0, Form.DELTA, stated_rms=0.01)}


def test_an_expert_without_any_tokens_still_follows_its_holders() -> None:
    """Weight decay and merges have changed it."""
    layout = small_layout(1)
    plan = plan_of(layout, member("a", layout, held=[0], routed=[0]), member("b", layout, held=[0], routed=[0]))
    assert weights(plan, 1) == [1.0, 1.0]


def test_a_side_that_has_committed_fewer_rounds_since_the_split_sends_its_values_too() -> None:
    layout = small_layout()
    before = Lineage({4: b"4" * 8})
    ours, theirs = before.after(5, b"ours ours"), before.after(5, b"theirs theirs").after(6, b"theirs 6.")
    late = ours

    def on(lineage: Lineage, version: int, digest: bytes) -> dict[str, Any]:
        commits, marks = lineage.to_lists()
        blocks = len(layout.blocks)
        return {"commits": commits, "marks": marks, "versions": [version] * blocks, "digests": [digest * 32] * blocks}

    split = plan_of(
        layout,
        member("a", layout, **on(theirs, 6, b"t")),
        member("b", layout, **on(theirs, 6, b"t")),
        member("c", layout, **on(ours, 5, b"o")),
    )
    assert contributors(split, SHARED_BLOCK)[2].form is Form.FULL
    further = ours.after(6, b"ours six")
    late_only = plan_of(
        layout,
        member("a", layout, **on(further, 6, b"t")),
        member("b", layout, **on(further, 6, b"t")),
        member("c", layout, **on(late, 5, b"o")),
    )
    assert contributors(late_only, SHARED_BLOCK)[2].form is Form.DELTA


def test_the_common_lineage_is_that_of_most_members() -> None:
    layout = small_layout()
    one, other = Lineage({3: b"a" * 8}), Lineage({7: b"b" * 8})

    def having(lineage: Lineage) -> dict[str, Any]:
        commits, marks = lineage.to_lists()
        return {"commits": commits, "marks": marks}

    members = [member(f"{i}", layout, **having(one)) for i in range(3)]
    members += [member(f"{i}", layout, **having(other)) for i in range(3, 5)]
    assert common_lineage(members) == one
    assert common_lineage(members, among=[2, 3, 4]) == other
    # A member that claims the same newest commit with another past does not rewrite it.
    liar = member("x", layout, **having(Lineage({1: b"c" * 8, 3: b"a" * 8})))
    assert common_lineage([*members, liar]) == one


def test_a_member_weighs_no_more_than_its_invitation_allows() -> None:
    layout = small_layout()
    experts = {"held": [0], "routed": [300]}
    limited = replace(member("limited", layout, tokens=1000, held=[0, 1], routed=[900, 50]), most_weight=0.1)
    others = [member(name, layout, tokens=300, **experts) for name in ("b", "c")]
    plan = plan_of(layout, limited, *others)
    place = 2  # by name
    for block in (0, 1):
        weights = {i: contribution.weight for i, contribution in contributors(plan, block).items()}
        assert weights[place] / sum(weights.values()) == pytest.approx(0.1)
        assert weights[0] == weights[1]
    assert contributors(plan, 2)[place].weight > 0  # of an expert that nobody else trains, it is the only teacher


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ((100, 100, 100, 100), (1.0, 0.1, 0.1, 0.1), (0.7, 0.1, 0.1, 0.1)),
        ((10, 640, 640, 640), (1.0, 0.3, 0.3, 0.3), (0.1, 0.3, 0.3, 0.3)),
        ((100, 100, 10, 100), (1.0, 0.1, 0.1, 1.0), None),  # the third is within its limit
        ((100, 100, 100, 100), (0.1, 0.1, 0.2, 0.2), (1 / 6, 1 / 6, 1 / 3, 1 / 3)),  # nobody is unlimited
    ],
)
def test_limits_hold_together(
    tokens: tuple[int, ...], most: tuple[float, ...], expected: tuple[float, ...] | None
) -> None:
    layout = small_layout()
    members = [
        replace(member(name, layout, tokens=count), most_weight=share)
        for name, count, share in zip("abcd", tokens, most, strict=True)
    ]
    weights = [contribution.weight for _, contribution in sorted(contributors(plan_of(layout, *members), 0).items())]
    shares = [weight / sum(weights) for weight in weights]
    if expected is not None:
        assert shares == pytest.approx(list(expected), rel=0.02)
    else:
        assert shares[1] == pytest.approx(0.1)
        assert shares[2] < 0.1
        assert shares[0] == pytest.approx(shares[3])


def test_the_work_of_a_member_that_most_ignore_does_not_count() -> None:
    """Three of four say so of d. Otherwise it would decide limits and the weight of expert 0."""
    layout = small_layout(3, shared=20_000)
    held = {"a": [0], "b": [0], "c": [1], "d": [0, 2]}
    members = [
        member(
            name,
            layout,
            held=held[name],
            tokens=10**9 if name == "d" else 100,
            routed=[10**9 if name == "d" else 50] * len(held[name]),
            vouched=vouchers({}, set("abcd") - {name}, doubted={"d"} - {name}, ignored={"d"} - {name}),
        )
        for name in "abcd"
    ]
    plan = plan_of(layout, *members)
    assert plan.ignored == plan.without_duty == {3}
    assert {i: c.weight for i, c in contributors(plan, SHARED_BLOCK).items()} == {0: 100, 1: 100, 2: 100}
    assert {i: c.weight for i, c in contributors(plan, 1).items()} == {0: 50, 1: 50}
    assert 3 not in plan.blocks  # of an expert that it alone holds, nothing changes
    assert plan.claims[3].tokens_ratio == 0
    assert {part.block for part in plan.wanted(3)} == {0, 1, 2}  # it is told the results like any other
    noticed_by_one = [
        replace(m, statement=m.statement.model_copy(update={"vouched": b""})) if m.peer_id in "bc" else m
        for m in members
    ]
    plan = plan_of(layout, *noticed_by_one)
    assert plan.ignored == frozenset()
    assert contributors(plan, SHARED_BLOCK).keys() == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("new_tokens", "expected"),
    [
        ((100,), 1 / 5),  # no more than a third anyway
        ((10**9,), 1 / 3),  # believed up to twice the median
        ((10**9, 10**9), 1 / 3),
        ((10**9, 10**9, 100), 1 / 3),
        ((100, 100, 100, 100), 1 / 2),  # each side calls the other new
        ((100,) * 5, 2 / 3),  # a majority calls the others new
    ],
)
def test_new_identities_weigh_at_most_a_third_together(new_tokens: tuple[int, ...], expected: float) -> None:
    layout = small_layout(2, shared=20_000)
    known, new = "abcd", [f"new{i}" for i in range(len(new_tokens))]
    said = {own: vouchers({}, {*known, *new} - {own}, established=set(known) - {own}) for own in known}
    said |= {own: vouchers({}, {*known, *new} - {own}, established=set(new) - {own}) for own in new}
    tokens = dict.fromkeys(known, 100) | dict(zip(new, new_tokens, strict=True))
    held = {name: [0] if name in known else [0, 1] for name in tokens}
    members = [
        member(n, layout, tokens=t, held=held[n], routed=[t] * len(held[n]), vouched=said[n]) for n, t in tokens.items()
    ]

    def share(plan: Plan, block: int) -> float:
        weights = {i: c.weight for i, c in contributors(plan, block).items()}
        return sum(weight for i, weight in weights.items() if i >= len(known)) / sum(weights.values())

    limited = make_plan(group(members), layout, MAX_PART, most_of_newcomers=1 / 3)
    assert share(limited, SHARED_BLOCK) == pytest.approx(expected)
    assert share(limited, 1) == pytest.approx(expected)
    assert contributors(limited, 2).keys() == set(range(len(known), len(members)))  # nobody else trains that one
    counted = [min(tokens, 200) for tokens in new_tokens]
    private = share(plan_of(layout, *members), SHARED_BLOCK)
    assert private == pytest.approx(sum(counted) / (sum(counted) + 400))
