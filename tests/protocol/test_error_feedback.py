"""What a lossy codec rounds off is not lost: the reference follows the sum of the true differences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.codec import BlockInteger, get_codec
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import Reference
from spes_swarm.protocol.rounds.error_feedback import ErrorFeedback
from tests.helpers.rounds import FakePeer, hold_round, peer, small_layout

STEP = 0.01
ROUNDS = 12
LAYOUT = small_layout(4, shared=3000, expert=900)
HOLDINGS = ([0, 1], [1, 2], [2], [3])  # experts 0 and 3 have one holder
integer_codecs = pytest.mark.parametrize("codec", ["int8", "int4"])


def new_peers(layout: Layout = LAYOUT, holdings: Sequence[Sequence[int]] = HOLDINGS) -> list[FakePeer]:
    start_N = np.random.default_rng(0).normal(0, 0.1, layout.num_elements).astype(np.float32)
    return [peer(layout, start_N, held) for held in holdings]


def true_differences(peers: Sequence[FakePeer], seed: int = 1) -> list[FloatArray]:
    """What each peer learns in a round, zero in blocks that it does not train; magnitudes vary within a part."""
    found = []
    for number, who in enumerate(peers):
        rng = np.random.default_rng((seed, number))
        sizes_N = np.exp2(rng.normal(0, 2, len(who.live_N)))
        difference_N = (STEP * rng.normal(size=len(who.live_N)) * sizes_N).astype(np.float32)
        trained = {block.index for block in who.reference.layout.trained_blocks(who.held)}
        for block in who.reference.layout.blocks:
            if block.index not in trained:
                difference_N[block.start : block.stop] = 0
        found.append(difference_N)
    return found


def learn(peers: Sequence[FakePeer], differences: Sequence[FloatArray]) -> None:
    for who, difference_N in zip(peers, differences, strict=True):
        who.live_N += difference_N


def mean_difference(peers: Sequence[FakePeer], differences: Sequence[FloatArray]) -> NDArray[np.float64]:
    """The exact average of a round; all weights are equal."""
    layout = peers[0].reference.layout
    mean_N = np.zeros(layout.num_elements)
    for block in layout.blocks:
        where = slice(block.start, block.stop)
        holders = [i for i, who in enumerate(peers) if block.expert is None or block.expert in who.held]
        mean_N[where] = np.mean([differences[i][where].astype(np.float64) for i in holders], axis=0)
    return mean_N


def distance(first_N: FloatArray, second_N: NDArray[np.floating]) -> float:
    return float(np.sqrt(np.mean(np.square(first_N.astype(np.float64) - second_N))))


def errors_of(codec: str, result_codec: str | None, rounds: int) -> list[float]:
    """RMS distance of the reference from the exact one, after each round, over the RMS of one round's difference.

    Every round has the same differences: an error that is lost each time adds up.
    """
    peers = new_peers()
    exact_N = peers[0].reference.values_N.astype(np.float64)
    differences = true_differences(peers)
    mean_N = mean_difference(peers, differences)
    length = float(np.sqrt(np.mean(np.square(mean_N))))
    errors = []
    for number in range(1, rounds + 1):
        learn(peers, differences)
        hold_round(peers, number, codec=codec, result_codec=result_codec, part_elements=1024)
        exact_N += mean_N
        errors.append(distance(peers[0].reference.values_N, exact_N) / length)
        assert len({who.reference.digest for who in peers}) == 1
    return errors


@integer_codecs
def test_the_reference_follows_the_true_differences_and_the_error_does_not_grow(codec: str) -> None:
    errors = errors_of(codec, "fp32", ROUNDS)
    assert errors[0] > 0
    assert max(errors) < 2 * errors[0]


@integer_codecs
def test_without_feedback_the_error_grows_with_every_round(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above is one of the feedback."""
    monkeypatch.setattr(BlockInteger, "error_feedback", False)
    errors = errors_of(codec, "fp32", ROUNDS)
    assert errors[-1] > ROUNDS / 3 * errors[0]


