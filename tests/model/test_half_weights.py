"""Halved weights: bf16 for the model, and bit-exact fp32 for everything else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from spes_swarm.base.arrays import FloatArray
from spes_swarm.model.half_weights import LowerHalves, is_halved, join, read_master, split
from spes_swarm.model.losses import LossWeights
from spes_swarm.model.output_head import output_head
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.gradients import Gradients, autocast
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser
from spes_swarm.training.optimiser.registry import make_optimiser
from tests.helpers.lone_trainer import run_config
from tests.helpers.moe_models import FAMILIES, random_moe

HALVED = r"experts\.\w+_proj$|self_attn\.\w+_proj\.weight|embed_tokens|lm_head"
torch.set_num_threads(1)

CPU = torch.device("cpu")
HERE = LowerHalves(CPU)
HELD = (1, 3)
VOCABULARY = 272


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
def test_halves_are_the_number_in_every_bit(bits: list[int]) -> None:
    numbers_N = floats(bits)  # infinity included
    upper_N, lower_N = split(numbers_N)
    assert (upper_N.dtype, lower_N.dtype) == (torch.bfloat16, torch.int16)
    same_N = join(upper_N, lower_N).view(torch.int32) == numbers_N.view(torch.int32)
    assert bool((same_N | numbers_N.isnan()).all())


_NAN_BITS = st.builds(
    lambda sign, mantissa: sign | 0x7F800000 | mantissa, st.sampled_from([0, -(2**31)]), st.integers(1, 2**23 - 1)
)


@given(_NAN_BITS)
@example(0x7FFFFFFF)  # CUDA's
@example(-1)
def test_a_nan_is_one_in_both_forms(bits: int) -> None:
    upper_N, lower_N = split(floats([bits]))
    assert upper_N.isnan().all()
    assert join(upper_N, lower_N).isnan().all()


@given(st.floats(-(2.0**126), 2.0**126, width=32))
def test_the_upper_half_is_the_nearest_bf16_number(number: float) -> None:
    (upper,) = split(torch.tensor([number]))[0].tolist()
    # The neighbours, by numpy, in float64: bf16 is the upper half of an fp32 number.
    below = (np.float32(number).view(np.uint32) & 0xFFFF0000).astype(np.uint32)
    neighbours = [float(np.uint32(bits).view(np.float32)) for bits in (below, below + np.uint32(0x10000))]
    assert upper in neighbours
    assert abs(upper - number) == min(abs(neighbour - number) for neighbour in neighbours)


def model_of(model_type: str = "olmoe", **changes: Any) -> SparseModel:
    """A random model, no weight of which lies in the middle between two bf16 numbers."""
    untouched = random_moe(model_type, **changes)
    sparse = SparseModel(untouched, HELD, foreign_form="bf16")
    for block in sparse.layout.blocks:
        values_N = blocks_of(sparse)[block.index]
        bits_N = values_N.view(np.uint32)
        bits_N[(bits_N & 0xFFFF) == 0x8000] += 1
        sparse.write_block(block.index, values_N)
    embedding: Tensor = untouched.get_input_embeddings().weight.detach()
    embedding.copy_(embedding.bfloat16())  # which autocast does not round
    return sparse


def blocks_of(model: SparseModel) -> list[FloatArray]:
    found = []
    for block in model.layout.blocks:
        values_N = np.empty(block.size, dtype=np.float32)
        model.read_block(block.index, values_N)
        found.append(values_N)
    return found


def gradients_of(model: SparseModel) -> Gradients:
    weights = LossWeights(load_balance=0.01, router_z=0.001, logit_z=1e-4)
    return Gradients(
        model,
        weights,
        2,
        device=CPU,
        autocast=partial(autocast, CPU, "bf16"),
        warn=lambda kind, text: pytest.fail(text),
    )


def optimiser_of(model: SparseModel, form: str, optimiser: str = "adamw") -> PeerOptimiser:
    training = replace(run_config().training, learning_rate=1e-2, decay_norm_and_bias=True, optimiser=optimiser)
    return make_optimiser(model, training, form=form)


@pytest.mark.parametrize(
    ("model_type", "form", "optimiser"),
    [
        *((family, "device", "adamw") for family in FAMILIES),
        *(("olmoe", form, optimiser) for form in ("int8", "host") for optimiser in ("adamw", "muon")),
    ],
)
def test_a_step_is_that_of_fp32_weights_under_autocast_in_every_bit(model_type: str, form: str, optimiser: str) -> None:
    whole, halved = model_of(model_type), model_of(model_type)
    halved.halve(HERE)
    batch_BS = np.random.default_rng(0).integers(0, VOCABULARY, (6, 16))  # three micro-batches
    losses = []
    for model in (whole, halved):
        torch.manual_seed(0)  # some routers add noise
        losses.append(gradients_of(model).compute(batch_BS, 0.5))
    assert losses[0] == losses[1]
    pairs = list(zip(whole.trainable_parameters(), halved.trainable_parameters(), strict=True))
    for (name, fp32), (_, bf16) in pairs:
        if fp32.grad is None:
            assert bf16.grad is None, name
            continue
        assert bf16.grad is not None, name
        assert bf16.grad.dtype == torch.float32
        assert torch.equal(fp32.grad, bf16.grad), name
        assert bf16.dtype == torch.float32 or bf16.dim() > 1
        assert bf16.dtype == torch.bfloat16 or not re.search(HALVED, name), name
    for model in (whole, halved):
        optimiser_of(model, form, optimiser).step()
    for (name, fp32), (_, bf16) in pairs:
        assert torch.equal(fp32.detach(), read_master(bf16)), name


@pytest.mark.parametrize("tied", [False, True])
def test_blocks_keep_their_bits(tied: bool) -> None:
    model = model_of(tie_word_embeddings=tied)
    before = blocks_of(model)
    trained = [block.index for block in model.layout.trained_blocks(HELD)]
    model.halve(HERE)
    for index in trained:
        assert blocks_of(model)[index].tobytes() == before[index].tobytes()
    rng = np.random.default_rng(0)
    written = [rng.standard_normal(block.size, dtype=np.float32) for block in model.layout.blocks]
    for block, values_N in zip(model.layout.blocks, written, strict=True):
        model.write_block(block.index, values_N)
    found = blocks_of(model)
    for index in trained:
        assert found[index].tobytes() == written[index].tobytes()
    head = model.module.get_output_embeddings()  # type: ignore[operator]
    embedding = model.module.get_input_embeddings()  # type: ignore[operator]
    assert (head.weight is embedding.weight) == tied


def test_experts_that_change_hands_keep_their_bits_and_new_ones_are_halved() -> None:
    model = model_of()
    model.halve(HERE)
    optimiser = optimiser_of(model, "device")
    gradients_of(model).compute(np.random.default_rng(0).integers(0, VOCABULARY, (2, 16)), 0.5)
    optimiser.step()
    kept = blocks_of(model)[model.layout.expert_block(3).index]
    model.hold((2, 3), optimiser)
    assert blocks_of(model)[model.layout.expert_block(3).index].tobytes() == kept.tobytes()
    adopted = model.layout.expert_block(2)
    values_N = np.random.default_rng(1).standard_normal(adopted.size, dtype=np.float32)
    model.write_block(adopted.index, values_N)
    assert blocks_of(model)[adopted.index].tobytes() == values_N.tobytes()
    stacks = [parameter for name, parameter in model.trainable_parameters() if ".experts." in name]
    assert all(is_halved(parameter) and parameter.dtype == torch.bfloat16 for parameter in stacks)


def test_a_rank_that_takes_no_steps_keeps_no_lower_halves() -> None:
    model = model_of()
    model.halve(LowerHalves(None))
    assert not any(is_halved(parameter) for _, parameter in model.trainable_parameters())
    block = model.layout.blocks[0]
    values_N = np.random.default_rng(0).standard_normal(block.size, dtype=np.float32)
    model.write_block(0, values_N)
    full = model_of()
    full.halve(HERE)
    full.write_block(0, values_N)
    for (name, one), (_, other) in zip(model.trainable_parameters(), full.trainable_parameters(), strict=True):
        if ".experts." not in name:
            assert torch.equal(one, other), name


def test_scaled_logits_are_not_taken_for_the_heads() -> None:
    plain, scaled = model_of(), model_of()

    def scale(module: nn.Module, arguments: object, output: Any) -> None:
        output.logits *= 1.004  # about one step of bf16

    scaled.module.register_forward_hook(scale)
    for model in (plain, scaled):
        model.halve(HERE)
    assert isinstance(output_head(plain.module), nn.Linear)
    assert output_head(scaled.module) is None


def test_many_micro_batches_add_up_in_fp32() -> None:
    model, exact = model_of(), model_of()
    model.halve(HERE)
    batch_BS = np.random.default_rng(0).integers(0, VOCABULARY, (16, 16))  # eight micro-batches
    gradients_of(model).compute(batch_BS, 0.5)
    gradients_of(exact).compute(batch_BS, 0.5)
    for (name, one), (_, other) in zip(model.trainable_parameters(), exact.trainable_parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name
