"""What a person sees: a screen as wide as the terminal, and lines where there is no terminal."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from spes_swarm.base.wording import amount, loss, ranges, seconds
from spes_swarm.monitor.figures import curve
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.state import ExpertState, HistoryPoint, SwarmState
from spes_swarm.monitor.views.terminal import changes, print_once, show_lines, show_live
from tests.helpers.monitoring import RUN, peer_id, peer_state, points, routing_state, swarm_state, troubled_state


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def printed(state: SwarmState, history: Sequence[HistoryPoint] = (), width: int = 80) -> str:
    output = io.StringIO()
    print_once(Console(file=output, width=width, color_system=None), state, history)
    return output.getvalue()


FOUR = """
╭─ test-0123456789abcdef01234567  olmoe ───────────────────────────────────────╮
│ round 12  ████████░░░░░░░░  next in 8s  4 peers, all agree                   │
│ tokens 246k  tokens/s 4,944  loss 3.3000  eval loss 3.308 ± 0.030            │
│  5.5000 ┤█                                                                   │
│         ┤█▄                                                                  │
│  3.0833 ┤███▆▅▄▄▃▃▃▂▂▂▂▂▂▂▂▁▁▁▁▁▁▁▁▁▁▁▁                                      │
│                                                                              │
│                                                  sent in received   last     │
│ name   id       state    experts tokens/s   loss   round in round report     │
│ peer-0 peer1111 training 0-1         1.2k 3.2500   1.5MB    2.5MB 1s ago     │
│ peer-1 peer1112 training 2-3         1.2k 3.2600   1.5MB    2.5MB 1s ago     │
│ peer-2 peer1113 training 4-5         1.2k 3.2700   1.5MB    2.5MB 1s ago     │
│ peer-3 peer1114 training 6-7         1.2k 3.2800   1.5MB    2.5MB 1s ago     │
│                                                                              │
│ experts 8 of 8 held                                                          │
│ expert   0  1  2  3  4  5  6  7                                              │
│ holders  1  1  1  1  1  1  1  1                                              │
╰──────────────────────────────────────────────────────────────────────────────╯
"""

TROUBLE = """
╭─ test-0123456789abcdef01234567  olmoe ───────────────────────────────────────╮
│ round 12  ████████░░░░░░░░  next in 8s  4 peers, 1 differs                   │
│ tokens 246k  tokens/s 1.0T  loss 3.3000  eval loss 3.400 ± 0.030             │
│                                                                              │
│                                                     sent in received    last │
│ name               state    experts tokens/s   loss   round in round  report │
│ 機械学習機械学習 … differs  4-5         1.2k 3.2700   1.5MB    2.5MB  1s ago │
│ peer1112           late     2-3         1.2k      -   1.5MB    2.5MB 20s ago │
│ (2J‹b›(red)x       training 0-1         1.2k 3.2500   1.5MB    2.5MB  1s ago │
│ peer-3             syncing  0-3,5,7     1.0T 3.2800   9.0PB    2.5MB  1s ago │
│                                                                              │
│ experts 7 of 8 held, last trained up to 3 rounds ago                         │
│ expert            0  1  2  3  4  5  6  7                                     │
│ holders           2  2  2  2  1  2  0  1                                     │
│ rounds untrained  0  0  0  0  0  0  3  0                                     │
│ fault at 22:13:20: round, reported by (2J‹b›(red)x                           │
│ fault at 22:13:20: dht, reported by peer1112                                 │
│ records refused: 1 far future, 3 forged                                      │
╰──────────────────────────────────────────────────────────────────────────────╯
"""

NOBODY = """
╭─ test-0123456789abcdef01234567  olmoe ───────────────────────────────────────╮
│ round 12  no peers: the last one was seen 75s ago                            │
│ tokens 61k  tokens/s 0  loss 3.3000  eval loss 3.400 ± 0.030                 │
│                                                                              │
│ experts 0 of 8 held, last trained up to 3 rounds ago                         │
│ expert            0  1  2  3  4  5  6  7                                     │
│ holders           0  0  0  0  0  0  0  0                                     │
│ rounds untrained  3  3  3  3  3  3  3  3                                     │
╰──────────────────────────────────────────────────────────────────────────────╯
"""

WIDE = """
╭─ test-0123456789abcdef01234567  olmoe ─────────────────────────────────────────────────────────────────────────────╮
│ round 12  ████████░░░░░░░░  next in 8s  4 peers, 1 differs                                                         │
│ tokens 246k  tokens/s 1.0T  loss 3.3000  eval loss 3.400 ± 0.030                                                   │
│                                                                                                                    │
│                                                                                    sent in received    last        │
│ name                                     id       state    experts tokens/s   loss   round in round  report        │
│ 機械学習機械学習機械学習機械学習機械学 … peer1113 differs  4-5         1.2k 3.2700   1.5MB    2.5MB  1s ago        │
│ -                                        peer1112 late     2-3         1.2k      -   1.5MB    2.5MB 20s ago        │
│ (2J‹b›(red)x                             peer1111 training 0-1         1.2k 3.2500   1.5MB    2.5MB  1s ago        │
│ peer-3                                   peer1114 syncing  0-3,5,7     1.0T 3.2800   9.0PB    2.5MB  1s ago        │
│                                                                                                                    │
│ experts 7 of 8 held, last trained up to 3 rounds ago                                                               │
│ expert            0  1  2  3  4  5  6  7                                                                           │
│ holders           2  2  2  2  1  2  0  1                                                                           │
│ rounds untrained  0  0  0  0  0  0  3  0                                                                           │
│ fault at 22:13:20: round, reported by (2J‹b›(red)x                                                                 │
│ fault at 22:13:20: dht, reported by peer1112                                                                       │
│ records refused: 1 far future, 3 forged                                                                            │
╰────────────────────────────────────────────────────────────────────────────────────────────────────────────────────╯
"""

NARROW = """
╭─ test-0123456789abcdef01234567  olmoe ─────────╮
│ round 12  ████████░░░░░░░░  next in 8s  4      │
│ peers, 1 differs                               │
│ tokens 246k  tokens/s 1.0T  loss 3.3000        │
│ eval loss 3.400 ± 0.030                        │
│                                                │
│ name          state    experts tokens/s   loss │
│ 機械学習機械… differs  4-5         1.2k 3.2700 │
│ peer1112      late     2-3         1.2k      - │
│ (2J‹b›(red)x  training 0-1         1.2k 3.2500 │
│ peer-3        syncing  0-3,5,7     1.0T 3.2800 │
│                                                │
│ experts 7 of 8 held, last trained up to 3      │
│ rounds ago                                     │
│ expert            0  1  2  3  4  5  6  7       │
│ holders           2  2  2  2  1  2  0  1       │
│ rounds untrained  0  0  0  0  0  0  3  0       │
│ fault at 22:13:20: round, reported by          │
│ (2J‹b›(red)x                                   │
│ fault at 22:13:20: dht, reported by peer1112   │
│ records refused: 1 far future, 3 forged        │
╰────────────────────────────────────────────────╯
"""


@pytest.mark.parametrize(
    ("state", "history", "width", "expected"),
    [
        (swarm_state([peer_state(n) for n in range(4)]), points(30), 80, FOUR),
        (troubled_state(), [], 80, TROUBLE),
        (swarm_state(), [], 80, NOBODY),
        (troubled_state(), [], 118, WIDE),
        (troubled_state(), [], 50, NARROW),
    ],
    ids=["four peers", "trouble", "nobody", "wide", "narrow"],
)
def test_the_screen(state: SwarmState, history: list[HistoryPoint], width: int, expected: str) -> None:
    assert printed(state, history, width) == expected[1:]


@pytest.mark.parametrize("width", [40, 45, 60, 79, 80, 81, 100, 140, 250])
@pytest.mark.parametrize("num_experts", [8, 48, 1024])
def test_every_line_is_as_wide_as_the_terminal(width: int, num_experts: int) -> None:
    experts = tuple(
        ExpertState(expert=e, holders=(peer_id(0),) * (e % 12), reserved=(), age_rounds=e % 70)
        for e in range(num_experts)
    )
    peers = [peer_state(n, name="x" * n, experts=tuple(range(0, 3 * n, 2))) for n in range(12)]
    shown = printed(replace(routing_state(peers=tuple(peers)), experts=experts), points(300), width).splitlines()
    assert {cell_len(line) for line in shown} == {width}
    assert sum("…" in line for line in shown[1:]) <= len(peers)  # only names and lists of experts are cut


def test_the_last_evaluation_is_shown_with_its_round() -> None:
    state = swarm_state([peer_state(0)])
    assert "eval loss 3.350 ± 0.030 (round 10)" in printed(state, points(11))
    unseen = replace(state, eval_round=8)  # it was before this monitor began, as peers report it
    assert "eval loss 3.400 ± 0.030 (round 8)" in printed(unseen)
    assert "eval loss -" in printed(replace(unseen, eval_loss=None, eval_loss_stderr=None, eval_round=None))


def test_a_thousand_experts_are_a_map() -> None:
    run = {"run_id": RUN.run_id, "name": "test", "model": "olmoe", "inner_steps": 10, "experts_per_peer": 2}
    experts = tuple(
        ExpertState(expert=e, holders=(peer_id(0),) * (e % 12), reserved=(), age_rounds=e % 7) for e in range(1024)
    )
    info = type(RUN)(**run, num_experts=1024, total_steps=100)  # type: ignore[arg-type]
    lines = printed(swarm_state([peer_state(0)], run=info, experts=experts, experts_covered=938)).splitlines()
    assert "│ experts 938 of 1024 held, last trained up to 6 rounds ago  holders of each;  │" in lines
    assert "│     0 ·123456789++·123456789++·123456789++·123456789++·123456789++·123       │" in lines
    assert "│   960 ·123456789++·123456789++·123456789++·123456789++·123456789++·123       │" in lines


def test_an_expert_that_was_trained_one_round_ago_is_one_round_old() -> None:
    expert = ExpertState(expert=0, holders=(peer_id(0),), reserved=(), age_rounds=1)
    assert "held, last trained up to 1 round ago " in printed(swarm_state([peer_state(0)], experts=(expert,)))


def test_a_live_screen_of_many_peers_fits_the_terminal() -> None:
    state = swarm_state([peer_state(n) for n in range(1000)])

    async def shown(width: int, height: int) -> list[str]:
        output = io.StringIO()
        console = Console(file=output, width=width, height=height, color_system=None)
        live = asyncio.create_task(show_live(HeldState(state, points(100)), console))
        await asyncio.sleep(0)
        live.cancel()
        await asyncio.gather(live, return_exceptions=True)
        return output.getvalue().splitlines()

    for width, height, more in ((80, 24, 992), (80, 40, 976), (140, 24, 992), (60, 30, 988)):
        lines = asyncio.run(shown(width, height))
        assert any(f"and {more} more" in line for line in lines), lines
        assert len(lines) <= height


def test_colours_are_for_terminals_only() -> None:
    output = io.StringIO()
    print_once(Console(file=output, force_terminal=True, width=80, color_system="truecolor"), troubled_state(), [])
    assert "\x1b[1;31m" in output.getvalue()
    assert "\x1b" not in printed(troubled_state())


def test_the_health_of_the_routers_takes_a_line_and_the_dead_another() -> None:
    lines = printed(routing_state()).splitlines()
    assert "│ routing: balance 88%, entropy 62%, to held experts 25%, similarity 0.12-0.50 │" in lines
    assert "│ dead: expert 0 of layer 1, expert 0 of layer 3                               │" in lines
    assert not [line for line in printed(swarm_state([peer_state(0)])).splitlines() if "routing" in line]


# Lines.


def test_without_a_terminal_there_is_a_line_for_what_changes() -> None:
    first = swarm_state([peer_state(0), peer_state(1)])
    assert changes(None, first, points(12), 0) == [
        "peer peer-0 (peer1111) is present: training, experts 0-1",
        "peer peer-1 (peer1112) is present: training, experts 2-3",
        "round 12: 3 peers, all agree, loss 3.2083, eval 3.308 ± 0.030, 1,012 tokens/s, experts 6/8, 61k tokens, "
        "3.0MB sent",
    ]
    assert changes(None, first, [], 0)[2:] == ["2 peers, all agree"]
    assert changes(first, first, points(12), 12) == []
    late = swarm_state([peer_state(0), peer_state(1, state="late")], refused={"forged": 2})
    assert changes(first, late, [], 0) == ["peer peer-1 (peer1112) is late", "records refused: 2 forged"]
    assert changes(late, swarm_state([peer_state(0)], refused={"forged": 2}), [], 0) == ["peer peer-1 is gone"]
    left = swarm_state([peer_state(0), peer_state(1, state="left")])
    assert changes(first, left, [], 0) == ["peer peer-1 (peer1112) has left"]
    assert changes(left, swarm_state([peer_state(0)]), [], 0) == []  # nothing new
    nobody = swarm_state()
    gone = ["peer peer-0 is gone", "peer peer-1 is gone", "no peers: the last one was seen 75s ago"]
    assert changes(first, nobody, [], 0) == gone
    assert changes(nobody, first, [], 0)[-1] == "2 peers, all agree"


def test_each_round_since_the_last_look_has_its_own_line_and_its_own_loss() -> None:
    state = swarm_state([peer_state(0), peer_state(1)])
    lines = changes(state, state, points(12), 9)
    assert [line.partition(",")[0] for line in lines] == ["round 10: 3 peers", "round 11: 3 peers", "round 12: 3 peers"]
    assert [line.partition("loss ")[2].partition(",")[0] for line in lines] == ["3.2500", "3.2273", "3.2083"]
    words = [line.partition("eval ")[2].partition(",")[0] for line in lines]
    assert words == ["3.350 ± 0.030", "3.350 ± 0.030 (round 10)", "3.308 ± 0.030"]


def test_experts_that_die_and_recover_are_told_once() -> None:
    sick = routing_state()
    assert changes(sick, sick, [], 0) == []
    healthy = replace(sick, experts=tuple(replace(expert, dead_layers=()) for expert in sick.experts))
    assert changes(healthy, sick, [], 0) == ["expert 0 of layer 1 is dead", "expert 0 of layer 3 is dead"]
    assert changes(sick, healthy, [], 0) == [
        "expert 0 of layer 1 gets tokens again",
        "expert 0 of layer 3 gets tokens again",
    ]
    nobody = swarm_state()  # without peers, there are no reports
    assert not [line for line in changes(sick, nobody, [], 0) if "tokens again" in line]


def test_following_shows_each_change_and_ends_when_told() -> None:
    async def follow() -> str:
        output = io.StringIO()
        source = HeldState(swarm_state([peer_state(0)]), points(1))
        shown = asyncio.create_task(show_lines(source, Console(file=output, color_system=None)))
        live = asyncio.create_task(show_live(source, Console(file=io.StringIO(), force_terminal=True, width=80)))
        await asyncio.sleep(0)
        source.update(swarm_state(), points(2))
        for _ in range(5):
            await asyncio.sleep(0)
        for task in (shown, live):
            task.cancel()
        await asyncio.gather(shown, live, return_exceptions=True)
        return output.getvalue()

    text = asyncio.run(follow())
    assert "peer peer-0 (peer1111) is present" in text
    assert "no peers" in text


def test_waiting_ends_with_a_change_or_with_the_time() -> None:
    async def wait() -> None:
        source = HeldState(swarm_state())
        await source.wait_for_change(0.001)
        waiting = asyncio.create_task(source.wait_for_change(60))
        await asyncio.sleep(0)
        source.update(swarm_state([peer_state(0)]), points(3))
        await asyncio.wait_for(waiting, 60)
        assert (len(source.state().peers), len(source.history())) == (1, 3)

    asyncio.run(wait())


# Figures.


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (9.4, "9"), (999, "999"), (1000, "1.0k"), (9990, "10k"), (999_600, "1.0M"), (1.25e12, "1.2T")],
)
def test_amounts(value: float, shown: str) -> None:
    assert amount(value) == shown


@given(st.floats(0, 9e18))
def test_amounts_and_times_take_little_room(value: float) -> None:
    assert len(amount(value)) <= 5
    assert len(seconds(value)) <= 5
    assert len(loss(value)) <= 6


@given(st.lists(st.floats(0, 1e6), max_size=300), st.integers(1, 80), st.integers(1, 5))
def test_curves_keep_their_size(values: list[float], width: int, height: int) -> None:
    lines = curve(values, width, height)
    assert len(lines) == (height if values else 0)
    assert all(len(line) <= width for line in lines)
    if values:
        assert len(lines[-1]) == min(width, len(values))  # the lowest value leaves a trace


@given(st.sets(st.integers(0, 50)))
def test_ranges_name_every_expert(experts: set[int]) -> None:
    found: set[int] = set()
    text = ranges(sorted(experts))
    for part in text.split(",") if experts else []:
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == experts
    assert (text == "-") is (not experts)
