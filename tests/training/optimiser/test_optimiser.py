"""AdamW with moments in each form, against torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.peer.memory.step_memory import Allocations
from spes_swarm.training.optimiser import moment_storage
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.moment_storage import FORMS, MOMENTS
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
    monkeypatch.setitem(moment_storage._PIECE_ELEMENTS, "cpu", 512)


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


@pytest.mark.parametrize("form", FORMS)
def test_the_moments_take_four_bytes_each(form: str) -> None:
    optimiser = peer_adamw(form, [(128, 64), (3, 32, 64)])
    train(optimiser, 1)
    stored = sum(value.nbytes for state in optimiser.state.values() for key, value in state.items() if key != "step")
    assert stored == 8 * (128 * 64 + 3 * 32 * 64)


def test_a_step_takes_no_more_memory_for_a_larger_parameter() -> None:
    size = moment_storage._PIECE_ELEMENTS["cpu"]
    peaks = []
    for rows in (4, 8):
        optimiser = peer_adamw("host", [(rows * size // 256, 256)])
        train(optimiser, 1)  # makes the moments
        with Allocations() as allocations:
            optimiser.step()
        peaks.append(allocations.peak - allocations.live)  # weights and moments are alive afterwards
    assert peaks[0] == peaks[1] <= 4 * size


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("after", [(1, 2, 7), (5,), (0, 1, 2, 5, 6)], ids=str)
def test_the_moments_of_experts_that_stay_follow_a_change_of_holdings(form: str, after: tuple[int, ...]) -> None:
    before = (1, 2, 5)
    model = SparseModel(build_model("olmoe", TINY_RUN["model"]["settings"], 0, "cpu"), before)
    optimiser = PeerAdamW(model.param_groups(0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, form=form)
    train(optimiser, 2)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    old = {kind: moment(optimiser, dict(model.trainable_parameters())[name], kind) for kind in MOMENTS}
    model.set_held(after, optimiser)
    stack = dict(model.trainable_parameters())[name]
    for kind in MOMENTS:
        rows = moment(optimiser, stack, kind)
        assert old[kind].any(dim=(1, 2)).all()
        for row, expert in enumerate(after):
            assert torch.equal(rows[row], old[kind][before.index(expert)] if expert in before else torch.zeros(64, 32))
    train(optimiser, 1)
    assert optimiser.num_steps(stack) == 3
