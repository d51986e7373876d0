"""Who reduces which part of a round, and how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.protocol.rounds.plan import MIN_PART_ELEMENTS, PARTS_PER_MEMBER
from spes_swarm.protocol.rounds.statement import Member
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.plans import at, contributors, plan_of, reduced
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import member

LARGE_PART = 1 << 18


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
    layout = small_layout(1, shared=5 * MIN_PART_ELEMENTS + 1000)
    plan = plan_of(layout, *(member(f"p{i}", layout) for i in range(6)), max_part=LARGE_PART)
    sizes = [part.size for part in plan.parts if part.block == SHARED_BLOCK]
    assert len(sizes) == len(reduced(plan, SHARED_BLOCK)) == 5
    assert min(sizes) >= MIN_PART_ELEMENTS
    assert (
        len(plan_of(layout, *(member(f"p{i}", layout) for i in range(6)), max_part=MIN_PART_ELEMENTS // 2).parts) > 10
    )


@pytest.mark.parametrize("max_part", [LARGE_PART, 30_000])
def test_the_block_of_a_sole_reducer_is_cut_only_into_the_largest_parts(max_part: int) -> None:
    layout = small_layout(2, expert=100_000)
    plan = plan_of(layout, member("a", layout, held=[0]), member("b", layout), max_part=max_part)
    (whole,) = [block for block in layout.blocks if block.expert == 0]
    parts = [part for part in plan.parts if part.block == whole.index]
    assert {part.reducer for part in parts} == {0}
    assert [part.start for part in parts] == list(range(whole.start, whole.stop, max_part))
    assert sum(part.size for part in parts) == whole.size


@pytest.mark.parametrize("num_members", [2, 3, 5, 8, 13, 24, 33, 50, 64])
@pytest.mark.parametrize("shared", [1_000_000, 10_000_000])
@pytest.mark.parametrize("num_experts", [1, 96])  # of 25,000 values; some members hold more of them than others
def test_members_of_equal_rates_reduce_about_the_same(num_members: int, shared: int, num_experts: int) -> None:
    layout = small_layout(num_experts, shared=shared, expert=25_000 if num_experts > 1 else 1)
    held = [list(range(i, num_experts, num_members)) for i in range(num_members)]
    plan = plan_of(layout, *(member(f"p{i}", layout, held=held[i]) for i in range(num_members)), max_part=LARGE_PART)
    loads = reduced(plan)
    equal = (shared + num_experts * layout.expert_block(0).size) / num_members
    assert len(loads) == num_members
    assert max(loads.values()) <= 1.25 * equal
    # Parts of other sizes would be more: those of the experts, and of a block that is larger than its share of these.
    assert len(plan.parts) <= num_experts + max(PARTS_PER_MEMBER * num_members, -(-shared // LARGE_PART))


@pytest.mark.parametrize("num_members", [2, 3, 5, 8, 13, 24, 64])
def test_a_member_of_half_the_rate_reduces_about_half_as_much(num_members: int) -> None:
    layout = small_layout(1, shared=PARTS_PER_MEMBER * MIN_PART_ELEMENTS * num_members, expert=1)
    names = [f"p{i}" for i in range(num_members)]
    known = {
        name: vouchers({}, set(names) - {name}, rates={other: 32.0 for other in names if other != name})
        for name in names
    }
    members = [member(n, layout, bandwidth_mbps=16.0 if n == "p1" else 1e3, vouched=known[n]) for n in names]
    loads = reduced(plan_of(layout, *members, max_part=LARGE_PART), SHARED_BLOCK)
    slow = loads.pop(sorted(names).index("p1"))
    assert 0.3 <= slow / (sum(loads.values()) / len(loads)) <= 0.6
    assert len(loads) == num_members - 1
    assert max(loads.values()) - min(loads.values()) <= MIN_PART_ELEMENTS  # one part