def test_the_rounding_errors_of_results_do_not_add_up_either(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = errors_of("int4", "int4", ROUNDS)
    assert max(errors) < 2 * errors[0]
    monkeypatch.setattr(ErrorFeedback, "note_result", lambda *_: None)
    assert errors_of("int4", "int4", ROUNDS)[-1] > 2 * max(errors)


@integer_codecs
def test_the_rounding_error_is_in_the_live_weights_of_all_and_of_the_reducer_too(codec: str) -> None:
    peers = new_peers()
    differences = true_differences(peers)
    learn(peers, differences)
    plan, _ = hold_round(peers, 1, codec=codec, result_codec="fp32", part_elements=1024)
    for part in plan.parts:
        where = slice(part.start, part.start + part.size)
        for contribution in plan.block_of(part).contributions:
            who = peers[contribution.member]
            left_N = who.live_N[where] - who.reference.values_N[where]
            learnt_N = differences[contribution.member][where]
            encoded = get_codec(codec).encode(learnt_N)
            lost_N = learnt_N - get_codec(codec).decode(encoded, part.size)
            assert distance(left_N, lost_N) < 0.01 * distance(lost_N, 0 * lost_N) + 1e-7
            assert lost_N.any()


@integer_codecs
def test_a_reducer_takes_back_no_more_than_it_has_learnt(codec: str) -> None:
    """Not even if its work weighs little, or the others' is much longer."""
    peers = new_peers(holdings=([0], [1], [2], [3]))
    differences = true_differences(peers)
    differences[0] *= np.float32(1e-3)
    peers[0].tokens, peers[0].routed = 1, (1,)
    for who in peers[1:]:
        who.tokens, who.routed = 1000, (1000,)
    learn(peers, differences)
    plan, _ = hold_round(peers, 1, codec=codec, part_elements=1024)
    reduced = [part for part in plan.parts if part.block == 0 and part.reducer == 0]
    assert reduced
    for part in reduced:
        where = slice(part.start, part.start + part.size)
        taken_N = peers[0].live_N[where] - peers[0].reference.values_N[where]
        assert 0 < distance(taken_N, 0 * taken_N) < 1.1 * distance(differences[0][where], 0 * taken_N)


@integer_codecs
def test_with_nothing_more_to_learn_the_reference_reaches_the_live_weights(codec: str) -> None:
    peers = new_peers(holdings=([0, 1], [1, 2], [2, 3]))
    learn(peers, true_differences(peers))
    expected_N = peers[0].reference.values_N + mean_difference(peers, true_differences(peers))
    distances = []
    for number in range(1, 6):
        hold_round(peers, number, codec=codec, result_codec="fp32", part_elements=1024)
        distances.append(distance(peers[0].reference.values_N, expected_N))
    assert distances[-1] < 1e-2 * distances[0]


@integer_codecs
def test_a_single_contributor_keeps_all_of_its_live_weights(codec: str) -> None:
    """The shared layers, too: with fp16 they become the reference, which is smaller in a checkpoint."""
    peers = new_peers(holdings=([0, 1], [1]))
    peers[1].tokens = 0
    learn(peers[:1], true_differences(peers)[:1])
    live_N = peers[0].live_N.copy()
    hold_round(peers, 1, codec=codec, part_elements=1024)
    trained = LAYOUT.trained_blocks([0, 1])
    for block in trained:
        where = slice(block.start, block.stop)
        assert np.array_equal(peers[0].live_N[where], live_N[where])
        assert not np.array_equal(peers[0].reference.values_N[where], live_N[where])


def test_a_part_with_one_contribution_uses_the_codec_of_contributions() -> None:
    """Its result would otherwise cost more bytes for the same result."""
    peers = new_peers()
    learn(peers, true_differences(peers))
    plan, states = hold_round(peers, 1, codec="int4", result_codec="int8", part_elements=1024)
    for state in states:
        for index, result in state.results.known.items():
            part = plan.parts[index]
            several = len(plan.block_of(part).contributions) > 1
            assert len(result.data) == get_codec("int8" if several else "int4").num_bytes(part.size)


def test_a_committed_round_keeps_no_rounding_errors() -> None:
    peers = new_peers()
    learn(peers, true_differences(peers))
    _, states = hold_round(peers, 1, codec="int4", part_elements=1024)
    for state in states:
        for feedback in (state._feedback, state.contributions.feedback, state.reduction._feedback):
            assert not feedback._sent
            assert not feedback._of_results


@integer_codecs
def test_work_that_was_left_out_is_carried_over_whole(codec: str) -> None:
    peers = new_peers()
    differences = true_differences(peers)
    learn(peers, differences)
    plan, _ = hold_round(peers, 1, codec=codec, part_elements=1024, lose_push=lambda sender, frame: sender == 2)
    lost = [part for part in plan.parts if part.block == 0 and part.reducer != 2]
    assert lost
    for part in lost:
        where = slice(part.start, part.start + part.size)
        left_N = peers[2].live_N[where] - peers[2].reference.values_N[where]
        np.testing.assert_allclose(left_N, differences[2][where], atol=1e-7)


@integer_codecs
def test_a_part_that_is_missing_leaves_all_work_in_the_live_weights(codec: str) -> None:
    peers = new_peers()
    learn(peers, true_differences(peers))
    live = [who.live_N.copy() for who in peers]
    plan, _ = hold_round(peers, 1, codec=codec, part_elements=1024, lose_result=lambda receiver, frame: receiver == 3)
    missing = [part for part in plan.parts if part.block == 0 and part.reducer != 3]
    assert missing
    for part in missing:
        where = slice(part.start, part.start + part.size)
        assert np.array_equal(peers[3].live_N[where], live[3][where])


@integer_codecs
def test_no_residual_is_kept_of_work_that_was_scaled_down(codec: str) -> None:
    """It would make the next difference too long again."""
    peers = new_peers()
    differences = true_differences(peers)
    differences[1] *= 10
    learn(peers, differences)
    plan, _ = hold_round(peers, 1, codec=codec, part_elements=1024, clip=1.5)
    scaled = [c for c in plan.blocks[0].contributions if c.scale < 1]
    assert [c.member for c in scaled] == [1]
    shared = slice(0, LAYOUT.blocks[0].stop)
    assert np.array_equal(peers[1].live_N[shared], peers[1].reference.values_N[shared])
    assert not np.array_equal(peers[2].live_N[shared], peers[2].reference.values_N[shared])


@integer_codecs
def test_honest_members_are_within_the_bounds(codec: str) -> None:
    """Neither contributions nor results are longer than stated because of the codec."""
    peers = new_peers()
    for number in range(1, 6):
        learn(peers, true_differences(peers, seed=number))
        _, states = hold_round(peers, number, codec=codec, part_elements=1024, clip=1.5)
        assert not any(
            state.reduction.refused or state.results.excessive or state.reduction.own_faults for state in states
        )
        assert not any(peers[i].reports[-1].parts_missing for i in range(len(peers)))


@integer_codecs
def test_a_peer_that_was_away_heals_and_has_the_reference_to_the_bit(codec: str) -> None:
    peers = new_peers()
    for number in (1, 2):
        learn(peers[:3], true_differences(peers)[:3])
        hold_round(peers[:3], number, codec=codec, part_elements=1024)
    assert peers[3].reference.digest != peers[0].reference.digest
    learn(peers, true_differences(peers, seed=3))
    hold_round(peers, 3, codec=codec, part_elements=1024)
    assert len({who.reference.digest for who in peers}) == 1
    for who in peers:
        assert Reference(LAYOUT, who.reference.values_N).digests == who.reference.digests


def test_fp32_and_fp16_leave_nothing_in_the_live_weights_of_shared_layers() -> None:
    for codec in ("fp32", "fp16"):
        peers = new_peers()
        learn(peers, true_differences(peers))
        hold_round(peers, 1, codec=codec, part_elements=1024)
        shared = slice(0, LAYOUT.blocks[0].stop)
        assert all(np.array_equal(who.live_N[shared], who.reference.values_N[shared]) for who in peers)
