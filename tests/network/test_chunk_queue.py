"""Which donor is asked for which chunk, whatever donors do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.network.transfer.chunk_queue import ChunkQueue


def test_every_chunk_is_asked_of_one_donor_and_comes_once() -> None:
    queue = ChunkQueue(range(10), 1.0)
    for donor in "ab":
        queue.add_donor(donor, range(10))
    asked: list[int] = []
    while (number := queue.take("ab"[len(asked) % 2], 0.0)) is not None:
        asked.append(number)
    assert asked == list(range(10))
    assert all(queue.done(number) for number in asked)
    assert queue.finished
    assert not queue.done(3)


def test_donors_are_asked_only_for_what_they_have() -> None:
    queue = ChunkQueue(range(4), 1.0)
    queue.add_donor("a", [1, 3])
    queue.add_donor("b", [])
    assert [queue.take("a", 0.0) for _ in range(3)] == [1, 3, None]
    assert queue.take("b", 0.0) is None
    assert queue.idle_s("b", 0.0) is None
    assert queue.remaining == {0, 1, 2, 3}
    queue.lacks("a", [1, 0])  # it has committed meanwhile
    queue.add_donor("c", [1])
    assert queue.take("c", 0.0) == 1


def test_what_a_dead_donor_owes_is_asked_of_others_first() -> None:
    queue = ChunkQueue(range(4), 1.0)
    for donor in "ab":
        queue.add_donor(donor, range(4))
    assert [queue.take("a", 0.0), queue.take("a", 0.0)] == [0, 1]
    queue.done(0)
    queue.give_up("a")
    assert [queue.take("b", 0.0) for _ in range(4)] == [1, 2, 3, None]


def test_the_last_chunks_are_taken_over_from_slow_donors() -> None:
    queue = ChunkQueue(range(3), 100.0)
    for donor in ("fast", "slow", "slower"):
        queue.add_donor(donor, range(3))
    assert queue.take("slower", 0.0) == 0
    assert queue.take("slow", 1.0) == 1
    assert queue.take("fast", 2.0) == 2
    queue.measured("fast", 2.0)
    queue.done(2)
    assert queue.take("fast", 4.0) is None
    assert queue.idle_s("fast", 4.0) == pytest.approx(2.0)
    assert queue.take("fast", 6.0) == 0  # three times as long as the fast one takes
    assert queue.take("fast", 6.5) is None
    assert queue.take("fast", 7.0) == 1
    assert queue.idle_s("fast", 7.0) is None  # it is asked for all that is left
    assert queue.done(0)
    assert not queue.done(0)  # the slow one's came, too
    queue.give_up("fast")
    assert not queue.finished
    assert queue.done(1)
    assert queue.finished


def test_donors_of_equal_speed_do_not_take_from_each_other() -> None:
    queue = ChunkQueue(range(4), 100.0)
    for donor in "ab":
        queue.add_donor(donor, range(4))
    for _ in range(2):
        for donor in "ab":
            queue.take(donor, 0.0)  # two each are under way
    queue.measured("a", 1.0)
    for number in (0, 2):
        queue.done(number)
    assert queue.take("a", 2.2) is None  # the other one is a little late


@pytest.mark.slow
@given(st.data())
def test_the_queue_finishes_whatever_donors_do(data: st.DataObject) -> None:
    num_chunks = data.draw(st.integers(1, 12))
    queue = ChunkQueue(range(num_chunks), 1.0)
    out: dict[str, list[int]] = {}
    for donor in "abc":
        queue.add_donor(donor, data.draw(st.sets(st.integers(0, num_chunks - 1))))
        out[donor] = []
    now = 0.0
    came: set[int] = set()
    for _ in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.floats(0, 5))
        donor = data.draw(st.sampled_from(sorted(out) or ["-"]))
        if donor == "-":
            break
        match data.draw(st.sampled_from(["take", "deliver", "lack", "die"])):
            case "take":
                number = queue.take(donor, now)
                if number is not None:
                    assert number not in out[donor]
                    assert number not in came
                    out[donor].append(number)
            case "deliver" if out[donor]:
                number = out[donor].pop(0)
                assert queue.done(number) is (number not in came)
                came.add(number)
            case "lack" if out[donor]:
                queue.lacks(donor, [out[donor].pop(0)])
            case "die":
                queue.give_up(donor)
                del out[donor]
        assert queue.remaining == set(range(num_chunks)) - came
    for donor in list(out):
        queue.give_up(donor)
    queue.add_donor("last", range(num_chunks))
    while (number := queue.take("last", now)) is not None:
        came.add(number)
        queue.done(number)
    assert queue.finished
    assert came == set(range(num_chunks))
