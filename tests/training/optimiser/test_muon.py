"""Muon, against an independent implementation that treats one matrix at a time, and against torch's own."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from spes_swarm.base.errors import CheckpointError
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.optimiser import moment_storage
from spes_swarm.training.optimiser.moment_storage import FORMS, MOMENTUM
from spes_swarm.training.optimiser.muon import orthogonalise
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser
from spes_swarm.training.optimiser.registry import make_optimiser
from spes_swarm.training.optimiser.saved_state import load_optimiser_arrays, optimiser_arrays
from tests.helpers.swarm import TINY_RUN

torch.set_num_threads(1)

RUN = RunConfig.from_dict(TINY_RUN, "test")
TRAINING = replace(
    RUN.training, optimiser="muon", learning_rate=1e-2, adamw_learning_rate=4e-3, weight_decay=0.1, muon_momentum=0.9
)
ALL = tuple(range(RUN.model.num_experts))
GATE_UP, DOWN = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
BY_MUON = ("q_proj", "k_proj", "v_proj", "o_proj", "experts")


def tiny(held: Sequence[int]) -> SparseModel:
    return SparseModel(build_model("olmoe", RUN.model.settings, 0, "cpu"), held)


def gradient(name: str, shape: Sequence[int], step: int, held: Sequence[int]) -> Tensor:
    """The gradient of a parameter, whoever holds its experts: that of a held expert is its row of the full one."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    full = torch.randn((len(ALL), *shape[1:]) if "experts" in name else tuple(shape), generator=generator)
    return full[list(held)] if "experts" in name else full


def train(model: SparseModel, optimiser: PeerOptimiser, steps: Sequence[int]) -> None:
    for step in steps:
        optimiser.set_learning_rate(TRAINING.learning_rate * (1 - 0.1 * step))
        for name, parameter in model.trainable_parameters():
            parameter.grad = gradient(name, parameter.shape, step, model.held).to(parameter.device)
        optimiser.step()


