"""One peer's experts: from the others' leases at the start, from the group's statements at each commit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spes_swarm.protocol.bitmap import bitmap, members_of
from spes_swarm.protocol.members.records import Lease
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.ownership.lease_table import ExpertChange, Leases, reassign_group
from spes_swarm.protocol.ownership.reassignment import Rules
from spes_swarm.protocol.rounds.plan import Plan, make_plan
from spes_swarm.protocol.rounds.statement import Group, Member
from spes_swarm.protocol.rounds.vouchers import vouchers
from tests.helpers.rounds import small_layout
from tests.helpers.unsigned_groups import MAX_PART, ROUND, group, member

LAYOUT = small_layout(4)


def planned(*members: Member) -> tuple[Group, Plan]:
    formed = group(members)
    return formed, make_plan(formed, LAYOUT, MAX_PART)


def decided(*members: Member, rules: Rules | None = None) -> dict[str, tuple[int, ...]]:
    return reassign_group(*planned(*members), 4, rules or Rules())


def reputation(*answering: str) -> Reputation:
    made = Reputation()
    for peer in answering:
        made.note_answer(peer)
    return made


def leases(me: str = "me", held: tuple[int, ...] = (), rules: Rules | None = None) -> Leases:
    made = Leases(me, 4, rules or Rules(), reputation=reputation("me", "a", "b", "ghost"))
    made.held = held
    return made


def others(**experts: list[int]) -> dict[str, Lease]:
    return {peer: Lease(expires=1e9, experts=held, since_round=1) for peer, held in experts.items()}


# At the start.


def test_a_newcomer_has_nothing_and_no_user_who_named_anything() -> None:
    fresh = Leases("me", 4, Rules())
    assert (fresh.held, fresh.room, fresh.fixed) == ((), 0, False)
    assert members_of(fresh.leased_bitmap, 4) == []


def test_it_takes_what_the_others_do_not_hold_and_its_own_lease_does_not_count() -> None:
    mine = leases()
    mine.update(others(a=[0], b=[2], me=[1, 3]))
    assert mine.choose(2) == (1, 3) == mine.held


def test_it_chooses_by_the_runs_rules() -> None:
    mine = leases(rules=Rules(replicas=1))
    mine.update(others(a=[0, 1, 2]))
    assert mine.choose(4) == (3,)
    mine = leases(rules=Rules(most_each=2))
    mine.update(others(a=[0, 1, 2]))
    assert len(mine.choose(4)) == 2


def test_only_the_newest_leases_count() -> None:
    mine = leases()
    mine.update(others(a=[0, 1]))
    mine.update(others(a=[2]))
    assert members_of(mine.leased_bitmap, 4) == [2]


def test_it_gives_way_to_whoever_has_the_better_claim_and_says_whether_it_had_to() -> None:
    mine, theirs = leases("me", (0,)), leases("a", (0,))
    mine.update(others(a=[0]))
    theirs.update(others(me=[0]))
    stayed = [mine.resolve(), theirs.resolve()]
    assert sorted(stayed) == [False, True]
    assert (mine.held == (0,)) == stayed[0]
    assert (theirs.held == (0,)) == stayed[1]


def test_its_statement_says_what_others_leases_reserve() -> None:
    mine = leases("me", (0,))
    mine.update(others(a=[1], b=[3, 900], me=[0]))
    assert mine.leased_bitmap == bitmap([1, 3], 4)
    bounded = leases("me", (0,), Rules(most_each=1))
    bounded.update(others(ghost=[0, 1, 2, 3]))
    assert len(members_of(bounded.leased_bitmap, 4)) == 1


def test_only_leases_of_the_electorate_reserve_experts_but_a_newcomer_looks_at_all() -> None:
    known = reputation("stranger")
    known.committed(0.0, ["member"], ())
    mine = Leases("me", 4, Rules(), reputation=known)
    mine.update(others(member=[1], stranger=[0, 1, 2]))
    assert mine.leased_bitmap == bitmap([1], 4)
    assert mine.choose(1) == (3,)


def test_a_peer_that_never_answers_holds_nothing() -> None:
    first = leases().choose(1)
    mine = leases()
    mine.update(others(silent=list(first)))
    assert members_of(mine.leased_bitmap, 4) == []
    assert mine.choose(1) == first


def test_a_lease_that_is_not_renewed_within_its_lifetime_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it says about its end."""
    now = 100.0
    monkeypatch.setattr("spes_swarm.protocol.ownership.lease_table.time", SimpleNamespace(monotonic=lambda: now))
    mine = Leases("me", 4, Rules(), 60.0, reputation("a"))

    def seen(expires: float) -> list[int]:
        mine.update({"a": Lease(expires=expires, experts=[2], since_round=1)})
        return members_of(mine.leased_bitmap, 4)

    assert seen(1e9) == [2]
    now = 160.0
    assert seen(1e9) == [2]
    now = 160.5
    assert seen(1e9) == []
    assert seen(1e9 + 1) == [2]  # renewed
    now = 220.5
    assert seen(1e9 + 1) == [2]
    now = 221.0
    assert seen(1e9 + 1) == []


