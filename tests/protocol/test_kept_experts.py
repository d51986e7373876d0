"""Reassignment after a round that left experts out: their holders keep them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.ownership.reassignment import Holding, Rules
from tests.helpers.ownership_cases import Case, before, cases, counts, decide


@pytest.mark.slow
@settings(max_examples=300)
@given(cases(), st.sets(st.integers(0, 6)))
def test_no_holder_gives_up_an_expert_that_did_not_take_part(case: Case, kept: set[int]) -> None:
    outcome = decide(replace(case, kept=frozenset(kept)))
    for peer, holding in case.table.items():
        assert set(holding.experts) & kept <= set(outcome[peer])


def test_nobody_makes_way_with_an_expert_that_did_not_take_part() -> None:
    """Only "a" has room, and it holds the expert that has too few holders; of the others one could pass 1 or 2 on."""
    table = {"a": Holding((0,), 2), "b": Holding((1, 2), 2), "c": Holding((1, 2), 2)}
    case = Case(table, 3, 1, (0, 0, 0), rules=Rules(replicas=2))
    assert counts(decide(case))[0] == 2
    assert decide(replace(case, kept=frozenset({1, 2}))) == before(case)
    passed = decide(replace(case, kept=frozenset({1})))
    assert passed["a"] == (0, 2)
    assert counts(passed) == {0: 2, 1: 2, 2: 2}


@pytest.mark.slow
@settings(max_examples=300)
@given(cases(fits=True, limits=False))
def test_where_no_expert_took_part_room_goes_to_those_with_the_fewest_holders(case: Case) -> None:
    """Nobody gives anything up, so what is gained is what the room left suffices for."""
    everything = replace(case, kept=frozenset(range(case.num_experts)))
    outcome = decide(everything)
    free = sum(min(h.room, case.num_experts) - len(h.experts) for h in case.movable.values())
    uncovered = case.takeable - counts(before(case)).keys()
    assert len(counts(outcome).keys() & uncovered) == min(free, len(uncovered))
    assert decide(everything.after(outcome)) == outcome
