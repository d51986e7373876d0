"""What newcomers may take of a donor's line, on a clock that the tests wind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.rate_limit import (
    ASSUMED_MBPS,
    BETWEEN_ROUNDS_SHARE,
    BURST_BYTES,
    DURING_ROUNDS_SHARE,
    MIN_BYTES_PER_S,
    Budgets,
    RateLimit,
    TransferLimit,
)


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def send_all(limit: RateLimit, clock: Clock, sizes: Sequence[int]) -> list[float]:
    """Books in order and waits for each; returns when each was sent."""
    sent = []
    for size in sizes:
        place = limit.book(size)
        while (wait_s := limit.wait_s(place)) > 1e-9:
            clock.now += wait_s
        sent.append(clock.now)
    return sent


def test_bytes_flow_at_the_rate_after_the_first_burst() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, clock)
    piece = BURST_BYTES // 4
    sent = send_all(limit, clock, [piece] * 20)
    assert sent[:4] == [1000.0] * 4
    assert sent[-1] == pytest.approx(1000.0 + (20 * piece - BURST_BYTES) / 1000.0)
    clock.now += 1e6  # a long pause allows one burst, and no more
    sent = send_all(limit, clock, [piece] * 8)
    assert sent[3] == sent[0]
    assert sent[-1] == pytest.approx(sent[0] + 4 * piece / 1000.0)


def test_places_in_line_are_first_come_first_served_whatever_their_size() -> None:
    clock = Clock()
    limit = RateLimit(100.0, clock)
    limit.book(BURST_BYTES)
    places = [limit.book(size) for size in (500, 1, 2000)]
    assert [limit.wait_s(place) for place in places] == pytest.approx([5.0, 5.01, 25.01])


def test_a_changed_rate_counts_at_once_also_for_what_waits() -> None:
    clock = Clock()
    limit = RateLimit(100.0, clock)
    limit.book(BURST_BYTES)
    place = limit.book(1000)
    assert limit.wait_s(place) == pytest.approx(10.0)
    clock.now += 5.0
    limit.set_rate(10.0)
    assert limit.wait_s(place) == pytest.approx(50.0)
    clock.now += 10.0
    limit.set_rate(None)
    assert limit.wait_s(place) == 0.0
    limit.set_rate(100.0)  # what has passed without a limit is no debt
    assert limit.wait_s(limit.book(1000)) == pytest.approx(10.0)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 100_000), st.sampled_from([None, 1e3, 1e5])), max_size=30),
)
def test_no_history_lets_more_pass_than_the_rate_and_a_burst(history: list[tuple[float, int, float | None]]) -> None:
    clock = Clock()
    limit = RateLimit(1e3, clock)
    for pause_s, size, rate in history:
        clock.now += pause_s
        limit.set_rate(rate)
        limit.book(size)
    limit.set_rate(1e3)
    send_all(limit, clock, [0])  # what waits has passed
    start = clock.now
    sent = send_all(limit, clock, [1000] * 200)
    assert 1e3 * (sent[-1] - start) + BURST_BYTES + 1 >= 200_000


def test_rounds_come_first_and_what_is_declared_is_kept() -> None:
    clock = Clock()

    def rate(limit: TransferLimit) -> float | None:
        limit.book(10 * BURST_BYTES)
        first, second = limit.wait_s(limit.book(0)), limit.wait_s(limit.book(1_000_000))
        return 1_000_000 / (second - first) if second > first else None

    declared = TransferLimit(8.0, clock)
    assert rate(declared) == pytest.approx(1e6 * BETWEEN_ROUNDS_SHARE)
    with declared.round_under_way():
        assert rate(declared) == pytest.approx(1e6 * DURING_ROUNDS_SHARE)
        with declared.round_under_way():  # results of the last one are still fetched
            pass
        assert rate(declared) == pytest.approx(1e6 * DURING_ROUNDS_SHARE)
    assert rate(declared) == pytest.approx(1e6 * BETWEEN_ROUNDS_SHARE)
    silent = TransferLimit(None, clock)
    assert rate(silent) is None
    with silent.round_under_way():
        assert rate(silent) == pytest.approx(ASSUMED_MBPS * 1e6 / 8 * DURING_ROUNDS_SHARE)
    assert rate(silent) is None
    with TransferLimit(1e-4, clock).round_under_way():
        assert rate(TransferLimit(1e-4, clock)) == pytest.approx(MIN_BYTES_PER_S)


def test_a_budget_is_spent_by_one_taker_and_refills_slowly() -> None:
    clock = Clock()
    budgets = Budgets(1000, 100.0, clock)  # 10 bytes a second
    for _ in range(2):
        assert budgets.allows("greedy", 400)
        budgets.spend("greedy", 400)
    assert budgets.allows("greedy", 200)
    assert not budgets.allows("greedy", 400)
    assert budgets.allows("other", 1000)
    assert not budgets.allows("other", 1001)
    clock.now += 19.9
    assert not budgets.allows("greedy", 400)
    clock.now += 0.2
    assert budgets.allows("greedy", 400)
    clock.now += 1000.0  # no more than the whole comes back
    assert budgets.allows("greedy", 1000)
    assert not budgets.allows("greedy", 1001)


def test_budgets_remember_the_latest_takers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spes_swarm.base.rate_limit.MAX_TAKERS", 2)
    budgets = Budgets(10, 100.0, Clock())
    for taker in ("a", "b", "a", "c"):
        budgets.spend(taker, 10)
    assert [budgets.allows(taker, 10) for taker in ("a", "b", "c")] == [False, True, False]
