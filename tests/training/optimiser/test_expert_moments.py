"""Moments of experts: read, checked, written, and the adopter's warm-up, against AdamW itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.protocol.ownership.moment_rules import MomentLimits, check_moments, largest_ratio
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.expert_moments import WarmUp, read_moments, write_moments
from tests.helpers.swarm import TINY_RUN

BETAS = (0.9, 0.95)


def model(held: Sequence[int]) -> SparseModel:
    settings_ = TINY_RUN["model"]["settings"]
    return SparseModel(build_model("olmoe", settings_, 0, "cpu"), held)


def optimiser(of: SparseModel, form: str = "device") -> PeerAdamW:
    return PeerAdamW(of.param_groups(0.1), lr=1e-2, betas=BETAS, eps=1e-8, form=form)


def train(of: SparseModel, adamw: PeerAdamW, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for _, parameter in of.trainable_parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        adamw.step()


def moments(of: SparseModel, adamw: PeerAdamW, expert: int) -> tuple[FloatArray, int]:
    out_2N = np.full(2 * of.layout.expert_block(expert).size, np.nan, dtype=np.float32)
    return out_2N, read_moments(adamw, of, expert, out_2N)


def test_moments_travel_bit_for_bit() -> None:
    giver, taker = model([1, 2, 5]), model([0, 5])
    given, taken = optimiser(giver), optimiser(taker)
    train(giver, given, 7)
    train(taker, taken, 3)
    before, _ = moments(taker, taken, 0)
    theirs, step = moments(giver, given, 5)
    assert step == 7
    assert np.isfinite(theirs).all()
    assert theirs.any()
    write_moments(taken, taker, 5, theirs, step)
    arrived, arrived_step = moments(taker, taken, 5)
    assert arrived.tobytes() == theirs.tobytes()
    assert arrived_step == 7  # or the bias correction would blow them up
    assert moments(taker, taken, 0)[0].tobytes() == before.tobytes()
    train(taker, taken, 1)  # and AdamW takes them


def test_moments_travel_between_peers_that_store_them_in_different_places() -> None:
    giver, taker = model([1, 5]), model([0, 5])
    given, taken = optimiser(giver, "host"), optimiser(taker)
    train(giver, given, 3)
    theirs, step = moments(giver, given, 5)
    write_moments(taken, taker, 5, theirs, step)
    assert moments(taker, taken, 5)[0].tobytes() == theirs.tobytes()
    back, back_step = moments(taker, taken, 5)
    write_moments(given, giver, 5, back, back_step)
    assert moments(giver, given, 5)[0].tobytes() == theirs.tobytes()
    train(giver, given, 1)


def test_an_optimiser_that_has_done_nothing_can_take_moments() -> None:
    giver, taker = model([5]), model([0, 5])
    given, taken = optimiser(giver), optimiser(taker)
    train(giver, given, 2)
    theirs, step = moments(giver, given, 5)
    assert moments(taker, taken, 5)[1] == 0
    assert not moments(taker, taken, 5)[0].any()
    write_moments(taken, taker, 5, theirs, step)
    assert moments(taker, taken, 5)[0].tobytes() == theirs.tobytes()
    assert not moments(taker, taken, 0)[0].any()
    train(taker, taken, 1)


def test_adopted_experts_warm_up_and_nothing_else_is_touched() -> None:
    warm, plain = model([0, 5]), model([0, 5])
    warm_up = WarmUp(4)
    warm_up.start([5])
    warm_adamw, plain_adamw = optimiser(warm), optimiser(plain)
    for number in range(1, 7):
        # Both begin each step from the same place, so the steps can be compared.
        for (_, a), (_, b) in zip(warm.trainable_parameters(), plain.trainable_parameters(), strict=True):
            with torch.no_grad():
                b.copy_(a)
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(number))
            b.grad = a.grad.clone()
        before = {name: p.detach().clone() for name, p in plain.trainable_parameters()}
        plain_adamw.step()
        warm_up.step(warm, warm_adamw.step)
        share = min(1.0, number / 5)
        for (name, a), (_, b) in zip(warm.trainable_parameters(), plain.trainable_parameters(), strict=True):
            expected = b.detach().clone()
            if "experts" in name:
                row = warm.held.index(5)
                expected[row] = before[name][row] + share * (b.detach()[row] - before[name][row])
            torch.testing.assert_close(a.detach(), expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=80),
    st.sampled_from([BETAS, (0.9, 0.999), (0.5, 0.9), (0.0, 0.95)]),
)
def test_what_gradients_bring_about_is_always_accepted(gradients: list[float], betas: tuple[float, float]) -> None:
    first, second = np.float32(0), np.float32(0)
    for gradient in np.array(gradients, dtype=np.float32):
        first = np.float32(betas[0]) * first + np.float32(1 - betas[0]) * gradient
        second = np.float32(betas[1]) * second + np.float32(1 - betas[1]) * gradient * gradient
    check_moments(np.array([first, second], dtype=np.float32), MomentLimits(largest_ratio(*betas), np.inf))


def test_the_bound_is_reached() -> None:
    """Gradients that grow by b2 / b1 with each step come as close to it as one likes."""
    b1, b2 = BETAS
    first = second = 0.0
    for number in range(400):
        gradient = (b2 / b1) ** number
        first = b1 * first + (1 - b1) * gradient
        second = b2 * second + (1 - b2) * gradient**2
    assert first / second**0.5 == pytest.approx(largest_ratio(b1, b2), rel=1e-6)


@pytest.mark.parametrize(
    "forged",
    [[np.nan, 1.0], [1.0, np.inf], [0.0, -1e-3], [1.0, 0.0], [1.0, 1e-4], [-3.0, 1.0]],
    ids=repr,
)
def test_impossible_moments_are_refused(forged: list[float]) -> None:
    with pytest.raises(ProtocolError, match="moments"):
        check_moments(np.array(forged, dtype=np.float32), MomentLimits(largest_ratio(*BETAS), np.inf))


@pytest.mark.slow
@pytest.mark.parametrize("max_grad_norm", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("beta2", [0.0, 0.95, 0.999, 0.999999])
def test_second_moments_of_clipped_gradients_are_accepted_and_larger_ones_are_not(
    max_grad_norm: float, beta2: float
) -> None:
    """As torch computes them once very many steps with the largest gradients that clipping lets through were taken."""
    limits = MomentLimits.of(max_grad_norm, 0.0, beta2)
    for size in (1, 1000):
        second_N = torch.full((size,), max_grad_norm**2 / size)
        for _ in range(3000):
            weights = torch.nn.Parameter(torch.zeros(size))
            weights.grad = torch.full((size,), 1e3)
            torch.nn.utils.clip_grad_norm_([weights], max_grad_norm)
            second_N.mul_(beta2).addcmul_(weights.grad, weights.grad, value=1 - beta2)
        check_moments(np.concatenate([np.zeros(size, np.float32), second_N.numpy()]), limits)
        too_large_N = 1.5 * second_N.numpy()
        with pytest.raises(ProtocolError, match="clipped to max_grad_norm"):
            check_moments(np.concatenate([np.zeros(size, np.float32), too_large_N]), limits)


def test_a_forged_second_moment_does_not_make_an_expert_stand_still() -> None:
    """It passes every other check, and the adopter's steps would be 1,000 times too small for hundreds of steps."""
    with pytest.raises(ProtocolError, match="moments"):
        check_moments(np.array([0.0, 1e6], dtype=np.float32), MomentLimits.of(1.0, *BETAS))


def test_where_nothing_is_ever_clipped_only_the_other_bound_holds() -> None:
    limits = MomentLimits.of(1e200, *BETAS)
    assert limits.second == np.inf
    check_moments(np.array([0.0, 3e38], dtype=np.float32), limits)
    with pytest.raises(ProtocolError, match="moments"):
        check_moments(np.array([3e38, 1.0], dtype=np.float32), limits)
