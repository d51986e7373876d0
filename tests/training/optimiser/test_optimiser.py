"""AdamW with moments in each form, against torch's own; and moments in 8 bits, against what was rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.peer.memory.step_memory import Allocations
from spes_swarm.training.optimiser import moment_storage
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.moment_storage import FORMS, MOMENTS, moment_bytes_per_weight, piece_elements
from spes_swarm.training.optimiser.rounding import BLOCK_ELEMENTS, FIRST_MOMENT, SECOND_MOMENT, Rounding
from tests.helpers.swarm import TINY_RUN

torch.set_num_threads(1)

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = [(7, 300), (3, 20, 33), (2, 64, 64), (65,)]


def drawn(shapes: Sequence[tuple[int, ...]], seed: int) -> list[Tensor]:
    """Numbers over several orders of magnitude, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).pow(3) for shape in shapes]


def groups(shapes: Sequence[tuple[int, ...]]) -> list[dict[str, object]]:
    parameters = [nn.Parameter(values) for values in drawn(shapes, 0)]
    return [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}]


def peer_adamw(form: str, shapes: Sequence[tuple[int, ...]] = SHAPES) -> PeerAdamW:
    return PeerAdamW(groups(shapes), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, form=form)


def parameters_of(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimiser.param_groups for parameter in group["params"]]


def train(optimiser: torch.optim.Optimizer, num_steps: int) -> list[Tensor]:
    """Returns how far the weights have moved."""
    parameters = parameters_of(optimiser)
    before = [parameter.detach().clone() for parameter in parameters]
    for step in range(num_steps):
        for parameter, gradient in zip(
            parameters, drawn([tuple(parameter.shape) for parameter in parameters], 1 + step), strict=True
        ):
            parameter.grad = gradient
        optimiser.step()
    return [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]


def moment(optimiser: PeerAdamW, parameter: nn.Parameter, name: str) -> Tensor:
    out_N = torch.full((parameter.numel(),), torch.nan)
    optimiser.read_moment(parameter, name, out_N)
    return out_N.view(parameter.shape)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moment_storage._PIECE_ELEMENTS, "cpu", 4 * BLOCK_ELEMENTS)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("form", ["device", "host"])
