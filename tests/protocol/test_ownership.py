"""Which peer trains which expert, when every peer decides on its own."""

from __future__ import annotations

from collections import Counter

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.ownership.reassignment import (
    Rules,
    choose_experts,
    coverage,
    priority,
    reserved_experts,
    reserving,
    resolve,
)

Table = dict[str, tuple[int, ...]]


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, Table]:
    """Number of experts, and any leases at all on them."""
    num_experts = draw(st.integers(1, 8))
    names = draw(st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=6, unique=True))
    experts = st.sets(st.integers(0, num_experts - 1), min_size=1)
    return num_experts, {name: tuple(sorted(draw(experts))) for name in names}


def holders(table: Table, expert: int) -> list[str]:
    return [peer for peer, held in table.items() if expert in held]


def test_a_claim_is_the_hash_of_peer_and_expert() -> None:
    assert priority("peer", 3) == blake3(b"peer|3").digest()


@pytest.mark.slow
@given(tables())
def test_coverage_counts_holders(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    assert coverage(table, num_experts) == [len(holders(table, e)) for e in range(num_experts)]


@given(tables(), st.integers(1, 8))
def test_a_newcomer_takes_what_the_others_hold_least(given_table: tuple[int, Table], want: int) -> None:
    num_experts, table = given_table
    chosen = choose_experts(table, "newcomer", num_experts, want)
    assert len(chosen) == min(want, num_experts) == len(set(chosen))
    assert list(chosen) == sorted(chosen)
    left = set(range(num_experts)) - set(chosen)
    counts = Counter(e for held in table.values() for e in held)
    for taken in chosen:
        for passed in left:
            rank = (counts[taken], blake3(f"newcomer|{taken}".encode()).digest())
            assert rank < (counts[passed], blake3(f"newcomer|{passed}".encode()).digest())


@pytest.mark.slow
@given(tables(), st.integers(1, 8))
def test_the_choice_depends_on_the_leases_only(given_table: tuple[int, Table], want: int) -> None:
    num_experts, table = given_table
    me = next(iter(table))
    chosen = choose_experts(table, me, num_experts, want)
    reversed_table = dict(reversed([(peer, held[::-1]) for peer, held in table.items()]))
    assert choose_experts(reversed_table, me, num_experts, want) == chosen
    # What this peer holds already does not count against it.
    assert choose_experts({**table, me: (0,)}, me, num_experts, want) == chosen


def test_peers_that_start_alone_do_not_all_choose_alike() -> None:
    choices = {choose_experts({}, f"peer{i}", 8, 2) for i in range(20)}
    assert len(choices) > 5


@pytest.mark.parametrize("alone", range(8))
def test_if_nobody_lacks_a_holder_a_newcomer_takes_over_from_the_peer_that_has_most(alone: int) -> None:
    table = {"founder": [expert for expert in range(8) if expert != alone], "second": [alone]}
    (chosen,) = choose_experts(table, "newcomer", 8, 8, Rules(replicas=1))
    assert chosen != alone


@pytest.mark.slow
@given(tables(), st.integers(1, 8), st.integers(1, 4))
def test_with_a_target_only_what_has_too_few_holders_is_chosen_but_never_nothing(
    given_table: tuple[int, Table], want: int, replicas: int
) -> None:
    num_experts, table = given_table
    chosen = choose_experts(table, "newcomer", num_experts, want, Rules(replicas))
    counts = Counter(e for held in table.values() for e in held)
    needy = sorted(e for e in range(num_experts) if counts[e] < replicas)
    if needy:
        assert set(chosen) <= set(needy)
        assert len(chosen) == min(want, len(needy))
    else:
        (only,) = chosen
        assert counts[only] == min(counts[e] for e in range(num_experts))


@pytest.mark.slow
@given(tables(), st.integers(1, 8), st.integers(1, 4))
def test_beyond_the_limit_only_what_nobody_holds_is_chosen(
    given_table: tuple[int, Table], want: int, limit: int
) -> None:
    num_experts, table = given_table
    chosen = choose_experts(table, "newcomer", num_experts, want, Rules(most_each=limit))
    unheld = sum(not holders(table, e) for e in range(num_experts))
    assert len(chosen) == min(want, num_experts, max(limit, unheld))
    assert set(chosen) <= set(choose_experts(table, "newcomer", num_experts, want))


# Reservations.


def test_half_of_the_views_reserve_an_expert() -> None:
    """Of four members two see a lease on expert 0 and one on expert 1; expert 2 is held in the group."""
    views = [[0, 1, 2], [0, 2], [2], [2]]
    assert reserved_experts([2], views) == {0}
    # Of three, one is less than half and two are more.
    assert reserved_experts([], [[0, 1], [0], []]) == {0}
    # Of two, one is half: whoever has just joined does not see all leases yet.
    assert reserved_experts([], [[0], []]) == {0}
    assert reserved_experts([0], [[0]]) == set()
    assert reserved_experts([], []) == set()


@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.sets(st.integers(0, 5)), min_size=n, max_size=n)))
def test_reservations_are_a_vote_of_the_members(views: list[set[int]]) -> None:
    reserved = reserved_experts([], views)
    for expert in range(6):
        share = sum(expert in view for view in views) / len(views)
        assert (expert in reserved) == (share >= 0.5)


