"""Whose work is ignored: who hides it from auditors, and whose work points against the others'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.protocol.rounds.conduct import Conduct
from tests.helpers.conducted import OTHERS, among, exchange, in_time

# Hiding from auditors.


def silent(conduct: Conduct, rounds: Iterable[int], key: bytes = b"key") -> None:
    """Has a peer that has this key show its work of these rounds to nobody."""
    for number in rounds:
        conduct.note_key("d", key)
        conduct.note_silence("d", number, key)


def test_a_peer_hides_after_three_silences_with_the_key_that_it_has() -> None:
    conduct = among()
    silent(conduct, [10, 10, 20])  # a round counts once
    assert not conduct.hides("d", 21)
    assert conduct.doubts("d", 21) == ()
    silent(conduct, [30])
    assert conduct.hides("d", 31)
    assert conduct.doubts("d", 31) == ("audit",)
    assert not conduct.hides("a", 31)
    assert not conduct.hides("somebody", 31)
    assert [number for number in range(31, 200) if conduct.hides("d", number)] == list(range(31, 75))
    assert conduct.doubted(75) == set()


def test_who_crashes_now_and_then_does_not_hide() -> None:
    """A peer that crashes after a commit comes back with another key."""
    conduct = among()
    for crash in range(40):
        silent(conduct, [8 * crash], key=b"%d" % crash)
        assert not conduct.hides("d", 8 * crash + 1)
    restless = among()
    for crash in range(40):
        silent(restless, [7 * crash], key=b"%d" % crash)
        assert restless.hides("d", 7 * crash + 1) == (crash >= 8)


def test_another_key_clears_a_peer_until_it_has_been_silent_nine_times_in_all() -> None:
    conduct = among()
    for restart, key in enumerate((b"first", b"second", b"third")):
        begin = 10 * restart
        silent(conduct, range(begin, begin + 3), key)
        assert conduct.hides("d", begin + 3)
        conduct.note_key("d", b"new")
        assert conduct.hides("d", begin + 3) == (restart == 2)
    assert [number for number in range(23, 200) if conduct.hides("d", number)] == list(range(23, 65))


def test_a_key_that_a_peer_had_before_counts_if_it_has_it_again() -> None:
    conduct = among()
    silent(conduct, [1, 2, 3], b"first")
    silent(conduct, [4], b"second")
    assert not conduct.hides("d", 5)
    conduct.note_key("d", b"first")
    assert conduct.hides("d", 5)


@given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([b"x", b"y", b"z"])), max_size=60), st.integers(0, 80))
def test_hiding_is_a_matter_of_two_counts(steps: list[tuple[int, bytes]], later: int) -> None:
    conduct, number, noted = among(), 0, dict[int, bytes]()
    for pause, key in steps:
        number += pause
        silent(conduct, [number], key)
        noted.setdefault(number, key)
    at = number + later
    keys = [key for silence, key in noted.items() if at - silence <= 64]
    assert conduct.hides("d", at) == bool(steps and (keys.count(steps[-1][1]) > 2 or len(keys) > 8))


def test_keys_of_strangers_are_not_remembered() -> None:
    conduct = among()
    for number in range(5000):
        conduct.note_key(f"stranger{number}", b"key")
    assert not conduct._peers


def test_a_silence_counts_unless_all_who_named_the_work_are_liars() -> None:
    """A reducer can name contributions that were never made."""
    conduct = among()
    for number, reducers in enumerate((["a"], ["a"], ["a", "b"])):
        conduct.note_silence("d", number, b"key", reducers)
    assert conduct.hides("d", 3)
    conduct.exclusions.note_lie("a", 1)
    assert not conduct.hides("d", 3)
    conduct.exclusions.pardon("a", 1)
    assert conduct.hides("d", 3)


def test_who_had_no_such_commit_yet_hides_after_nine_rounds() -> None:
    conduct = among()
    conduct.note_silence("d", 0, b"key")
    for number in range(1, 9):
        assert not conduct.hides("d", number)
        conduct.note_silence("d", number, b"")
    assert conduct.hides("d", 9)


# Opposing the others.


def opposing(conduct: Conduct, rounds: Iterable[int], found: Sequence[float] = (1.0,) * 4) -> None:
    """Notes the opposition that was found in the parts of these rounds."""
    for number in rounds:
        conduct.note_opposition("d", number, found)


def test_a_peer_that_opposes_the_others_in_four_rounds_is_doubted_and_ignored_for_64() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 4))
    assert conduct.ignored(5) == set()  # that of round 4 may still be taken back
    assert conduct.doubts("d", 5) == ()
    opposing(conduct, [5], found=[])
    assert conduct.doubts("d", 6) == ("opposition",)
    assert [number for number in range(6, 200) if conduct.ignored(number) == {"d"}] == list(range(6, 70))
    assert not conduct.opposes("a", 6)
    assert not conduct.opposes("somebody", 6)


@pytest.mark.parametrize(
    ("rounds", "found", "opposes"),
    [
        (3, [1.0] * 50, False),  # however many parts
        (15, [1.0], False),  # fewer than sixteen parts
        (16, [1.0], True),
        (100, [0.5] * 4, False),
        (100, [1.0, 1.0, 0.1, 0.0], True),
        (100, [1.0, 1.0, 0.0, 0.0], False),
        (100, [], False),
    ],
)
def test_opposition_counts_on_average_over_many_parts(rounds: int, found: list[float], opposes: bool) -> None:
    conduct = among()
    opposing(conduct, range(1, 1 + rounds), found)
    opposing(conduct, [1 + rounds], found=[])
    assert conduct.opposes("d", rounds + 2) == opposes


def test_what_audits_of_a_round_find_counts_with_what_was_reduced_in_it() -> None:
    conduct = among()
    for number in range(1, 5):
        for _ in range(4):
            opposing(conduct, [number], [1.0])
            assert not conduct.opposes("d", number + 1)
    opposing(conduct, [5], [1.0])
    assert conduct.opposes("d", 6)


def test_only_the_last_sixteen_rounds_count() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 16, 18))
    assert not conduct.opposes("d", 19)
    conduct = among()
    opposing(conduct, (1, 2, 3, 16, 17))
    assert conduct.opposes("d", 18)


def test_a_commit_that_is_taken_back_says_nothing_about_opposition() -> None:
    conduct = among()
    opposing(conduct, (1, 2, 3, 4))
    conduct.note_return(5, b"group", 4)
    opposing(conduct, [6])
    assert not conduct.opposes("d", 7)
    opposing(conduct, [7])
    assert conduct.opposes("d", 8)


def test_a_peer_that_goes_back_to_an_older_round_forgets_what_it_saw_later() -> None:
    conduct = among()
    opposing(conduct, range(100, 104))
    opposing(conduct, range(40, 43))
    assert not conduct.opposes("d", 43)
    conduct = among()
    opposing(conduct, range(100, 105))
    assert conduct.opposes("d", 105)
    assert not conduct.opposes("d", 41)


def test_opposition_is_remembered_and_moves_with_the_rounds() -> None:
    conduct, recalled = among(), among()
    opposing(conduct, (1, 2, 3, 4))
    recalled.recall(conduct.known, 4)
    opposing(recalled, [5])
    assert recalled.opposes("d", 6)
    recalled.recall(conduct.known, 3)  # that of round 4 came after the last commit
    opposing(recalled, [5])
    assert not recalled.opposes("d", 6)
    opposing(conduct, [5])
    recalled.recall(conduct.known, 5)
    recalled.move(100)
    assert [number for number in range(106, 300) if recalled.opposes("d", number)] == list(range(106, 170))


def test_the_graver_of_many_reasons_come_first() -> None:
    """A peer's record has room for two."""
    conduct = among()
    for number in (1, 2, 3):
        conduct.begin(OTHERS)
        conduct.note_fault("d", "clipped")
        exchange(conduct, number, in_time())
    opposing(conduct, (1, 2, 3, 4, 5))
    silent(conduct, (1, 2, 3))
    assert conduct.doubts("d", 6) == ("audit", "opposition", "clipped")
