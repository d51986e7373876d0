"""Who is out of a run: proofs, what most of a group know, and pardons, in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

import pytest

from spes_swarm.protocol.admission.exclusion import GRACE_ROUNDS, MARK_BYTES, MAX_MARKS, Exclusions


def knowing(*culprits: str) -> bytes:
    """What a member that has proofs against these states."""
    member = Exclusions()
    for culprit in culprits:
        member.note_lie(culprit, 1)
    return member.marks()


def test_a_lie_excludes_until_it_is_pardoned_and_a_later_one_again() -> None:
    out = Exclusions()
    assert "a" not in out
    assert (out.culprits, out.marks()) == ([], b"")
    out.note_lie("a", 5)
    out.note_lie("b", 3)
    out.note_lie("a", 4)
    assert out.culprits == ["b", "a"]  # in the order in which the proofs came
    assert out.lie_of("a") == 5
    out.pardon("a", 4)
    assert "a" in out
    out.pardon("a", 5)
    out.pardon("a", 2)
    assert out.culprits == ["b"]
    assert "a" not in out
    assert out.is_pardoned("a", 5)
    assert not out.is_pardoned("a", 6)
    out.note_lie("a", 6)
    assert out.culprits == ["b", "a"]


def test_the_order_in_which_proofs_and_pardons_come_does_not_matter() -> None:
    events: list[Callable[[Exclusions], None]] = [
        lambda out: out.note_lie("a", 5),
        lambda out: out.note_lie("a", 9),
        lambda out: out.pardon("a", 5),
        lambda out: out.note_lie("b", 2),
        lambda out: out.pardon("b", 8),
    ]
    ends = set()
    for order in permutations(events):
        out = Exclusions()
        for event in order:
            event(out)
        ends.add((out.excluded, out.lie_of("a")))
    assert ends == {(("a",), 9)}


@pytest.mark.parametrize(
    ("said", "excluded"),
    [
        ({"a": True, "b": False, "c": False}, False),
        ({"a": True, "b": True, "c": False}, True),
        ({"a": True, "b": True, "c": False, "culprit": True}, True),  # its own word counts on neither side
        ({"a": True, "b": False, "culprit": True}, False),
        ({"a": True, "culprit": False}, True),  # of two members, the one that has a proof is most of the others
        ({"a": True}, True),  # the culprit is not trusted
    ],
)
def test_a_culprit_stays_in_until_most_of_the_others_have_a_proof(said: dict[str, bool], excluded: bool) -> None:
    out = Exclusions()
    out.note_lie("culprit", 5, pending=True)
    assert out.culprits == ["culprit"]
    assert "culprit" not in out
    statements = {peer: knowing("culprit", "another") if knows else knowing("another") for peer, knows in said.items()}
    out.agreed(7, {"culprit": knowing(), "stranger": knowing()} | statements, said.keys())
    assert ("culprit" in out) is excluded
    assert out.culprits == ["culprit"]


def test_a_culprit_that_is_in_no_group_any_more_is_out() -> None:
    out = Exclusions()
    out.note_lie("culprit", 5, pending=True)
    out.agreed(6, {"a": b"", "b": b""}, {"a", "b"})
    assert "culprit" in out


def test_groups_with_a_culprit_are_valid_for_a_while() -> None:
    """Their leader may not have got the proof yet."""
    out = Exclusions()
    out.note_lie("culprit", 5, pending=True)
    assert not out.for_long("culprit", 1000)
    out.agreed(20, {"a": knowing("culprit"), "culprit": b""}, {"a"})
    assert next(n for n in range(20, 40) if out.for_long("culprit", n)) == 21 + GRACE_ROUNDS
    assert not out.for_long("a", 40)
    out.pardon("culprit", 5)
    assert not out.for_long("culprit", 40)


def test_a_pardon_ends_what_was_pending() -> None:
    out = Exclusions()
    out.note_lie("culprit", 5, pending=True)
    out.pardon("culprit", 5)
    out.note_lie("culprit", 9)
    assert "culprit" in out


def test_a_statement_has_room_above_all_for_culprits_that_are_not_excluded() -> None:
    out = Exclusions()
    out.note_lie("culprit", 5, pending=True)
    for number in range(2 * MAX_MARKS):
        out.note_lie(f"another {number}", 6)
    assert len(out.marks()) == MAX_MARKS * MARK_BYTES
    out.agreed(7, {"me": out.marks(), "culprit": b""}, {"me"})
    assert "culprit" in out


def test_culprits_have_no_say_even_if_only_they_are_trusted() -> None:
    out = Exclusions()
    for culprit in ("c", "d"):
        out.note_lie(culprit, 5, pending=True)
    said = {"a": knowing("c", "d"), "b": knowing("c"), "c": knowing(), "d": knowing()}
    out.agreed(6, said, {"c", "d"})
    assert out.excluded == ("c",)


def test_the_grace_begins_with_the_first_commit_after_the_proof_has_come() -> None:
    """A peer that starts may have old proofs, while the others do not have them yet."""
    out = Exclusions()
    out.note_lie("culprit", 5)
    assert "culprit" in out
    assert not out.for_long("culprit", 100)
    out.agreed(100, {"a": b""}, {"a"})
    out.agreed(101, {"a": b""}, {"a"})
    assert next(number for number in range(100, 200) if out.for_long("culprit", number)) == 101 + GRACE_ROUNDS
