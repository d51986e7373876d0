"""The planned memory of a step against that of a step that is really taken, class by class."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from spes_swarm import plan as command
from spes_swarm.base.errors import ConfigError
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.sparse_model import SparseModel, build_empty_model
from spes_swarm.peer.memory.step_memory import Allocations, StepShape, step_memory
from spes_swarm.training.gradients import Gradients, loss_weights
from tests.helpers.model_state import bytes_per_class
from tests.helpers.small_2b import eighth_of_2b

torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "checkpointing", "micro_batch", "held"),
    [("fp32", "none", 4, 1), ("int8", "layers", 2, 1), ("int4", "selective", 1, 4), ("bf16", "none", 2, 4)],
)
def test_every_class_is_that_of_a_step_that_is_taken(
    form: str, checkpointing: str, micro_batch: int, held: int
) -> None:
    run = eighth_of_2b()
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
    optimiser = torch.optim.AdamW(model.param_groups(0.1), fused=True)
    optimiser.step()
    classes = bytes_per_class(model, optimiser)
    assert planned.gradients == classes["shared_gradients"] + classes["held_gradients"]
    assert classes["foreign_gradients"] == classes["foreign_optimizer"] == 0
    steps = 4 * len(optimiser.state)  # AdamW's step counts
    assert planned.optimiser == classes["shared_optimizer"] + classes["held_optimizer"] - steps
    weights = sum(classes[f"{name}_parameters"] for name in ("shared", "held", "foreign"))
    # The model has small tables beside its weights: slots, counts, frequencies of its rotary embedding.
    assert weights <= planned.weights <= weights + 100_000
    assert planned.peak - planned.optimiser == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(
    ("text", "size"), [("16GB", 16 * 10**9), ("16GiB", 2**34), ("1.5g", 1_500_000_000), ("24 gb", 24 * 10**9), ("7", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert command.parse_size("--memory", text) == size


@pytest.mark.parametrize("text", ["", "16XB", "-1GB", "0GB", "GB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory: found .*, expected a size such as 16GB or 16GiB"):
        command.parse_size("--memory", text)


def test_the_quickstart_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--json", "--device", "cpu", "--peers", "3", "--upload", "10"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["device_peak"] == sum(made["device"].values())
    assert made["host_peak"] == sum(made["host"].values())
    assert made["experts"] == 4
    assert made["covering_peers"] == 2
    assert made["foreign_experts"] == "fp32"
    assert made["activation_checkpointing"] == "none"
    assert made["micro_batch_size"] == 8
    assert made["round_seconds"] == pytest.approx(8 * made["round_bytes"] / 1e7)
    assert command.main(["--device", "cpu"]) == 0
    assert "--micro-batch-size          8\n" in capsys.readouterr().out


def test_what_cannot_fit_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--memory", "1MB"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith("plan: training 4 experts needs at least ")
    assert command.main(["--host-memory", "100kB"]) == 2
    assert "of host memory" in capsys.readouterr().err
    assert command.main(["--experts", "9"]) == 2
    assert "expected 1 to 8 experts" in capsys.readouterr().err


@pytest.mark.parametrize(("storage", "layers_left"), [("host", 2), ("ranks", 2 / 4 + 2)])
def test_others_experts_that_are_elsewhere_do_not_count(storage: str, layers_left: float) -> None:
    run = eighth_of_2b()  # of two layers
    here = StepShape(
        num_held=1, foreign_experts="int8", precision="bf16", activation_checkpointing="none", on_gpu=True, num_ranks=4
    )
    model = SparseModel(build_empty_model(run.model.type, run.model.settings), [0], foreign_form="int8")
    layer = bytes_per_class(model)["foreign_parameters"] / 2
    on_device, elsewhere = (step_memory(run, replace(here, foreign_storage=kind), 1) for kind in ("device", storage))
    assert on_device.weights - elsewhere.weights == pytest.approx((2 - layers_left) * layer)
    assert elsewhere.temporary == on_device.temporary