# At a commit.


def test_what_is_held_is_ascending_as_a_statement_wants_it() -> None:
    layout = small_layout(17)
    formed = group([member("a", layout, held=[1, 8, 16], room=3), member("b", layout, held=[0, 2], room=2)])
    mine = Leases("a", 17, Rules())
    mine.held = (1, 8, 16)
    assert mine.after_commit(formed, make_plan(formed, layout, MAX_PART)).held == (1, 8, 16) == mine.held


def test_what_one_gives_up_another_takes_over() -> None:
    formed, plan = planned(
        member("leaver", LAYOUT, held=[0, 1], leaving=True),
        member("a", LAYOUT, held=[2], room=2),
        member("b", LAYOUT, held=[3], room=2),
    )
    table = reassign_group(formed, plan, 4, Rules())
    assert table.keys() == {"a", "b"}
    (gained,) = set(table["a"]) - {2}
    (other,) = set(table["b"]) - {3}
    assert {gained, other} == {0, 1}
    stays, goes = leases("a", (2,)), leases("leaver", (0, 1))
    assert stays.after_commit(formed, plan) == ExpertChange(table["a"], gained=(gained,))
    assert stays.held == table["a"]
    assert goes.after_commit(formed, plan) == ExpertChange((), lost=(0, 1))
    assert goes.held == ()


def test_an_orphan_is_adopted_and_a_replica_beyond_the_room_is_given_up() -> None:
    formed, plan = planned(member("a", LAYOUT, held=[0, 1], room=1), member("b", LAYOUT, held=[0, 1, 2], room=3))
    mine = leases("a", (0, 1))
    change = mine.after_commit(formed, plan)
    assert len(change.held) == 1
    assert set(change.lost) == {0, 1} - set(change.held)
    formed, plan = planned(member("a", LAYOUT, held=[0], room=2), member("b", LAYOUT, held=[1, 2], room=2))
    mine = leases("a", (0,))
    assert mine.after_commit(formed, plan) == ExpertChange((0, 3), gained=(3,))


def test_whoever_keeps_an_expert_neither_gains_nor_loses_it() -> None:
    """Expert 0 has three holders and 3 none: one of them moves."""
    formed, plan = planned(
        *(member(name, LAYOUT, held=[0], room=1) for name in "abc"), member("d", LAYOUT, held=[1, 2])
    )
    table = reassign_group(formed, plan, 4, Rules())
    (mover,) = (name for name in "abc" if table[name] != (0,))
    assert leases(mover, (0,)).after_commit(formed, plan) == ExpertChange((3,), gained=(3,), lost=(0,))
    for name in set("abc") - {mover}:
        assert leases(name, (0,)).after_commit(formed, plan) == ExpertChange((0,))


def test_absent_peers_experts_are_kept_for_them_by_half_of_the_members() -> None:
    absent = bitmap([3], 4)
    unseen = bitmap([], 4)
    for seen_by, reserved in ((0, False), (1, False), (2, True), (3, True)):
        members = [
            member(f"p{i}", LAYOUT, held=[i], room=2, leased=absent if i < seen_by else unseen) for i in range(3)
        ]
        held = {e for experts in decided(*members).values() for e in experts}
        assert (3 in held) != reserved


def test_a_leavers_experts_are_not_reserved_by_its_lease() -> None:
    leased = bitmap([0, 1, 2, 3], 4)
    outcome = decided(
        member("leaver", LAYOUT, held=[0, 1], leaving=True, leased=leased),
        member("a", LAYOUT, held=[2, 3], room=4, leased=leased),
    )
    assert outcome == {"a": (0, 1, 2, 3)}


