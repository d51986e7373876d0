"""Who trains which expert, when everybody decides alone."""

from __future__ import annotations

from collections import Counter

from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.ownership import choose_experts, coverage, priority, settle

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


@given(tables())
def test_coverage_counts_holders(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    assert coverage(table, num_experts) == [len(holders(table, e)) for e in range(num_experts)]


@given(tables(), st.integers(1, 8))
def test_a_newcomer_takes_what_the_others_hold_least(given_table: tuple[int, Table], want: int) -> None:
    num_experts, table = given_table
    chosen = choose_experts(table, "newcomer", num_experts, want)
    assert len(chosen) == min(want, num_experts) == len(set(chosen))
    left = set(range(num_experts)) - set(chosen)
    counts = Counter(e for held in table.values() for e in held)
    for taken in chosen:
        for passed in left:
            rank = (counts[taken], blake3(f"newcomer|{taken}".encode()).digest())
            assert rank < (counts[passed], blake3(f"newcomer|{passed}".encode()).digest())


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


@given(tables())
def test_settling_keeps_the_number_of_experts_and_what_only_this_peer_holds(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    for me, mine in table.items():
        settled = settle(table, me, num_experts)
        assert len(set(settled)) == len(mine)
        assert list(settled) == sorted(settled)
        assert {e for e in mine if holders(table, e) == [me]} <= set(settled)
        for gained in set(settled) - set(mine):
            assert holders(table, gained) == []


@settings(max_examples=300)
@given(tables())
def test_when_all_settle_at_once_every_expert_that_there_is_room_for_gets_a_holder(
    given_table: tuple[int, Table],
) -> None:
    num_experts, table = given_table
    room = sum(map(len, table.values()))
    for _ in range(num_experts + 1):  # every turn covers at least one more
        before, table = table, {peer: settle(table, peer, num_experts) for peer in table}
        if before == table:
            break
    assert before == table
    assert sum(bool(holders(table, e)) for e in range(num_experts)) == min(room, num_experts)


@given(tables())
def test_when_they_settle_one_after_another_too(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    room = sum(map(len, table.values()))
    for _ in range(num_experts + 1):
        for peer in table:
            table = {**table, peer: settle(table, peer, num_experts)}
    assert sum(bool(holders(table, e)) for e in range(num_experts)) == min(room, num_experts)
    assert {peer: settle(table, peer, num_experts) for peer in table} == table


@given(tables())
def test_nobody_moves_when_all_experts_are_held(given_table: tuple[int, Table]) -> None:
    num_experts, table = given_table
    table["rest"] = tuple(range(num_experts))
    assert {peer: settle(table, peer, num_experts) for peer in table} == table
