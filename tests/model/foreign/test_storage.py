"""Others' experts in each place: the same bits as on the device, and the memory that each place promises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.foreign.storage import ForeignStorage, HostStorage, foreign_bytes, new_storage
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "num_experts": 6,
    "intermediate_size": 16,
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CPU = torch.device("cpu")


class CopiedAtOnce:
    """A copy as on a GPU, without one. Dropping it destroys its content, so a later use shows."""

    def __init__(self, sources: list[Tensor]) -> None:
        self.tensors = [source.clone() for source in sources]

    def ready(self) -> list[Tensor]:
        return self.tensors

    def drop(self) -> None:
        for tensor in self.tensors:
            tensor.fill_(77)

    def finish(self) -> None:
        pass


def sparse(form: str, storage: ForeignStorage | None, checkpointing: str = "none") -> SparseModel:
    model = SparseModel(build_model("olmoe", SETTINGS, 0, CPU), (1, 4), "torch", form, storage)
    checkpoint_activations(model.module, checkpointing)
    return model


def steps(model: SparseModel, device: torch.device = CPU) -> Iterator[list[Tensor]]:
    """Yields the gradients of steps, between which weights and held experts change as after a round."""
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1)).to(device)
    rng = np.random.default_rng(0)
    for held in ((1, 4), (0, 4, 5), (0, 1, 2, 3, 4, 5), (2,)):
        model.set_held(held)
        for block in model.layout.blocks:
            model.write_block(block.index, rng.standard_normal(block.size, dtype=np.float32) * np.float32(0.1))
        model.module.train()
        model.module.zero_grad()
        for _ in range(2):  # micro-batches
            torch.autograd.backward(language_model_loss(model.module, ids, LossWeights(), held, 0.5).total)
        yield [p.grad for _, p in model.trainable_parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("form", "checkpointing"), [("fp32", "none"), ("bf16", "none"), ("int8", "layers"), ("int4", "selective")]
)
def test_gradients_are_those_of_the_device_bit_for_bit(form: str, checkpointing: str) -> None:
    """No outdated copies are used after weights and held experts have changed."""
    elsewhere = steps(sparse(form, HostStorage(CopiedAtOnce), checkpointing))
    for expected, found in zip(steps(sparse(form, None, checkpointing)), elsewhere, strict=True):
        assert len(found) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_the_model_moves_without_experts_that_are_elsewhere() -> None:
    for storage, device in ((HostStorage(CopiedAtOnce), "cpu"), (ForeignStorage(), "meta")):
        model = sparse("int8", storage)
        model.module.to("meta")
        experts = [module for module in model.module.modules() if isinstance(module, SparseExperts)]
        assert {buffer.device.type for module in experts for buffer in module.foreign.buffers()} == {device}
        assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}


@pytest.mark.parametrize(("kind", "expected"), [("device", (1000, 0)), ("host", (200, 1000))])
def test_bytes_of_ten_layers(kind: str, expected: tuple[int, int]) -> None:
    found = foreign_bytes(kind, 1000, 10)
    assert (found.on_device, found.on_host) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("form", ["bf16", "int4"])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_a_gpu_computes_the_same(form: str, checkpointing: str) -> None:
    device = torch.device("cuda")
    models = []
    for place in ("device", "host"):
        model = sparse(form, new_storage(place, device), checkpointing)
        model.module.to(device)
        models.append(model)
    for expected, found in zip(*(steps(model, device) for model in models), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # a GPU's attention adds in any order
