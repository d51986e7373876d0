"""Who is out of a run: proofs and pardons, in whatever order they come."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations

from spes_swarm.protocol.admission.exclusion import Exclusions


def test_a_lie_excludes_until_it_is_pardoned_and_a_later_one_again() -> None:
    out = Exclusions()
    assert "a" not in out
    assert (out.round_of("a"), list(out), len(out)) == (None, [], 0)
    out.note_lie("a", 5)
    out.note_lie("b", 3)
    out.note_lie("a", 4)
    assert list(out) == ["b", "a"]  # in the order in which the proofs came
    assert out.round_of("a") == 5
    out.pardon("a", 4)
    assert "a" in out
    out.pardon("a", 5)
    out.pardon("a", 2)
    assert (list(out), len(out), out.round_of("a")) == (["b"], 1, None)
    assert not out.excludes("a", 5)
    assert out.excludes("a", 6)
    out.note_lie("a", 6)
    assert list(out) == ["b", "a"]


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
        ends.add((out.round_of("a"), out.round_of("b")))
    assert ends == {(9, None)}
