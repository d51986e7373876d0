"""What rank 0 writes into others' experts arrives at another rank, which keeps its rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_swarm.base.errors import RankError
from spes_swarm.model.foreign.shares import SharedStorage
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.ranks import outbox as module
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Matrices, Order
from spes_swarm.training.ranks.outbox import Outbox, receive_matrices, stacks_of
from spes_swarm.training.ranks.placement import Placement
from tests.helpers.lone_trainer import HELD, run_config

torch.set_num_threads(1)


class Wire(RankGroup):
    """One rank's end of a line on which orders and their tensors lie until they are taken."""

    def __init__(self, rank: int, line: list[tuple[Order, list[Tensor]]]) -> None:
        super().__init__(Placement(rank=rank, world_size=2))
        self.line = line
        self.lost = False

    def send_order(self, order: Order) -> None:
        if self.lost:
            raise RankError("another rank of this peer has ended")
        self.line.append((order, []))

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        if self.rank == 0:
            self.line[-1][1].extend(tensors)
            return
        for target, source in zip(tensors, self.line[0][1], strict=True):
            target.copy_(source)


def model_of(wire: Wire | None) -> SparseModel:
    settings = run_config().model.settings
    storage = None if wire is None else SharedStorage(wire)
    return SparseModel(build_model("olmoe", settings, 0, "cpu"), HELD, "torch", "int8", storage)


def pair(monkeypatch: pytest.MonkeyPatch, full_bytes: int) -> tuple[Wire, Wire, SparseModel, SparseModel]:
    monkeypatch.setattr(module, "_FULL_BYTES", full_bytes)
    sender, receiver = Wire(0, []), Wire(1, [])
    receiver.line = sender.line
    first, second = model_of(sender), model_of(receiver)
    out, storage = Outbox(sender, first), first.foreign_storage
    assert isinstance(storage, SharedStorage)
    storage.publish, storage.flush = out.add, out.flush
    return sender, receiver, first, second


@pytest.mark.parametrize("full_bytes", [1, 20_000, 1 << 30])
def test_matrices_arrive_before_the_held_experts_change(monkeypatch: pytest.MonkeyPatch, full_bytes: int) -> None:
    sender, receiver, first, second = pair(monkeypatch, full_bytes)
    whole, rng = model_of(None), np.random.default_rng(0)
    for held, written in ((HELD, range(8)), ((2, 4), (1, 3)), ((2, 4), (0,))):
        for model in (whole, first):
            model.hold(held)
        for expert in written:
            block = whole.layout.expert_block(expert)
            values_N = rng.standard_normal(block.size, dtype=np.float32)
            for model in (whole, first):
                model.write_block(block.index, values_N)
            values_N[:] = 0.0  # the caller may overwrite its memory
    storage = first.foreign_storage
    assert isinstance(storage, SharedStorage)
    assert storage.flush is not None
    storage.flush()
    assert (len(sender.line) == 2) == (full_bytes == 1 << 30)
    while receiver.line:
        order = receiver.line[0][0]
        assert isinstance(order, Matrices)
        receive_matrices(receiver, second, order)
        receiver.line.pop(0)
    for rank, model in enumerate((first, second)):
        for expected, found in zip(stacks_of(whole), stacks_of(model), strict=True):
            share = slice(rank * expected.shape[1] // 2, (rank + 1) * expected.shape[1] // 2)
            assert torch.equal(found.values, expected.values[:, share])
            assert torch.equal(found.scales, expected.scales[:, share])


def test_writes_after_a_rank_has_ended_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer still commits its last round and writes a checkpoint."""
    sender, _, first, _ = pair(monkeypatch, 1)
    sender.lost = True
    block = first.layout.expert_block(0)
    first.write_block(block.index, np.ones(block.size, dtype=np.float32))
    assert sender.line == []
