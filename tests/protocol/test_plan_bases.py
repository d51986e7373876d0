"""The base of each block, and in which form members with another one send and get values."""

from __future__ import annotations

from typing import Any

import pytest

from spes_swarm.protocol.consensus.layout import SHARED_BLOCK, Layout
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.rounds.plan import BlockPlan, Form, common_lineage
from spes_swarm.protocol.rounds.statement import Member
from tests.helpers.plans import at, contributors, plan_of
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import ROUND, member


def forms(layout: Layout, *members: Member) -> tuple[BlockPlan, list[Form]]:
    """The shared block's plan, and in which form each member contributes to it."""
    block = plan_of(layout, *members).blocks[SHARED_BLOCK]
    return block, [c.form for c in block.contributions]


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
