"""Others' experts in each place: the same bits as on the device, and the memory that each place promises."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import CapacityError
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.foreign.frozen_stack import FrozenStack
from spes_swarm.model.foreign.storage import DiskStorage, ForeignStorage, StagedStorage, foreign_bytes, new_storage
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model
from tests.helpers.small_disk import mounted_disk

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
        model.hold(held)
        for block in model.layout.blocks:
            model.write_block(block.index, rng.standard_normal(block.size, dtype=np.float32) * np.float32(0.1))
        model.module.train()
        model.module.zero_grad()
        for _ in range(2):  # micro-batches
            torch.autograd.backward(language_model_loss(model.module, ids, LossWeights(), held, 0.5).total)
        yield [p.grad for _, p in model.trainable_parameters() if p.grad is not None]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("form", "checkpointing"), [("fp32", "none"), ("bf16", "none"), ("int8", "layers"), ("int4", "selective")]
)
def test_gradients_are_those_of_the_device_bit_for_bit(
    tmp_path: Path, form: str, checkpointing: str, staged: bool
) -> None:
    """No outdated copies are used after weights and held experts have changed."""
    storage: ForeignStorage = DiskStorage(tmp_path)
    if staged:
        storage = StagedStorage(storage, CopiedAtOnce)
    elsewhere = steps(sparse(form, storage, checkpointing))
    for expected, found in zip(steps(sparse(form, None, checkpointing)), elsewhere, strict=True):
        assert len(found) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert list(tmp_path.iterdir()) == []


def test_the_model_moves_without_experts_that_are_elsewhere(tmp_path: Path) -> None:
    for storage, device in ((DiskStorage(tmp_path), "cpu"), (ForeignStorage(), "meta")):
        model = sparse("int8", storage)
        model.module.to("meta")
        experts = [module for module in model.module.modules() if isinstance(module, SparseExperts)]
        assert {buffer.device.type for module in experts for buffer in module.foreign.buffers()} == {device}
        assert {parameter.device.type for parameter in model.module.parameters()} == {"meta"}


def anonymous_bytes() -> int:
    # What other tests have freed may be resident still, and the next allocation would take it without a new page.
    ctypes.CDLL(None).malloc_trim(0)
    match = re.search(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


def test_files_take_no_anonymous_memory(tmp_path: Path) -> None:
    # Above 32 MiB, malloc always asks the kernel; less could come from what earlier tests have freed.
    shape, taken = (8, 1024, 2048), {}
    num_bytes = 4 * 8 * 1024 * 2048
    matrix = torch.ones(shape[1:])
    for name, storage in (("device", ForeignStorage()), ("disk", DiskStorage(tmp_path))):
        before = anonymous_bytes()
        stack = FrozenStack(shape, "fp32", CPU, storage)
        for index in range(shape[0]):
            stack.write(index, matrix)
        taken[name] = anonymous_bytes() - before
        assert float(stack.expand(torch.float32, slice(3, 4)).mean()) == 1.0
        del stack
    assert taken["device"] > 0.9 * num_bytes
    assert taken["disk"] < 0.1 * num_bytes


def test_files_have_no_names_and_free_their_space(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", 8 << 20) as disk:
        for _ in range(4):
            stack = FrozenStack((1, 1024, 1024), "fp32", CPU, DiskStorage(disk))
            assert list(disk.iterdir()) == []
            assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize < 5 << 20
            del stack


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    line = r"disk: 0\.0 GB for experts of other peers: No space left on device$"
    with mounted_disk(tmp_path / "disk", 1 << 20) as disk, pytest.raises(CapacityError, match=line):
        FrozenStack((4, 1024, 1024), "fp32", CPU, DiskStorage(disk))


@pytest.mark.parametrize(
    ("kind", "on_gpu", "expected"),
    [
        ("device", True, (1000, 0, 0)),
        ("device", False, (1000, 0, 0)),
        ("host", True, (200, 1000, 0)),
        ("host", False, (1000, 0, 0)),
        ("disk", True, (200, 0, 1000)),
        ("disk", False, (0, 0, 1000)),
    ],
)
def test_bytes_of_ten_layers(kind: str, on_gpu: bool, expected: tuple[int, int, int]) -> None:
    found = foreign_bytes(kind, 1000, 10, on_gpu=on_gpu)
    assert (found.on_device, found.on_host, found.on_disk) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("form", ["bf16", "int4"])
@pytest.mark.parametrize("checkpointing", ["none", "layers"])
def test_a_gpu_computes_the_same(tmp_path: Path, kind: str, form: str, checkpointing: str) -> None:
    device = torch.device("cuda")
    models = []
    for place in ("device", kind):
        model = sparse(form, new_storage(place, device, tmp_path), checkpointing)
        model.module.to(device)
        models.append(model)
    for expected, found in zip(*(steps(model, device) for model in models), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # a GPU's attention adds in any order
