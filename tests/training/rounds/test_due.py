"""When a round is due, from what this peer and the others have done. The clock and the answers are the test's."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.port.commands import Commands
from spes_swarm.port.messages import SwarmView, TokenCounts
from spes_swarm.training.rounds import due as round_due
from spes_swarm.training.rounds.due import Pace

INNER_STEPS = 40
STEP = 100  # tokens per local step, of every peer


class Others:
    """What the network process knows of the others, and answers when it is asked to count.

    By their records, which are estimates, they have each done `estimate` steps; when asked, `steps`, each is in the
    middle of another, and does one in a second.
    """

    def __init__(self, *steps: float, claimed_step: int = STEP, estimate: float = 10.0 * INNER_STEPS) -> None:
        self.now = 1000.0
        self.num_counts = 0
        self.answer = True
        self.clock = SimpleNamespace(now=self.now)  # of the answers
        self.claimed_step = claimed_step
        self.steps = steps
        self.estimate = estimate
        self.behind = self.called = False
        self.out: str | None = None

    @property
    def view(self) -> SwarmView:
        return SwarmView(
            num_peers=len(self.steps),
            num_ready=len(self.steps),
            num_training=len(self.steps),
            tokens_per_step=sum([STEP] * (len(self.steps) - 1), self.claimed_step) if self.steps else 0,
            tokens=self.estimate * len(self.steps) * STEP,
            tokens_per_second=float(STEP * len(self.steps)),
            at=self.now,
            swarm_round=3,
            experts_covered=8,
            out=self.out,
        )

    def submit(self, command: object) -> Future[TokenCounts]:
        assert command is Commands.count_tokens
        self.num_counts += 1
        answer: Future[TokenCounts] = Future()
        if self.answer:
            counts = TokenCounts(
                int(sum(self.steps) * STEP),
                self.steps,
                begun=len(self.steps) * STEP / 2,
                tokens_per_second=float(len(self.steps) * STEP),
                at=self.clock.now,
                behind=self.behind,
                called=self.called,
            )
            answer.set_result(counts)
        return answer


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(round_due, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def is_due(own_steps: float, others: Others) -> bool:
    """Whether a round is due, after the others were asked where this peer finds that worthwhile."""
    config: Any = SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0)
    network: Any = others
    pace = Pace(network, config, STEP)
    tokens = int(own_steps * STEP)
    return pace.due(tokens, 0.0) or pace.due(tokens, 0.0)  # the first look asks, the second has the answer


def test_a_lone_peer_does_its_inner_steps() -> None:
    assert not is_due(INNER_STEPS - 1, Others())
    alone = Others()
    assert is_due(INNER_STEPS, alone)
    assert alone.num_counts == 0  # there is nobody to ask


def test_a_peer_that_is_out_of_the_run_waits_for_nobody() -> None:
    """Nobody answers it any more, and by its records of them, the others never do their work for its next round."""
    others = Others(0.0, 0.0)
    others.behind = True
    assert not is_due(1000 * INNER_STEPS, others)
    others.out, others.num_counts = "revoked", 0
    assert is_due(1, others)
    assert others.num_counts == 0


@pytest.mark.parametrize("num_others", [1, 2, 3, 7])
def test_a_round_is_due_when_all_have_together_done_their_steps(num_others: int) -> None:
    """To the nearest step: the steps that the others are in will be done before they come."""
    ready = [INNER_STEPS - 1.0] * num_others
    assert is_due(INNER_STEPS, Others(*ready))
    assert not is_due(INNER_STEPS - 1, Others(*ready))
    ready[0] -= 1.0
    assert not is_due(INNER_STEPS, Others(*ready))


def test_what_the_others_do_after_they_have_answered_is_predicted(clock: SimpleNamespace) -> None:
    """They were asked in their last step but one; this peer has done its steps, and waits for the next answers."""
    others: Any = Others(INNER_STEPS - 2.0)
    others.clock = clock
    pace = Pace(others, SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0), STEP)  # type: ignore[arg-type]
    tokens = INNER_STEPS * STEP
    assert not pace.due(tokens, STEP)
    others.answer = False
    for later_s, expected in ((0.0, False), (0.4, False), (0.2, True)):
        clock.now += later_s
        assert pace.due(tokens, STEP) is expected


def test_at_most_one_step_is_predicted_from_one_answer(clock: SimpleNamespace) -> None:
    """Others that are interrupted after an answer do not make a round much too short."""
    for missing, expected in ((3.0, False), (2.0, True)):
        others: Any = Others(*[INNER_STEPS - missing] * 3)
        others.clock = clock
        pace = Pace(others, SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0), STEP)  # type: ignore[arg-type]
        assert not pace.due(INNER_STEPS * STEP, STEP)
        others.answer = False
        assert not pace.due(INNER_STEPS * STEP, STEP)
        clock.now += 1000.0
        assert pace.due(INNER_STEPS * STEP, STEP) is expected


@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 1.0, 1.0, 1.0), (1.0, 0.5), (1.0, 0.7, 0.3, 2.0)])
@pytest.mark.parametrize("inner_steps", [2, 5, 50])
def test_peers_that_decide_alike_do_their_steps(
    clock: SimpleNamespace, speeds: tuple[float, ...], inner_steps: int
) -> None:
    """Whoever finds the round due first calls it, and the others end their steps: half a step each is the most."""
    num_peers = len(speeds)
    config: Any = SimpleNamespace(inner_steps=inner_steps, progress_ttl_s=30.0)
    totals = []
    for shift in range(10):
        phases = [(0.37 * shift * i) % 1.0 for i in range(num_peers)]  # share of their first step that is done
        clock.now, paces = 0.0, []
        for i in range(num_peers):
            rest = [(phases[j], speeds[j]) for j in range(num_peers) if j != i]
            others: Any = _Running(clock, rest)
            paces.append(Pace(others, config, STEP))
        done = [0] * num_peers
        due = False
        while not due:
            ends = [(done[i] + 1 - phases[i]) / speeds[i] for i in range(num_peers)]
            first = min(range(num_peers), key=ends.__getitem__)
            clock.now = ends[first]
            done[first] += 1
            due = paces[first].due(done[first] * STEP, speeds[first] * STEP)
        totals.append(done[first] + sum(done[i] + 1 for i in range(num_peers) if i != first))
        assert abs(totals[-1] - num_peers * inner_steps) <= num_peers / 2 + 1
    assert sum(totals) / len(totals) == pytest.approx(num_peers * inner_steps, abs=num_peers / 4)


class _Running(Others):
    """Others that do `speed` steps in a second each, the first of which is begun at 0 s."""

    def __init__(self, clock: SimpleNamespace, peers: list[tuple[float, float]]) -> None:
        super().__init__(*[0.0] * len(peers))
        self.clock, self.peers = clock, peers

    @property
    def view(self) -> SwarmView:
        speed = sum(speed for _, speed in self.peers) * STEP
        return replace(super().view, tokens=speed * self.clock.now, tokens_per_second=speed, at=self.clock.now)

    def submit(self, command: object) -> Future[TokenCounts]:
        self.num_counts += 1
        done = [phase + speed * self.clock.now for phase, speed in self.peers]
        answer: Future[TokenCounts] = Future()
        answer.set_result(
            TokenCounts(
                STEP * sum(map(int, done)),
                tuple(float(int(steps)) for steps in done),
                begun=STEP * sum(steps % 1 for steps in done),
                tokens_per_second=STEP * sum(speed for _, speed in self.peers),
                at=self.clock.now,
            )
        )
        return answer


def test_own_steps_alone_do_not_make_a_round_due() -> None:
    for own_steps in (INNER_STEPS, 1.2 * INNER_STEPS):
        assert not is_due(own_steps, Others(0.0, 0.0, 0.0))


def test_a_fast_peer_makes_up_for_a_slow_one() -> None:
    assert is_due(1.2 * INNER_STEPS, Others(0.8 * INNER_STEPS, INNER_STEPS - 2.0))


def test_nobody_is_asked_before_a_round_may_be_due() -> None:
    others = Others(INNER_STEPS, INNER_STEPS, estimate=INNER_STEPS / 2)
    assert not is_due(INNER_STEPS / 2, others)
    assert others.num_counts == 0


@pytest.mark.parametrize("claimed_step", [64 * STEP, 2**40])
def test_a_member_that_claims_huge_steps_puts_a_round_off_by_a_quarter_at_most(claimed_step: int) -> None:
    others = Others(0.0, *[1.25 * INNER_STEPS] * 3, claimed_step=claimed_step)
    assert is_due(1.25 * INNER_STEPS, others)
    assert not is_due(INNER_STEPS, Others(0.0, *[INNER_STEPS] * 3, claimed_step=claimed_step))


def test_a_member_that_claims_huge_counts_cannot_call_rounds_at_will() -> None:
    others = Others(1000.0 * INNER_STEPS, 1.0, 1.0, 1.0)
    assert not is_due(2.0, others)


def test_a_count_that_was_too_low_is_repeated_in_time(clock: SimpleNamespace) -> None:
    """Each second everybody does one step; the round is called within the second in which it is due, or the next."""
    others: Any = Others(0.0)
    others.clock = clock
    pace = Pace(others, SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0), STEP)  # type: ignore[arg-type]
    for second in range(2 * INNER_STEPS):
        clock.now += 1.0
        others.steps = (float(second),)
        if pace.due(second * STEP, STEP) or pace.due(second * STEP, STEP):
            break
    assert INNER_STEPS - 1 <= second <= INNER_STEPS + 1
    assert others.num_counts < INNER_STEPS / 2


def test_what_a_peer_that_is_behind_did_in_earlier_rounds_calls_none_for_the_others() -> None:
    """Its counter went on through rounds that the others held without it; of theirs, a quarter is done."""
    others = Others(*[INNER_STEPS / 4] * 3)
    assert is_due(10.0 * INNER_STEPS, others)
    others.behind = True
    assert not is_due(10.0 * INNER_STEPS, others)
    others.steps = (INNER_STEPS,) * 3
    assert is_due(10.0 * INNER_STEPS, others)


def test_a_newcomer_comes_when_it_hears_that_a_round_is_gathered() -> None:
    others = Others(1.0, 1.0, 1.0)
    assert not is_due(INNER_STEPS, others)
    others.called = True
    assert is_due(INNER_STEPS, others)


def test_how_far_a_round_is_follows_from_records_carried_forward(clock: SimpleNamespace) -> None:
    config: Any = SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0)
    alone: Any = Others()
    pace = Pace(alone, config, STEP)
    progress = []
    for steps in (INNER_STEPS // 2, 2 * INNER_STEPS):
        pace.due(steps * STEP, 0.0)
        progress.append(pace.progress)
    assert progress == [0.5, 1.0]
    others: Any = Others(0.0, 0.0, estimate=INNER_STEPS / 4)  # each of them does a step in a second
    pace = Pace(others, config, STEP)
    for later_s, expected in ((0.0, 1 / 4), (5.0, 1 / 3), (1000.0, 3 / 4)):
        clock.now = others.now + later_s
        pace.due(INNER_STEPS * STEP // 4, 0.0)
        assert pace.progress == pytest.approx(expected)
    pace.due(9 * INNER_STEPS * STEP, 0.0)
    assert pace.progress == 1.0


def test_the_others_are_asked_as_soon_as_records_say_that_all_is_done() -> None:
    assert is_due(INNER_STEPS, Others(INNER_STEPS - 1.0, estimate=INNER_STEPS))


def test_an_eighth_of_the_steps_of_the_median_peer_is_enough_and_less_is_not() -> None:
    eighth = INNER_STEPS // 8
    assert is_due(1.0, Others(1000.0 * INNER_STEPS, eighth - 1.0, eighth - 1.0))
    assert not is_due(1.0, Others(1000.0 * INNER_STEPS, eighth - 2.0, eighth - 2.0))


def test_five_quarters_of_the_steps_of_the_median_peer_are_enough_exactly() -> None:
    steps = 1.25 * INNER_STEPS
    assert is_due(steps, Others(0.0, *[steps - 1.0] * 3, claimed_step=2**40))


def test_huge_claims_do_not_put_off_the_next_look(clock: SimpleNamespace) -> None:
    """The others are asked again when this peer may have done a quarter of its own steps more."""
    others: Any = Others(0.0, *[INNER_STEPS / 4] * 3, claimed_step=2**40)
    pace = Pace(others, SimpleNamespace(inner_steps=INNER_STEPS, progress_ttl_s=30.0), STEP)  # type: ignore[arg-type]
    quarter_s = 0.7 * INNER_STEPS / 4  # at a step a second, with a margin
    looks = []
    for later_s in (0.0, 0.0, 0.9 * quarter_s, 1.01 * quarter_s):
        clock.now = others.now + later_s
        pace.due(int(1.25 * INNER_STEPS) * STEP, STEP)
        looks.append(others.num_counts)
    assert looks == [1, 1, 1, 2]