def test_a_lease_reserves_no_more_than_one_member_may_hold() -> None:
    table = {"ghost": range(8), "absent": (1, 6), "odd": (7, 8, 900)}
    assert reserving(table, 8, Rules()) == set(range(8))
    best = sorted(range(8), key=lambda e: blake3(f"ghost|{e}".encode()).digest())[:3]
    assert reserving(table, 8, Rules(most_each=3)) == {*best, 1, 6, 7}
    assert reserving({"ghost": range(8)}, 8, Rules(most_each=8)) == set(range(8))
    # What the model does not have takes nobody's place.
    assert reserving({"odd": (900, 901, 902, 3, 4)}, 8, Rules(most_each=2)) == {3, 4}


@given(tables())
def test_settling_keeps_the_number_of_experts_and_what_only_this_peer_holds(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    for me, mine in table.items():
        settled = resolve(table, me, num_experts)
        assert len(set(settled)) == len(mine)
        assert list(settled) == sorted(settled)
        assert {e for e in mine if holders(table, e) == [me]} <= set(settled)
        for gained in set(settled) - set(mine):
            assert holders(table, gained) == []


def test_of_several_holders_the_one_with_the_best_claim_keeps_an_expert() -> None:
    names = ["peer0", "peer1", "peer2"]
    for expert in range(20):
        leases = dict.fromkeys(names, (expert,))
        kept_by = [peer for peer in names if expert in resolve(leases, peer, 30)]
        assert kept_by == [min(names, key=lambda peer: blake3(f"{peer}|{expert}".encode()).digest())]


@pytest.mark.slow
@given(tables())
def test_settling_depends_on_who_holds_what_only(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    turned = {peer: held[::-1] for peer, held in table.items()}
    for me in table:
        assert resolve(turned, me, num_experts) == resolve(table, me, num_experts)


def test_of_the_experts_without_a_holder_each_goes_to_the_one_with_its_best_claim() -> None:
    """Or all that have to give way would go to the same one, and have to give way again."""
    table = {f"peer{i}": (0,) for i in range(12)}
    gone = {}
    for me in table:
        (now,) = resolve(table, me, 8)
        assert now in (0, min(range(1, 8), key=lambda e: blake3(f"{me}|{e}".encode()).digest()))
        gone[me] = now
    assert list(gone.values()).count(0) == 1
    assert len(set(gone.values())) > 3


@pytest.mark.slow
@settings(max_examples=300)
@given(tables())
def test_when_all_settle_at_once_every_expert_that_there_is_room_for_gets_a_holder(
    given_table: tuple[int, Table],
) -> None:
    num_experts, table = given_table
    room = sum(map(len, table.values()))
    for _ in range(num_experts + 1):  # every turn covers at least one more
        before, table = table, {peer: resolve(table, peer, num_experts) for peer in table}
        if before == table:
            break
    assert before == table
    assert sum(bool(holders(table, e)) for e in range(num_experts)) == min(room, num_experts)


@pytest.mark.slow
@given(tables())
def test_when_they_settle_one_after_another_too(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    room = sum(map(len, table.values()))
    for _ in range(num_experts + 1):
        for peer in table:
            table = {**table, peer: resolve(table, peer, num_experts)}
    assert sum(bool(holders(table, e)) for e in range(num_experts)) == min(room, num_experts)
    assert {peer: resolve(table, peer, num_experts) for peer in table} == table


@pytest.mark.slow
@given(tables())
def test_nobody_moves_when_all_experts_are_held(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    table["rest"] = tuple(range(num_experts))
    assert {peer: resolve(table, peer, num_experts) for peer in table} == table
