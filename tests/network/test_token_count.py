"""What the others have done since the last commit, as they answer; the calls are the test's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spes_swarm.network.round.token_count import TokenCount
from spes_swarm.port.messages import TokenCounts
from spes_swarm.protocol.members.reputation import Reputation
from spes_swarm.protocol.members.roster import MAX_STEP_RATIO, Roster
from tests.helpers.lone_trainer import run_config
from tests.helpers.records import progress

INNER_STEPS, STEP = 10, 128
OWN_ROUND = 5


def count(
    answers: dict[str, Any], *, newcomer_told: tuple[str, ...] = (), record_round: int = OWN_ROUND
) -> TokenCounts:
    """What a peer at OWN_ROUND learns from these answers; None is silence."""
    reputation = Reputation(newcomer_told)
    if newcomer_told:
        reputation.follow()
    else:
        reputation.committed(0.0, answers, [])
    roster = Roster("me", reputation=reputation)
    roster.update({peer: progress(round=record_round, tokens=3 * STEP, tokens_per_step=STEP) for peer in answers})

    async def call(peer_id: str, method: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert method == "tokens"
        if answers[peer_id] is None:
            raise TimeoutError
        answer: dict[str, Any] = answers[peer_id]
        return answer

    rpc: Any = SimpleNamespace(call=call)
    run_state: Any = SimpleNamespace(
        reference=SimpleNamespace(round=OWN_ROUND),
        roster=roster,
        reachable=True,
        run=run_config(round={"inner_steps": INNER_STEPS}),
    )
    announcer: Any = SimpleNamespace(tokens_per_step=STEP)
    counting = TokenCount(rpc, run_state, announcer, lambda: False)
    return asyncio.run(counting.others())


def test_counts_since_an_earlier_commit_are_nothing() -> None:
    counts = count({"a": {"round": 4, "tokens": 900}, "b": {"round": 5, "tokens": 256}})
    assert sorted(counts.steps) == [0.0, 2.0]
    assert not counts.behind


def test_a_peer_that_is_behind_counts_what_the_swarm_has_done_since_its_own_commit() -> None:
    """The records say nothing of it yet."""
    ahead = {"round": 7, "tokens": 4 * STEP}
    counts = count({"a": ahead, "b": ahead, "c": {"round": 5, "tokens": 0}})
    assert sorted(counts.steps) == [0.0, 4.0, 4.0]
    assert counts.behind
    assert not count({"a": ahead, "b": {"round": 5, "tokens": 0}, "c": {"round": 5, "tokens": 0}}).behind


def test_who_is_silent_counts_with_its_record() -> None:
    assert count({"a": None}).steps == (3.0,)
    assert count({"a": None}, record_round=OWN_ROUND - 1).steps == (0.0,)


def test_the_step_under_way_is_estimated_from_its_speed_and_duration() -> None:
    stepping = {"round": 5, "tokens": 256, "speed": 10.0 * STEP, "step_s": 0.025}
    counts = count({"a": stepping, "b": {**stepping, "step_s": 100.0}})
    assert counts.tokens == 512
    assert counts.tokens_per_second == 20.0 * STEP
    # b's step takes longer than its speed tells, but it is still one step; a little time passes before the end.
    assert counts.begun == pytest.approx(1.25 * STEP, abs=0.5 * STEP)
    assert counts.begun >= 1.25 * STEP
    waiting = {"round": 5, "tokens": 256, "gathering": True, "speed": 0.0, "step_s": 0.0}
    assert count({"a": waiting}).begun == 0.0


def test_who_has_done_nothing_since_the_commit_is_not_predicted() -> None:
    """It may still evaluate, or not have committed yet."""
    stepping = {"speed": 10.0 * STEP, "step_s": 1.0}
    counts = count({"a": {"round": 5, "tokens": 0, **stepping}, "b": {"round": 4, "tokens": 999, **stepping}})
    assert (counts.begun, counts.tokens_per_second) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "7", None, [1.0], True])
@pytest.mark.parametrize("key", ["speed", "step_s"])
def test_who_names_no_speed_is_in_the_middle_of_a_step(key: str, wrong: object) -> None:
    counts = count({"a": {"round": 5, "tokens": 256, "speed": 1.0, "step_s": 1.0, key: wrong}})
    assert (counts.tokens, counts.begun, counts.tokens_per_second) == (256, STEP / 2, 0.0)


def test_an_absurd_speed_counts_as_much_as_an_absurd_count() -> None:
    counts = count({"a": {"round": 5, "tokens": 256, "speed": 1e300, "step_s": 1e300}})
    assert counts.tokens_per_second == 4 * INNER_STEPS * MAX_STEP_RATIO * STEP


@pytest.mark.parametrize("tokens", [-1, 2.5, True, None, "7", [7]])
def test_what_is_no_count_is_nothing(tokens: object) -> None:
    assert count({"a": {"round": 5, "tokens": tokens}}).tokens == 0


@pytest.mark.parametrize("number", [True, "5", None, 5.0])
def test_what_is_no_round_is_nothing(number: object) -> None:
    counts = count({"a": {"round": number, "tokens": STEP}})
    assert counts.tokens == 0
    assert not counts.behind


def test_nobody_is_believed_beyond_four_rounds_of_the_largest_steps() -> None:
    assert count({"a": {"round": 5, "tokens": 1 << 60}}).tokens == 4 * INNER_STEPS * MAX_STEP_RATIO * STEP


def test_a_newcomer_is_called_by_those_that_it_was_told_to_join() -> None:
    gathering, training = ({"round": 5, "tokens": 0, "gathering": flag} for flag in (True, False))
    assert count({"told": gathering, "other": training}, newcomer_told=("told",)).called
    assert not count({"told": training, "other": gathering}, newcomer_told=("told",)).called
    assert not count({"told": {**gathering, "round": 4}}, newcomer_told=("told",)).called  # of a round that it has
    assert not count({"a": gathering, "b": training}).called  # leaders call a member themselves
