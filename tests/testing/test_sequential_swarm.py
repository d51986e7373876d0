"""A swarm in one process: its rounds average, it repeats to the bit, and the form of others' experts matters."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.testing.sequential_swarm import SequentialSwarm, initial_weights, own_orders
from spes_swarm.config.run import RunConfig
from spes_swarm.data.sampler import TokenStream
from spes_swarm.protocol.consensus.layout import SHARED_BLOCK
from tests.helpers.lone_trainer import run_config

HALVES = [range(4), range(4, 8)]


def run() -> RunConfig:
    """Without anything that moves weights other than steps and averages."""
    return run_config(round={"clip": 0.0}, merge={"alpha": 0.0}, evaluation={"holdout_fraction": 0.1, "sequences": 4})


def trained(stream: TokenStream, rounds: int = 2, form: str = "fp32") -> SequentialSwarm:
    swarm = SequentialSwarm(run(), own_orders(run(), stream, range(2)), HALVES, foreign_form=form)
    for _ in range(rounds):
        swarm.train([2, 2])
        swarm.hold_round()
    return swarm


def test_a_round_averages_the_shared_layers_and_takes_experts_from_their_holders(stream: TokenStream) -> None:
    swarm = SequentialSwarm(run(), own_orders(run(), stream, range(2)), HALVES)
    swarm.train([2, 2])
    first_N, second_N = (peer.contribution_N.copy() for peer in swarm.peers)
    swarm.hold_round()
    result_N, layout = swarm.peers[0].reference.values_N, swarm.peers[0].model.layout
    for block in layout.blocks:
        where = slice(block.start, block.stop)
        if block.index == SHARED_BLOCK:
            expected_N = 0.5 * (first_N[where] + second_N[where])
        else:
            expected_N = (first_N if block.index <= 4 else second_N)[where]
        np.testing.assert_allclose(result_N[where], expected_N, atol=2e-5)  # differences travel as fp16
    moved_N = result_N != initial_weights(run())
    assert moved_N.mean() > 0.5


def test_equal_arguments_give_equal_bits(stream: TokenStream) -> None:
    first, second = (trained(stream) for _ in range(2))
    assert first.peers[0].reference.digest == second.peers[1].reference.digest
    assert first.round == 2


def test_rounds_grow_longer_with_the_schedule(stream: TokenStream) -> None:
    """Rounds of one step until two are done, then of three: the learning rate follows the sum."""
    changed = run_config(
        round={"clip": 0.0, "inner_steps": 1, "inner_steps_later": [[2, 3]]},
        training={"warmup_steps": 100},
        evaluation={"holdout_fraction": 0.1},
    )
    swarm = SequentialSwarm(changed, own_orders(changed, stream, range(2)), HALVES)
    done, rates = 0, []
    for _ in range(4):
        swarm.train([swarm.inner_steps] * 2)
        done += swarm.inner_steps
        rates.append(swarm.peers[0].optimiser.param_groups[0]["lr"])  # of the last step
        swarm.hold_round()
    assert done == 8
    assert rates == pytest.approx([changed.training.learning_rate * step / 100 for step in (1, 2, 5, 8)])


def test_experts_are_synchronised_in_every_third_round_with_the_weights_of_three(stream: TokenStream) -> None:
    """Both peers hold expert 0: their contributions to it weigh as much as the tokens of all three rounds."""
    changed = run_config(
        round={"clip": 0.0, "codec": "fp32", "expert_every": 3},
        merge={"alpha": 0.0},
        evaluation={"holdout_fraction": 0.1},
    )
    swarm = SequentialSwarm(changed, own_orders(changed, stream, range(2)), [[0, 1, 2, 3], [0, 4, 5, 6, 7]])
    first, second = swarm.peers
    start_N, block = first.reference.values_N.copy(), first.model.layout.expert_block(0)
    experts, where = slice(block.start, None), slice(block.start, block.stop)
    routed = np.zeros(2)
    for number in (1, 2, 3):
        assert np.array_equal(first.reference.values_N[experts], start_N[experts])
        swarm.train([1, 1])
        routed = np.array([peer.routed_E[0] for peer in swarm.peers])
        # Each token goes to two experts in each of two layers; the counts are those of all rounds so far.
        assert {int(peer.routed_E.sum()) for peer in swarm.peers} == {number * first.tokens * 2 * 2}
        live = [peer.contribution_N[where].copy() for peer in swarm.peers]
        swarm.hold_round()
        assert first.reference.versions[0] == number
    expected_N = (routed[0] * live[0] + routed[1] * live[1]) / routed.sum()
    np.testing.assert_allclose(first.reference.values_N[where], expected_N, atol=1e-6)
    assert first.reference.versions[1:] == (3,) * 8
    assert [peer.routed_E.sum() for peer in swarm.peers] == [0, 0]
    swarm.train([1, 1])
    swarm.hold_round(last=True)
    assert second.reference.versions == (4,) * 9


def test_the_form_of_others_experts_changes_what_is_learned(stream: TokenStream) -> None:
    exact, rounded = (trained(stream, form=form) for form in ("fp32", "int4"))
    assert exact.peers[0].reference.digest != rounded.peers[0].reference.digest
    # With fp32 a peer's live weights are the reference after a round; with int4 its others' experts are not.
    assert exact.peers[0].eval_loss() == pytest.approx(exact.reference_loss(), rel=1e-6)
    assert rounded.peers[0].eval_loss() != pytest.approx(rounded.reference_loss(), rel=1e-6)
    assert rounded.reference_loss() == pytest.approx(exact.reference_loss(), rel=0.02)