def test_fp32_moments_give_the_step_of_torch_bit_for_bit(form: str) -> None:
    ours, theirs = peer_adamw(form), torch.optim.AdamW(groups(SHAPES), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for moved, expected in zip(train(ours, 5), train(theirs, 5), strict=True):
        assert torch.equal(moved, expected)
    for mine, their in zip(parameters_of(ours), parameters_of(theirs), strict=True):
        assert ours.num_steps(mine) == 5
        for name in MOMENTS:
            assert torch.equal(moment(ours, mine, name), theirs.state[their][name])


@pytest.mark.usefixtures("small_pieces")
def test_steps_with_moments_in_8_bits_are_near_those_of_torch() -> None:
    theirs = torch.optim.AdamW(groups(SHAPES), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    for moved, expected in zip(train(peer_adamw("int8"), 20), train(theirs, 20), strict=True):
        assert (moved - expected).norm() < 0.05 * expected.norm()
        assert (moved * expected).sum() / expected.square().sum() == pytest.approx(1.0, abs=3e-3)


@pytest.mark.parametrize("form", FORMS)
def test_the_moments_take_the_bytes_that_are_announced(form: str) -> None:
    optimiser = peer_adamw(form, [(128, 64), (3, 32, 64)])
    train(optimiser, 1)
    stored = sum(value.nbytes for state in optimiser.state.values() for key, value in state.items() if key != "step")
    announced = moment_bytes_per_weight(form)
    assert stored == (128 * 64 + 3 * 32 * 64) * (announced.on_device + announced.on_host)


@pytest.mark.parametrize(("form", "bytes_per_element"), [("host", 4), ("int8", 40)])
def test_a_step_takes_no_more_memory_for_a_larger_parameter(form: str, bytes_per_element: int) -> None:
    size = piece_elements(torch.device("cpu"))
    peaks = []
    for rows in (4, 8):
        optimiser = peer_adamw(form, [(rows * size // 256, 256)])
        train(optimiser, 1)  # makes the moments
        with Allocations() as allocations:
            optimiser.step()
        peaks.append(allocations.peak - allocations.live)  # weights and moments are alive afterwards
    assert peaks[0] == peaks[1] <= bytes_per_element * size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", [(1, 2, 7), (5,), (0, 1, 2, 5, 6)], ids=str)
def test_the_moments_of_experts_that_stay_follow_a_change_of_holdings(form: str, after: tuple[int, ...]) -> None:
    before = (1, 2, 5)
    model = SparseModel(build_model("olmoe", TINY_RUN["model"]["settings"], 0, "cpu"), before)
    optimiser = PeerAdamW(model.param_groups(0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, form=form)
    train(optimiser, 2)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    old = {kind: moment(optimiser, dict(model.trainable_parameters())[name], kind) for kind in MOMENTS}
    model.hold(after, optimiser)
    stack = dict(model.trainable_parameters())[name]
    for kind in MOMENTS:
        rows = moment(optimiser, stack, kind)
        assert old[kind].any(dim=(1, 2)).all()
        for row, expert in enumerate(after):
            assert torch.equal(rows[row], old[kind][before.index(expert)] if expert in before else torch.zeros(64, 32))
    train(optimiser, 1)
    assert optimiser.num_steps(stack) == 3


ROUNDINGS = pytest.mark.parametrize("rounding", [FIRST_MOMENT, SECOND_MOMENT], ids=["first", "second"])


# Squares of smaller ones have fewer digits in fp32.
NUMBERS = st.just(0.0) | st.floats(-1e3, 1e3, width=32).filter(lambda number: abs(number) > 1e-15)


def rounded(rounding: Rounding, values_N: Tensor, noise: float) -> Tensor:
    return rounding.decode(*rounding.encode(values_N, torch.full_like(values_N, noise)))


@ROUNDINGS
def test_numbers_are_rounded_up_and_down_such_that_their_mean_is_right(rounding: Rounding) -> None:
    """Over evenly spaced noise, the mean is off by less than one of the spaces times the gap between two codes."""
    values_N = drawn([(1000,)], 0)[0].pow(2 if rounding.positive else 1)
    values_N[::BLOCK_ELEMENTS] = 2.0**16  # the largest of its block
    noises = [(index + 0.5) / 200 for index in range(200)]
    mean_N = torch.stack([rounded(rounding, values_N, noise).double() for noise in noises]).mean(dim=0)
    up_N, down_N = rounded(rounding, values_N, 0.0).abs(), rounded(rounding, values_N, 1 - 1e-7).abs()
    magnitudes_N = values_N.abs()
    assert (up_N >= magnitudes_N * (1 - 1e-5)).all()
    between_N = down_N <= magnitudes_N * (1 + 1e-5)
    assert between_N.sum() > 700
    # Only second moments are rounded up for certain: the smallest positive ones.
    assert torch.equal(down_N[~between_N], up_N[~between_N])
    assert between_N.all() or rounding.positive
    error_N = (mean_N.abs() - magnitudes_N).abs()[between_N]
    assert (error_N <= (up_N - down_N)[between_N] / 200 + 1e-5 * magnitudes_N[between_N]).all()


@ROUNDINGS
@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.floats(-1e3, 1e3, width=32).filter(lambda number: number == 0 or abs(number) > 1e-15),
        min_size=1,
        max_size=200,
    )
)
def test_what_is_read_is_rounded_to_itself(rounding: Rounding, numbers: list[float]) -> None:
    values_N = torch.tensor(numbers)
    if rounding.positive:
        values_N = values_N.square()
    codes_N, scales_B = rounding.encode(values_N)
    again_N, again_B = rounding.encode(rounding.decode(codes_N, scales_B))
    assert scales_B.shape == (math.ceil(len(numbers) / BLOCK_ELEMENTS),)
    assert torch.equal(again_N, codes_N)
    assert torch.equal(again_B, scales_B)


def test_zeros_stay_zeros_and_no_denominator_becomes_zero() -> None:
    values_N = torch.tensor([0.0, 1.0, 1e-20, 0.0] + [0.0] * 100)
    for noise in (0.0, 0.5, 1 - 1e-7):
        second_N = rounded(SECOND_MOMENT, values_N, noise)
        assert torch.equal(second_N > 0, values_N > 0)
        assert (second_N <= 1.0).all()
        assert torch.equal(rounded(FIRST_MOMENT, -values_N, noise)[4:], torch.zeros(100))
