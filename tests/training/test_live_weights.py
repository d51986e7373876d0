"""Live weights between reference and contribution, on a real small model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import yaml

from spes_swarm.config.file import load_config
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model, layout_of
from spes_swarm.training.live_weights import LiveWeights
from tests.helpers.swarm import TINY_RUN, merged

HELD = (1, 4)


class Peer:
    """A peer's vectors: reference and contribution of random values, live weights at the reference."""

    def __init__(self, run: RunConfig) -> None:
        model = build_model(run.model.type, run.model.settings, 0, "cpu")
        self.layout = layout_of(model)
        self.reference_N = flat_from_model(model, self.layout)
        self.contribution_N = np.zeros_like(self.reference_N)
        self.model = SparseModel(model, HELD)
        self.live = LiveWeights(self.model, self.reference_N, self.contribution_N, run)

    def read(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        out_N = np.empty(self.layout.num_elements, dtype=np.float32)
        for block in self.layout.blocks:
            self.model.read_block(block.index, out_N[block.start : block.stop])
        return out_N

    def train(self, seed: int) -> None:
        """Changes shared layers and held experts, as steps do."""
        for index in self.live.trained_blocks:
            block = self.layout.blocks[index]
            live_N = self.read()[block.start : block.stop]
            change_N = np.random.default_rng(seed + index).normal(0, 0.01, block.size).astype(np.float32)
            self.model.write_block(index, live_N + change_N)

    def trained(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        mask_N = np.zeros(self.layout.num_elements, dtype=np.bool_)
        for index in (0, *(1 + expert for expert in HELD)):
            mask_N[self.layout.blocks[index].start : self.layout.blocks[index].stop] = True
        return mask_N


def run_config(
    tmp_path_factory: pytest.TempPathFactory, *, overlap: bool = False, merge_interval: int = 20
) -> RunConfig:
    path = tmp_path_factory.mktemp("config") / "run.yaml"
    changes = {"round": {"overlap": overlap}, "merge": {"interval": merge_interval}}
    path.write_text(yaml.safe_dump({"run": merged(TINY_RUN, changes)}))
    run, _ = load_config(path)
    assert run is not None
    return run


@pytest.fixture(params=[False, True], ids=["no overlap", "overlap"])
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    return Peer(run_config(tmp_path_factory, overlap=request.param))


def test_only_trained_blocks_are_contributed(peer: Peer) -> None:
    peer.train(1)
    assert peer.live.contribute()
    assert np.array_equal(peer.contribution_N[peer.trained()], peer.read()[peer.trained()])
    assert not peer.contribution_N[~peer.trained()].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_contribution_with_a_value_that_is_no_number_is_noticed(peer: Peer, bad: float) -> None:
    block = peer.layout.expert_block(HELD[1])
    values_N = peer.reference_N[block.start : block.stop].copy()
    values_N[-1] = bad
    peer.model.write_block(block.index, values_N)
    assert not peer.live.contribute()


def test_large_values_whose_sum_is_beyond_fp32_are_still_numbers(peer: Peer) -> None:
    block = peer.layout.expert_block(HELD[0])
    peer.model.write_block(block.index, np.full(block.size, 3e38, dtype=np.float32))
    assert peer.live.contribute()


def test_after_a_round_trained_blocks_have_its_outcome_and_others_the_reference(peer: Peer) -> None:
    peer.train(1)
    peer.live.contribute()
    peer.contribution_N += 1.0
    peer.reference_N -= 1.0
    peer.live.follow_all()
    expected_N = np.where(peer.trained(), peer.contribution_N, peer.reference_N)
    np.testing.assert_allclose(peer.read(), expected_N, atol=1e-6)


def test_with_overlap_what_was_learnt_during_the_round_is_kept(tmp_path_factory: pytest.TempPathFactory) -> None:
    peer = Peer(run_config(tmp_path_factory, overlap=True))
    peer.train(1)
    peer.live.contribute()
    before_N = peer.read()
    peer.train(2)
    learnt_N = peer.read() - before_N
    peer.contribution_N += 1.0
    peer.live.follow_all()
    mask_N = peer.trained()
    np.testing.assert_allclose(peer.read()[mask_N], (peer.contribution_N + learnt_N)[mask_N], atol=1e-6)


def test_blocks_that_are_put_back_are_the_reference_bit_by_bit(peer: Peer) -> None:
    peer.train(1)
    expert = peer.layout.expert_block(HELD[0])
    peer.live.reset_to_reference([expert.index])
    assert np.array_equal(peer.read()[expert.start : expert.stop], peer.reference_N[expert.start : expert.stop])
    assert not np.array_equal(peer.read(), peer.reference_N)
    peer.live.reset_to_reference()
    assert np.array_equal(peer.read(), peer.reference_N)


@pytest.mark.parametrize(
    ("interval", "rounds"), [(10, [1, 2, 3, 4, 5, 6]), (20, [2, 4, 6]), (25, [3, 5]), (30, [3, 6]), (0, [])]
)
def test_experts_merge_after_the_rounds_whose_steps_reach_a_multiple_of_the_interval(
    tmp_path_factory: pytest.TempPathFactory, interval: int, rounds: list[int]
) -> None:
    """A round has 10 steps."""
    peer = Peer(run_config(tmp_path_factory, merge_interval=interval))
    assert [number for number in range(7) if peer.live.merge_if_due(number) is not None] == rounds


def test_merges_follow_the_steps_of_rounds_that_grow_longer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rounds end after the steps 10, 20, 30, 70, 110 ..."""
    run = run_config(tmp_path_factory, merge_interval=40)
    peer = Peer(replace(run, round=replace(run.round, inner_steps_later=((30, 40),))))
    assert [number for number in range(7) if peer.live.merge_if_due(number) is not None] == [4, 5, 6]
    assert peer.live.merge_if_due(4) == pytest.approx(0.1 * (1 - 70 / 400))


def test_experts_merge_after_rounds_in_which_they_took_part(tmp_path_factory: pytest.TempPathFactory) -> None:
    """They do in rounds 3, 6, 9 ..., whose steps are 30, 60, 90."""
    run = run_config(tmp_path_factory, merge_interval=40)
    peer = Peer(replace(run, round=replace(run.round, expert_every=3)))
    followed = [number for number in range(1, 13) if peer.live.merge_if_due(number, number - 1) is not None]
    assert followed == [6, 9, 12]
    # Who starts from a reference in between takes part in the last merge.
    assert [number for number in range(13) if peer.live.merge_if_due(number) is not None] == list(range(6, 13))
    assert peer.live.merge_if_due(8) == pytest.approx(0.1 * (1 - 60 / 400))
    assert peer.live.merge_if_due(8, previous=5) is not None
    assert peer.live.merge_if_due(8, previous=6) is None


def test_a_merge_whose_round_was_missed_is_applied_once_caught_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    peer = Peer(run_config(tmp_path_factory))
    assert peer.live.merge_if_due(5) is None
    assert peer.live.merge_if_due(5, previous=3) is not None
    assert not np.array_equal(peer.read(), peer.reference_N)
    assert peer.live.merge_if_due(5, previous=4) is None


def test_no_merge_is_reported_once_alpha_has_decayed_to_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    peer = Peer(run_config(tmp_path_factory))
    assert peer.live.merge_if_due(38) == pytest.approx(0.1 * 20 / 400)
    assert peer.live.merge_if_due(40) is None