def test_what_has_gone_untrained_for_longest_is_adopted_first() -> None:
    """Expert 1 was trained in round 2 and 3 in round 4; in this round expert 0 has been."""
    versions = {"versions": [5, 5, 2, 1, 4], "digests": [b"\5" * 32] * 5}
    assert decided(member("a", LAYOUT, held=[0], room=2, **versions)) == {"a": (0, 2)}
    # The last expert is served like any other, though the shared block has just changed.
    versions = {"versions": [5, 5, 2, 4, 1], "digests": [b"\5" * 32] * 5}
    assert decided(member("a", LAYOUT, held=[0], room=2, **versions)) == {"a": (0, 3)}
    # Rotation goes by the same: 0 has been trained in this round, whatever its version was before.
    versions = {"versions": [5, 0, 2, 1, 4], "digests": [b"\5" * 32] * 5}
    outcome = decided(member("a", LAYOUT, held=[0], room=3, **versions), rules=Rules(rotate_every_rounds=ROUND))
    assert outcome["a"] in {(0, 1, 2), (1, 2, 3), (0, 2, 3)}
    assert 2 in outcome["a"]


def test_of_two_equally_held_the_one_not_trained_in_this_round_is_kept() -> None:
    """A member whose room has shrunk gives up what was trained last: here expert 0, in this round and by b."""
    versions = {"versions": [5, 1, 2, 3, 4], "digests": [b"\5" * 32] * 5}
    outcome = decided(
        member("a", LAYOUT, held=[0, 1], tokens=0, routed=[0, 0], room=1, **versions),
        member("b", LAYOUT, held=[0, 2], **versions),
        member("d", LAYOUT, held=[1, 3], tokens=0, routed=[0, 0], **versions),
    )
    assert outcome == {"a": (1,), "b": (0, 2), "d": (1, 3)}


def test_a_users_experts_stay_whatever_room_it_claims() -> None:
    outcome = decided(member("a", LAYOUT, held=[0, 1], room=0, fixed=True), member("b", LAYOUT, held=[2, 3], room=2))
    assert outcome == {"a": (0, 1), "b": (2, 3)}


@pytest.mark.parametrize("fixed", [False, True])
def test_who_claims_more_than_the_limit_gets_no_more(fixed: bool) -> None:
    """In each round, since a statement may say what it wants."""
    liar = member("liar", LAYOUT, held=[0, 1, 2, 3], room=1 << 20, fixed=fixed)
    outcome = decided(
        liar, member("a", LAYOUT, held=[0, 1]), member("b", LAYOUT, held=[2, 3]), rules=Rules(most_each=2)
    )
    assert len(outcome["liar"]) == 2
    assert outcome["a"] == (0, 1)
    assert outcome["b"] == (2, 3)


def ignoring(*others: dict[str, object]) -> list[Member]:
    """Members a to d with an expert each, where the others say that the work of d should not count."""
    said = {name: vouchers({}, set("abcd") - {name}, doubted={"d"} - {name}, ignored={"d"} - {name}) for name in "abcd"}
    return [
        member(name, LAYOUT, held=[i], vouched=said[name], **({"room": 1} | fields))
        for i, (name, fields) in enumerate(zip("abcd", others, strict=True))
    ]


def test_the_experts_of_a_member_that_is_ignored_go_to_others() -> None:
    assert decided(*ignoring({"room": 2}, {}, {}, {"fixed": True})) == {"a": (0, 3), "b": (1,), "c": (2,), "d": ()}
    assert decided(*ignoring({"room": 2}, {"room": 4}, {}, {"room": 4}))["d"] == ()
    assert decided(*ignoring({}, {}, {}, {"room": 4}))["d"] == ()  # nobody has room for it: it waits for its turn


def test_who_has_named_experts_and_lost_them_gets_others() -> None:
    back = member("d", LAYOUT, held=[], room=1, fixed=True)
    assert decided(member("a", LAYOUT, held=[0, 1, 2], room=3), back)["d"] == (3,)


def test_a_member_that_is_ignored_and_who_adopts_its_expert_know_it() -> None:
    formed, plan = planned(*ignoring({"room": 2}, {}, {}, {}))
    assert leases("d", (3,)).after_commit(formed, plan) == ExpertChange((), lost=(3,))
    assert leases("a", (0,)).after_commit(formed, plan) == ExpertChange((0, 3), gained=(3,))