def one_matrix(weight_AB: Tensor, gradients: Sequence[Tensor], rates: Sequence[float]) -> Tensor:
    """Muon by its paper, in fp64: polynomials of singular values instead of products of matrices."""
    a, b, c = 3.4445, -4.7750, 2.0315
    weight_AB, momentum_AB = weight_AB.double(), torch.zeros_like(weight_AB, dtype=torch.float64)
    for gradient_AB, rate in zip(gradients, rates, strict=True):
        momentum_AB = 0.9 * momentum_AB + 0.1 * gradient_AB.double()
        left, values, right = torch.linalg.svd(0.1 * gradient_AB.double() + 0.9 * momentum_AB, full_matrices=False)
        values = values / values.square().sum().sqrt()
        for _ in range(5):
            values = a * values + b * values**3 + c * values**5
        update_AB = 0.2 * math.sqrt(max(weight_AB.shape)) * (left * values) @ right
        weight_AB = (1 - 0.1 * rate) * weight_AB - rate * update_AB
    return weight_AB.float()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forces the stacks into several batches, and each matrix into several pieces."""
    monkeypatch.setitem(moment_storage._PIECE_ELEMENTS, "cpu", 512)
    monkeypatch.setitem(moment_storage._BATCH_ELEMENTS, "cpu", 5120)


@pytest.mark.parametrize("form", ["device", "host"])
@pytest.mark.parametrize("batches", ["whole", "small"])
def test_each_matrix_takes_the_step_that_it_would_take_alone(
    form: str, batches: str, request: pytest.FixtureRequest
) -> None:
    if batches == "small":
        request.getfixturevalue("small_batches")
    model = tiny((1, 2, 5))
    before = {name: parameter.detach().clone() for name, parameter in model.trainable_parameters()}
    train(model, make_optimiser(model, TRAINING, form=form), range(3))
    rates = [TRAINING.learning_rate * (1 - 0.1 * step) for step in range(3)]
    seen = 0
    for name, parameter in model.trainable_parameters():
        if not any(part in name.split(".") for part in BY_MUON):
            continue
        gradients = [gradient(name, parameter.shape, step, model.held) for step in range(3)]
        stacks = [each.unsqueeze(0) if each.dim() == 2 else each for each in (before[name], *gradients, parameter)]
        for rows in zip(*(stack.detach() for stack in stacks), strict=True):
            halves = zip(*(row.chunk(2) if "gate_up" in name else (row,) for row in rows), strict=True)
            for start, *given, end in halves:
                torch.testing.assert_close(end, one_matrix(start, given, rates), rtol=0, atol=1e-5)
                seen += 1
    assert seen == 2 * (4 + 3 * 3)  # layers: attention, and gate, up and down of three experts


def test_everything_else_takes_the_step_of_torchs_adamw_with_its_own_peak() -> None:
    ours, theirs = tiny((1, 2, 5)), tiny((1, 2, 5))
    adamw = torch.optim.AdamW(
        theirs.param_groups(0.1, TRAINING.decay_norm_and_bias),
        betas=(TRAINING.adam_beta1, TRAINING.adam_beta2),
        eps=TRAINING.adam_eps,
        fused=True,
    )
    train(ours, make_optimiser(ours, TRAINING), range(3))
    for step in range(3):
        for group in adamw.param_groups:
            group["lr"] = 4e-3 * (1 - 0.1 * step)
        for name, parameter in theirs.trainable_parameters():
            parameter.grad = gradient(name, parameter.shape, step, theirs.held)
        adamw.step()
    expected = dict(theirs.trainable_parameters())
    rest = [name for name in expected if not any(part in name.split(".") for part in BY_MUON)]
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= set(rest)
    for name, parameter in ours.trainable_parameters():
        if name in rest:
            torch.testing.assert_close(parameter, expected[name], rtol=0, atol=1e-8)


def test_held_experts_move_as_they_do_in_a_model_that_trains_all() -> None:
    sparse, full = tiny((1, 2, 5)), tiny(ALL)
    for model in (sparse, full):
        train(model, make_optimiser(model, TRAINING), range(3))
    whole = dict(full.trainable_parameters())
    for name, parameter in sparse.trainable_parameters():
        expected = whole[name][list(sparse.held)] if "experts" in name else whole[name]
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)], ids=str)
def test_a_single_matrix_moves_as_with_torchs_muon(shape: tuple[int, int]) -> None:
    """torch multiplies in bf16, so single elements differ by a few per cent."""
    generator = torch.Generator().manual_seed(0)
    matrix_AB = torch.randn(shape, generator=generator)
    theirs = nn.Parameter(torch.zeros(shape))
    theirs.grad = matrix_AB.clone()
    muon: torch.optim.Optimizer = torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    muon.step()
    ours_AB = -0.2 * math.sqrt(max(shape)) * orthogonalise(matrix_AB.unsqueeze(0))[0]
    assert (ours_AB - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.cuda
@pytest.mark.parametrize("form", FORMS)
def test_a_gpu_takes_the_step_of_a_cpu_up_to_the_precision_of_bf16(form: str) -> None:
    here, there = tiny((1, 2, 5)), SparseModel(build_model("olmoe", RUN.model.settings, 0, "cuda"), (1, 2, 5))
    before = {name: parameter.detach().clone() for name, parameter in here.trainable_parameters()}
    for model in (here, there):
        train(model, make_optimiser(model, TRAINING, form=form if model is there else "device"), range(3))
    moved = dict(there.trainable_parameters())
    for name, parameter in here.trainable_parameters():
        expected = parameter.detach() - before[name]
        assert (moved[name].detach().cpu() - before[name] - expected).norm() < 0.05 * expected.norm(), name


def test_stacks_are_orthogonalised_matrix_by_matrix_and_arguments_stay_as_they_are() -> None:
    stack_MAB = torch.randn((5, 24, 40), generator=torch.Generator().manual_seed(0))
    stack_MAB[3] = 0.0
    stack_MAB[4] *= 1e-4
    before = stack_MAB.clone()
    result_MAB = orthogonalise(stack_MAB)
    assert torch.equal(stack_MAB, before)
    for index in range(5):
        torch.testing.assert_close(result_MAB[index], orthogonalise(stack_MAB[index : index + 1])[0])
    torch.testing.assert_close(orthogonalise(stack_MAB.mT), result_MAB.mT)
    values_MR = torch.linalg.svdvals(result_MAB)
    assert not values_MR[3].any()
    others_MR = values_MR[[0, 1, 2, 4]]
    assert (others_MR > 0.6).all()
    assert (others_MR < 1.25).all()


@pytest.mark.parametrize("form", FORMS)
def test_the_momentum_of_experts_that_stay_follows_a_change_of_holdings(form: str) -> None:
    """Peers that drop and adopt other experts train the same one as a peer that has always held it alone."""
    changed, steady = tiny((1, 2, 5)), tiny((2,))
    optimisers = [make_optimiser(model, TRAINING, form=form) for model in (changed, steady)]
    for model, optimiser in zip((changed, steady), optimisers, strict=True):
        train(model, optimiser, range(2))
    changed.set_held((0, 2, 3, 7), optimisers[0])
    adopted = dict(changed.trainable_parameters())[GATE_UP]
    momentum = torch.empty(adopted.shape)
    optimisers[0].read_moment(adopted, *MOMENTUM, momentum.view(-1))
    for row, expert in enumerate(changed.held):
        assert bool(momentum[row].any()) == (expert == 2)
    for model, optimiser in zip((changed, steady), optimisers, strict=True):
        train(model, optimiser, [2])
    for name in (GATE_UP, DOWN):
        kept, alone = dict(changed.trainable_parameters())[name][1], dict(steady.trainable_parameters())[name][0]
        torch.testing.assert_close(kept, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_has_one_moment_and_anything_else_has_two(form: str) -> None:
    model = tiny((1, 2, 5))
    optimiser = make_optimiser(model, TRAINING, form=form)
    train(model, optimiser, [0])
    for name, parameter in model.trainable_parameters():
        is_matrix = any(part in name.split(".") for part in BY_MUON)
        state = optimiser.state[parameter]
        stored = sum(value.nbytes for key, value in state.items() if key != "step")
        assert stored == (4 if is_matrix else 8) * parameter.numel(), name


@pytest.mark.parametrize(("saved_by", "loaded_by"), [("adamw", "muon"), ("muon", "adamw")])
def test_the_state_of_another_optimiser_is_refused_and_nothing_changes(saved_by: str, loaded_by: str) -> None:
    peer_adamw = replace(TRAINING, optimiser="adamw", adamw_learning_rate=None)
    optimisers = {"adamw": peer_adamw, "muon": TRAINING}
    saved, loaded = tiny((1, 5)), tiny((1, 5))
    first = make_optimiser(saved, optimisers[saved_by])
    train(saved, first, [0])
    arrays = optimiser_arrays(first, dict(saved.trainable_parameters()))
    second = make_optimiser(loaded, optimisers[loaded_by])
    with pytest.raises(CheckpointError, match=r"is that of another optimiser.*; use another --output-dir"):
        load_optimiser_arrays(second, dict(loaded.trainable_parameters()), arrays)
    assert not second.state
