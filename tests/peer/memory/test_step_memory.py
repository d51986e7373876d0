"""The planned memory of a step against that of a step that is really taken, class by class."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer.memory.step_memory import Allocations, StepShape, step_memory, with_layers
from spes_swarm.training.gradients import Gradients, loss_weights
from spes_swarm.training.optimiser.registry import make_optimiser
from tests.helpers.model_state import bytes_per_class
from tests.helpers.small_2b import eighth_of_2b

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "checkpointing", "micro_batch", "held", "optimiser"),
    [
        ("fp32", "none", 4, 1, "adamw"),
        ("int8", "layers", 2, 1, "adamw"),
        ("int4", "selective", 1, 4, "adamw"),
        ("bf16", "none", 2, 4, "muon"),
    ],
)
def test_every_class_is_that_of_a_step_that_is_taken(
    form: str, checkpointing: str, micro_batch: int, held: int, optimiser: Any
) -> None:
    run = eighth_of_2b()
    run = replace(run, training=replace(run.training, optimiser=optimiser))
    shape = StepShape(
        num_held=held, foreign_experts=form, precision="fp32", activation_checkpointing=checkpointing, on_gpu=False
    )
    planned = step_memory(run, shape, micro_batch)
    batch = np.random.default_rng(0).integers(0, run.model.vocab_size, (4, 128))
    with Allocations() as allocations:
        model = SparseModel(build_empty_model(run.model.type, run.model.settings), range(held), foreign_form=form)
        for block in model.layout.blocks:
            model.write_block(block.index, np.full(block.size, 0.01, dtype=np.float32))
        checkpoint_activations(model.module, checkpointing)
        gradients = Gradients(
            model,
            loss_weights(run.training),
            micro_batch,
            device=torch.device("cpu"),
            autocast=contextlib.nullcontext,
            warn=lambda kind, text: pytest.fail(f"{kind}: {text}"),
        )
        allocations.restart()
        gradients.compute(batch, 0.5)
        taken = allocations.peak
        made = make_optimiser(model, run.training)
        allocations.restart()
        before = allocations.live
        made.step()
        of_step = allocations.peak - before
    classes = bytes_per_class(model, made)
    assert planned.gradients == classes["shared_gradients"] + classes["held_gradients"]
    assert classes["foreign_gradients"] == classes["foreign_optimizer"] == 0
    steps = 4 * len(made.state)  # step counts
    assert planned.optimiser == classes["shared_optimizer"] + classes["held_optimizer"] - steps
    weights = sum(classes[f"{name}_parameters"] for name in ("shared", "held", "foreign"))
    # The model has small tables besides its weights: slots, counts, frequencies of its rotary embedding.
    assert weights <= planned.weights <= weights + 100_000
    assert planned.peak - planned.optimiser == pytest.approx(taken, rel=0.05)
    assert of_step - planned.optimiser <= planned.temporary


def test_logits_are_one_chunk() -> None:
    run = with_layers(eighth_of_2b(), 1)
    vocabulary, tokens = run.model.vocab_size, 2 * run.training.sequence_length
    cpu = StepShape(num_held=1, foreign_experts="bf16", precision="fp32", activation_checkpointing="none", on_gpu=False)
    assert step_memory(run, cpu, 2).logits == 4 * tokens * vocabulary
    long = replace(run, training=replace(run.training, sequence_length=8 * run.training.sequence_length))
    assert step_memory(long, cpu, 2).logits == 4 * (2**24 // vocabulary) * vocabulary
    # A GPU has larger chunks; under bf16, their gradient is cast for the products, and padded.
    gpu = replace(cpu, precision="bf16", on_gpu=True)
    assert vocabulary % 64 == 8
    row_bytes = 4 * vocabulary + 2 * (vocabulary + 56)
    assert step_memory(long, gpu, 2).logits == row_bytes * 8 * tokens
    assert step_memory(long, gpu, 4).logits == row_bytes * (2**26 // vocabulary)


def test_activations_and_logits_are_what_is_left_of_the_peak() -> None:
    run = with_layers(eighth_of_2b(), 1)
    shape = StepShape(
        num_held=1, foreign_experts="fp32", precision="fp32", activation_checkpointing="layers", on_gpu=False
    )
    step = step_memory(run, shape, 1)
    assert step.activations > 0
    assert step.temporary == step.activations + step.logits
    assert step.peak == step.weights + step.gradients + step.optimiser + step.temporary


def test_others_experts_in_host_memory_count_as_copies_of_two_layers() -> None:
    run = with_layers(eighth_of_2b(), 3)
    here = StepShape(num_held=1, foreign_experts="int8", precision="bf16", activation_checkpointing="none", on_gpu=True)
    model = SparseModel(build_empty_model(run.model.type, run.model.settings), [0], foreign_form="int8")
    layer = bytes_per_class(model)["foreign_parameters"] / 3
    on_device, elsewhere = (step_memory(run, replace(here, foreign_storage=kind), 1) for kind in ("device", "host"))
    assert on_device.weights - elsewhere.weights == pytest.approx(layer)
    assert elsewhere.temporary == on_device.temporary
