"""Who trains which expert from round to round: what holds for any table, against references made another way."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from spes_swarm.protocol.ownership.reassignment import Holding, Rules
from tests.helpers.ownership_cases import (
    AT_SECOND_CHOICE,
    LIMITED_IN_ROTATION,
    SURPLUS_THAT_RETURNS,
    Case,
    Outcome,
    before,
    cases,
    counts,
    decide,
    gained,
)


def thoroughly(test: Callable[..., None]) -> Callable[..., None]:
    decorated: Callable[..., None] = pytest.mark.slow(settings(max_examples=300)(test))
    return decorated


def nobody_holds_more_than_it_has_room_for(case: Case, outcome: Outcome) -> None:
    assert outcome.keys() == case.table.keys()
    for peer, holding in case.movable.items():
        assert len(outcome[peer]) <= holding.room
    for experts in outcome.values():
        assert list(experts) == sorted(set(experts))
        assert set(experts) <= set(range(case.num_experts))


def experts_that_a_user_has_named_stay_within_the_limit(case: Case, outcome: Outcome) -> None:
    for peer, holding in case.table.items():
        if holding.fixed:
            assert set(outcome[peer]) <= set(holding.experts)
            assert len(outcome[peer]) >= min(len(holding.experts), case.limit)


def experts_of_absent_peers_stay_reserved(case: Case, outcome: Outcome) -> None:
    assert counts(outcome).keys() <= case.takeable


@thoroughly
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_table_does_not_matter(case: Case, rng: object) -> None:
    peers = list(case.table)
    rng.shuffle(peers)  # type: ignore[attr-defined]
    shuffled = {
        peer: replace(case.table[peer], experts=tuple(reversed(case.table[peer].experts)))
        if not case.table[peer].fixed
        else case.table[peer]
        for peer in peers
    }
    assert decide(replace(case, table=shuffled)) == decide(case)


@thoroughly
@given(cases(fits=True))
def test_an_expert_loses_its_last_holder_only_to_one_that_had_none(case: Case) -> None:
    held, holds = counts(before(case)), counts(decide(case))
    lost = held.keys() - holds.keys()
    if case.rotates:
        assert len(lost) <= len(holds.keys() - held.keys())
    else:
        assert not lost


# What is reached in one call.


def places(case: Case) -> int:
    return sum(min(holding.room, case.num_experts) for holding in case.movable.values())


@thoroughly
@given(cases(fixed=False))
def test_as_many_experts_are_covered_as_there_is_room_for(case: Case) -> None:
    # Every peer may hold any expert, so counting is enough. The limit on one member costs no coverage.
    assert len(counts(decide(case))) == min(places(case), len(case.takeable))


def experts_that_users_have_named_cost_no_coverage(case: Case, outcome: Outcome) -> None:
    assert len(counts(outcome)) >= min(places(case), len(case.takeable))
    # Who has named more than one member may hold gives some up; when experts rotate, nobody need take those.
    fixed = [holding.experts for holding in case.table.values() if holding.fixed]
    kept = [experts for experts in fixed if len(experts) <= case.limit or not case.rotates]
    assert {e for experts in kept for e in experts} <= counts(outcome).keys()


@thoroughly
@given(cases(targets=False, limits=False))
def test_all_room_is_used(case: Case) -> None:
    outcome = decide(case)
    for peer, holding in case.movable.items():
        assert len(outcome[peer]) == min(holding.room, len(case.takeable))


@thoroughly
@given(cases(targets=False))
def test_all_room_within_the_limit_is_used(case: Case) -> None:
    outcome = decide(case)
    for peer, holding in case.movable.items():
        assert len(outcome[peer]) >= min(holding.room, case.limit, len(case.takeable))


@thoroughly
@given(cases(fixed=False, targets=False))
def test_replicas_differ_by_one_at_most_or_where_there_are_many_by_a_quarter(case: Case) -> None:
    holds = counts(decide(case))
    sizes = [holds[e] for e in case.takeable]
    fewest = min(sizes, default=0)
    assert max(sizes, default=0) - fewest <= 1 + fewest // 4


@thoroughly
@given(cases())
@example(AT_SECOND_CHOICE)
@example(SURPLUS_THAT_RETURNS)
def test_deciding_again_changes_nothing(case: Case) -> None:
    case = replace(case, rules=replace(case.rules, rotate_every_rounds=50), round_number=case.round_number + 1)
    outcome = decide(case)
    for later in (case.round_number, case.round_number + 1):
        assert decide(replace(case.after(outcome), round_number=later)) == outcome


@thoroughly
@given(cases(fixed=False, targets=False, reservations=False, fits=True))
def test_no_more_moves_than_needed(case: Case) -> None:
    full = {peer: replace(holding, room=len(holding.experts)) for peer, holding in case.table.items()}
    case = replace(case, table=full, rules=Rules(None, 50))
    holds = counts(before(case))
    sizes = sorted((holds[e] for e in range(case.num_experts)), reverse=True)
    quotient, remainder = divmod(sum(sizes), case.num_experts)
    assume(quotient < 4)
    aims = [quotient + (i < remainder) for i in range(case.num_experts)]
    needed = sum(max(0, size - aim) for size, aim in zip(sizes, aims, strict=True))
    assert gained(case, decide(case)) == needed


@pytest.mark.parametrize("fixed", [False, True])
def test_an_empty_table_and_one_without_room_are_no_trouble(fixed: bool) -> None:
    assert decide(Case({}, 3, 10, (0, 0, 0))) == {}
    assert decide(Case({"a": Holding((), 0, fixed)}, 3, 10, (0, 0, 0))) == {"a": ()}


def test_a_replica_more_or_less_does_not_matter_where_there_are_many() -> None:
    def table(on_first: int, on_second: int) -> dict[str, Holding]:
        return {f"p{i}": Holding((int(i >= on_first),), 1) for i in range(on_first + on_second)}

    for on_first, on_second, expected in ((3, 1, (2, 2)), (4, 3, (4, 3)), (11, 8, (11, 8)), (13, 8, (12, 9))):
        case = Case(table(on_first, on_second), 2, 11, (10, 10))
        holds = counts(decide(case))
        assert (holds[0], holds[1]) == expected


def test_how_few_holders_are_tolerated_depends_on_the_target() -> None:
    table = {f"p{i}": Holding((int(i >= 6),), 1) for i in range(10)}  # six hold one expert, four the other
    for target, expected in ((None, (6, 4)), (4, (6, 4)), (5, (5, 5)), (6, (5, 5))):
        holds = counts(decide(Case(table, 2, 11, (10, 10), rules=Rules(target))))
        assert (holds[0], holds[1]) == expected, target


def test_over_the_rounds_it_is_everybodys_turn_to_move() -> None:
    uneven = {peer: Holding((0,), 1) for peer in "abc"}
    # Expert 0 lacks a holder, but only its own, "d", has room: "a" or "b" takes it and leaves expert 1 to "d".
    in_the_way = {"a": Holding((1,), 1), "b": Holding((1,), 1), "d": Holding((0,), 2)}
    for table, rules in ((uneven, Rules(None, 50)), (in_the_way, Rules(2, 50))):
        movers: set[str] = set()
        for number in range(1, 40):
            outcome = decide(Case(table, 2, number, (0, 0), rules=rules))
            movers |= {peer for peer in table if not set(table[peer].experts) <= set(outcome[peer])}
        assert movers == {peer for peer in table if peer != "d"}


def test_the_longest_untrained_is_served_first() -> None:
    case = Case({"a": Holding((0,), 2), "b": Holding((1,), 2)}, 6, 21, (20, 20, 9, 5, 7, 5))
    assert counts(decide(case)).keys() == {0, 1, 3, 5}


def test_the_peer_with_the_most_room_left_adopts() -> None:
    case = Case({"a": Holding((0,), 2), "b": Holding((1,), 4), "c": Holding((3,), 2)}, 4, 21, (20,) * 4)
    assert 2 in decide(replace(case, rules=Rules(replicas=1)))["b"]


def test_who_has_too_little_room_gives_up_what_others_hold_too() -> None:
    table = {"a": Holding((0, 2), 1), "b": Holding((0,), 1), "c": Holding((1,), 1)}
    for number in (1, 2, 3, 5, 8):
        assert decide(Case(table, 3, number, (0,) * 3)) == {"a": (2,), "b": (0,), "c": (1,)}


def test_peers_adopt_until_all_have_as_little_room_left() -> None:
    trained_in = (20, 20, 1, 2, 3, 4, 5, 6)
    outcome = decide(Case({"a": Holding((0,), 3), "b": Holding((1,), 5)}, 8, 21, trained_in))
    assert {2, 3} <= set(outcome["b"])  # b has room for two more than a, and those that wait for longest come first
    assert len({4, 5} & set(outcome["a"])) == len({4, 5} & set(outcome["b"])) == 1
    assert len({6, 7} & set(outcome["a"])) == len({6, 7} & set(outcome["b"])) == 1


# The replication target.


def test_of_too_many_holders_the_one_with_the_most_to_do_gives_up() -> None:
    table = {"a": Holding((0, 3), 2), "b": Holding((0, 1, 2), 3), "c": Holding((0, 4), 2)}
    for number in (1, 2, 3, 5, 8):
        outcome = decide(Case(table, 5, number, (0,) * 5, rules=Rules(2, 50)))
        assert outcome["a"] == (0, 3)
        assert outcome["c"] == (0, 4)
        assert outcome["b"] in ((1, 2, 3), (1, 2, 4))


def reachable_replicas(case: Case) -> int:
    """The most holders, none counted beyond the target, by maximum flow from movable peers to experts."""
    assert case.rules.replicas is not None
    by_users = counts({peer: h.experts for peer, h in case.table.items() if h.fixed})
    wanted = {e: max(0, case.rules.replicas - by_users[e]) for e in case.takeable}
    given_to: dict[int, list[str]] = {e: [] for e in case.takeable}

    def find_place(peer: str, seen: set[int]) -> bool:
        for e in sorted(case.takeable - seen):
            if peer in given_to[e]:
                continue
            seen.add(e)
            if len(given_to[e]) < wanted[e]:
                given_to[e].append(peer)
                return True
            for i, other in enumerate(given_to[e]):
                if find_place(other, seen):
                    given_to[e][i] = peer
                    return True
        return False

    for peer, holding in case.movable.items():
        for _ in range(holding.room):
            find_place(peer, set())
    return sum(min(n, case.rules.replicas) for n in by_users.values()) + sum(map(len, given_to.values()))


def replicas_wanted(case: Case) -> int:
    """Holders of all experts after a decision, none counted beyond the target."""
    target = case.rules.replicas
    assert target is not None
    holds = counts(decide(replace(case, rules=replace(case.rules, rotate_every_rounds=50))))
    return sum(min(count, target) for count in holds.values())


@thoroughly
@given(cases(fixed=False, limits=False).filter(lambda case: case.rules.replicas is not None))
def test_no_fewer_replicas_than_possible(case: Case) -> None:
    assert replicas_wanted(case) == reachable_replicas(case)


targeted = cases().filter(lambda case: case.rules.replicas is not None)


@thoroughly
@given(targeted)
def test_named_experts_and_the_limit_cost_no_replicas_that_the_others_have_room_for(case: Case) -> None:
    others = {p: replace(h, room=min(h.room, case.limit)) for p, h in case.movable.items()}
    unheld = set(range(case.num_experts)) - {e for holding in others.values() for e in holding.experts}
    without = replace(case, table=others, reserved=frozenset(unheld - case.takeable))
    assert replicas_wanted(case) >= reachable_replicas(without)


# One of the two has to leave expert 1 to the other: for expert 0, and not in addition to it.
ONE_OF_TWO = Case({"a": Holding((1,), 2), "b": Holding((1,), 1)}, 2, 34, (1, 29), rules=Rules(replicas=1))
# Everybody has everything, and two of three are enough.
ONE_TOO_MANY = Case({name: Holding((0, 1, 2), 3) for name in "abc"}, 3, 34, (1, 2, 3), rules=Rules(replicas=2))


def more_replicas_than_wanted_only_where_somebody_would_hold_nothing(case: Case, outcome: Outcome) -> None:
    if case.rules.replicas is None:
        return
    holds = counts(outcome)
    own = counts({peer: outcome[peer] for peer in case.movable})  # nobody gives way to named experts
    for peer in case.movable:
        if any(own[e] > case.rules.replicas for e in outcome[peer]):
            assert len(outcome[peer]) == 1
            # There was nothing better to hold.
            assert all(holds[e] >= case.rules.replicas for e in case.takeable)


def nobody_with_room_holds_nothing(case: Case, outcome: Outcome) -> None:
    for peer, holding in case.movable.items():
        assert outcome[peer] or not holding.room or not case.takeable


# The limit on one member, and experts that users have named.


@thoroughly
@given(cases(fixed=False))
def test_beyond_the_limit_a_member_holds_only_what_nobody_else_can(case: Case) -> None:
    outcome = decide(case)
    holds = counts(outcome)
    if any(len(experts) > case.limit for experts in outcome.values()):
        # Nobody has room left, and nobody could leave an expert to somebody else and take one of these.
        assert set(holds.values()) == {1}
        for peer, holding in case.table.items():
            assert len(outcome[peer]) >= min(holding.room, case.limit)


# Where what others adopt at first makes other experts ones that can be given up.
IN_TWO_TURNS = Case(
    {"a": Holding((0, 1, 2), 4), "b": Holding((), 4), "c": Holding((1,), 3, fixed=True), "d": Holding((), 4)},
    3,
    41,
    (0, 38, 9),
    rules=Rules(most_each=1),
)
NAMED_IN_TWO_TURNS = Case(
    {
        "a": Holding((0, 3, 4, 6), 4, fixed=True),
        "b": Holding((), 1),
        "c": Holding((3, 5, 6), 3, fixed=True),
        "d": Holding((0,), 4, fixed=True),
        "e": Holding((4, 5), 6, fixed=True),
    },
    7,
    2,
    (0, 0, 2, 0, 1, 2, 2),
    rules=Rules(rotate_every_rounds=3, most_each=1),
)


def test_who_is_beyond_the_limit_gives_up_what_is_adopted_instead_of_its_offer() -> None:
    assert decide(AT_SECOND_CHOICE) == {"a": (0,), "b": (1,), "c": (1, 2)}


def beyond_the_limit_nobody_keeps_a_replica(case: Case, outcome: Outcome) -> None:
    own, holds = counts({peer: outcome[peer] for peer in case.movable}), counts(outcome)
    for peer, experts in outcome.items():
        if len(experts) > case.limit:
            assert {(holds if case.table[peer].fixed else own)[e] for e in experts} == {1}


PROPERTIES = (
    nobody_holds_more_than_it_has_room_for,
    experts_that_a_user_has_named_stay_within_the_limit,
    experts_of_absent_peers_stay_reserved,
    experts_that_users_have_named_cost_no_coverage,
    more_replicas_than_wanted_only_where_somebody_would_hold_nothing,
    nobody_with_room_holds_nothing,
    beyond_the_limit_nobody_keeps_a_replica,
)


@thoroughly
@given(cases())
@example(LIMITED_IN_ROTATION)
@example(ONE_OF_TWO)
@example(ONE_TOO_MANY)
@example(IN_TWO_TURNS)
@example(NAMED_IN_TWO_TURNS)
@example(AT_SECOND_CHOICE)
def test_every_property_holds_for_any_table(case: Case) -> None:
    outcome = decide(case)
    for holds in PROPERTIES:
        holds(case, outcome)


@thoroughly
@given(cases(), st.data())
def test_a_claim_of_named_experts_takes_nothing_from_a_swarm_at_rest(case: Case, data: st.DataObject) -> None:
    case = replace(case, rules=replace(case.rules, rotate_every_rounds=50))
    at_rest = case.after(decide(case))
    named = data.draw(st.sets(st.sampled_from(sorted(case.takeable)))) if case.takeable else set()
    claimed = replace(at_rest, table={**at_rest.table, "claimant": Holding(tuple(sorted(named)), 0, fixed=True)})
    outcome = decide(claimed)
    for peer in case.movable:
        assert set(at_rest.table[peer].experts) <= set(outcome[peer])


@pytest.mark.parametrize("replicas", [None, 1, 2])
@pytest.mark.parametrize("number_of_claimants", [1, 3])
def test_who_claims_all_experts_by_name_gets_the_limit_and_nobody_gives_way(
    replicas: int | None, number_of_claimants: int
) -> None:
    honest = {f"peer{i}": Holding((2 * i, 2 * i + 1), 2) for i in range(4)}
    claimants = {f"claimant{i}": Holding(tuple(range(8)), 8, fixed=True) for i in range(number_of_claimants)}
    rules = Rules(replicas, most_each=4)
    for number in range(1, 31):  # at rotations, too
        outcome = decide(Case({**honest, **claimants}, 8, number, (number,) * 8, rules=rules))
        assert {peer: outcome[peer] for peer in honest} == {p: h.experts for p, h in honest.items()}
        assert all(len(outcome[peer]) == 4 for peer in claimants)


def test_a_lone_peer_holds_everything_and_shares_it_with_whoever_comes() -> None:
    rules = Rules(most_each=4)
    alone = Case({"a": Holding((), 8)}, 8, 11, (10,) * 8, rules=rules)
    assert decide(alone) == {"a": tuple(range(8))}
    for fixed in (False, True):
        case = Case({"a": Holding(tuple(range(8)), 8, fixed)}, 8, 11, (10,) * 8, rules=rules)
        assert decide(case) == {"a": tuple(range(8))}
        for room, expected in ((1, 7), (3, 5), (4, 4), (8, 4)):
            shared = decide(replace(case, table={**case.table, "b": Holding((), room)}))
            assert len(shared["a"]) == expected
            assert set(shared["a"]) | set(shared["b"]) == set(range(8))


def test_of_several_with_more_than_the_limit_none_keeps_what_another_one_has() -> None:
    table = {peer: Holding(tuple(range(8)), 8) for peer in ("a", "b")}
    outcome = decide(Case(table, 8, 11, (10,) * 8, rules=Rules(most_each=3)))
    assert sorted(outcome["a"] + outcome["b"]) == list(range(8))
    assert {len(experts) for experts in outcome.values()} == {4}


def test_what_a_lone_peer_holds_beyond_the_limit_takes_turns_like_all_else() -> None:
    rules = Rules(rotate_every_rounds=10, most_each=1)
    for held, waiting in (((0, 1, 2, 3), (4, 5, 6, 7)), ((4, 5, 6, 7), (0, 1, 2, 3))):
        assert decide(Case({"a": Holding(held, 4)}, 8, 20, (20,) * 8, rules=rules)) == {"a": waiting}


def test_beyond_the_limit_the_longest_untrained_is_adopted_first() -> None:
    for trained_in, expected in (((9, 8, 7, 6, 5), (3, 4)), ((5, 6, 7, 8, 9), (0, 1)), ((5, 9, 8, 6, 9), (0, 3))):
        assert decide(Case({"a": Holding((), 2)}, 5, 11, trained_in, rules=Rules(most_each=1))) == {"a": expected}


def test_whoever_has_the_most_room_adopts_beyond_the_limit() -> None:
    table = {"a": Holding((0,), 2), "b": Holding((1,), 4), "c": Holding((2,), 1)}
    for number in (11, 12, 13):
        outcome = decide(Case(table, 5, number, (10,) * 5, rules=Rules(most_each=1, rotate_every_rounds=50)))
        assert outcome == {"a": (0,), "b": (1, 3, 4), "c": (2,)}


def test_in_a_rotation_those_go_first_whose_experts_a_user_has_named() -> None:
    table = {"a": Holding((0,), 1), "b": Holding((1,), 1), "c": Holding((2,), 1), "user": Holding((1,), 1, fixed=True)}
    for number in range(10, 101, 10):
        assert decide(Case(table, 4, number, (number, number, number, 3))) == {
            "a": (0,),
            "b": (3,),
            "c": (2,),
            "user": (1,),
        }


# Rotation.


@pytest.mark.slow
@settings(max_examples=200)
@given(st.integers(2, 12), st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(1, 4))
@example(12, [1], 3)
def test_no_expert_waits_for_longer_than_a_full_turn(num_experts: int, rooms: list[int], every: int) -> None:
    places = min(sum(rooms), num_experts)
    turn = -(-(num_experts - places) // places) * every + every
    held: Outcome = {f"peer{i}": () for i in range(len(rooms))}
    trained_in = [0] * num_experts
    for number in range(1, 5 * turn + 1):
        for e in counts(held):
            trained_in[e] = number
        table = {peer: Holding(experts, rooms[i]) for i, (peer, experts) in enumerate(held.items())}
        case = Case(table, num_experts, number, tuple(trained_in), rules=Rules(rotate_every_rounds=every))
        held = decide(case)
        assert len(counts(held)) == places
        # The expert is trained from the next round on.
        assert all(number + 1 - trained <= turn for e, trained in enumerate(trained_in) if e not in counts(held))
        if number % every and number > 1:
            assert held == before(case)  # between turns everybody trains in peace


def test_what_was_adopted_just_now_is_not_given_up_at_once() -> None:
    case = Case({"a": Holding((), 1)}, 3, 10, (3, 1, 2))
    assert decide(case) == {"a": (1,)}


# Speed.


def swarm(num_peers: int, num_experts: int) -> Case:
    """Peers with room for 1, 4 or 8 experts that hold what an earlier call has given them."""
    rooms = [(1, 1, 4, 8)[i % 4] for i in range(num_peers)]
    table = {f"Qm{i:044d}": Holding((), room) for i, room in enumerate(rooms)}
    case = Case(table, num_experts, 11, tuple(i % 10 for i in range(num_experts)))
    return case.after(decide(case))


@pytest.mark.parametrize("num_experts", [64, 1024])
def test_a_thousand_peers_are_decided_upon_in_no_time(num_experts: int) -> None:
    case = swarm(1000, num_experts)
    for peer in sorted(case.table)[::100]:  # ten peers have died, ten have come
        del case.table[peer]
        case.table[f"new{peer}"] = Holding((0,), 4)
    best = min(_seconds(case) for _ in range(3))
    assert best < 0.1  # about 5 ms on an idle core


def _seconds(case: Case) -> float:
    started = time.process_time()
    decide(case)
    return time.process_time() - started
