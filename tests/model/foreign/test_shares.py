"""Others' experts divided among ranks that are models of this process: shares, gradients, and what rank 0 sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.experts import SparseExperts
from spes_swarm.model.foreign.frozen_stack import FORMS, FrozenStack, bytes_per_weight
from spes_swarm.model.foreign.shares import SharedStorage
from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "num_experts": 6,
    "intermediate_size": 16,
    "vocab_size": 50,
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class OneProcess:
    """Ranks that are models of the same process, and read each other's shares directly."""

    def __init__(self, rank: int, peers: list[SparseModel], world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._peers = peers
        self.gathered = 0

    def gather(self, own: Tensor) -> Tensor:
        self.gathered += 1
        mine = [buffer.data_ptr() for buffer in buffers(self._peers[self.rank])]
        place = mine.index(own.data_ptr())
        return torch.stack([buffers(peer)[place].view(torch.uint8) for peer in self._peers])


def experts_of(model: SparseModel) -> list[SparseExperts]:
    return [module for module in model.module.modules() if isinstance(module, SparseExperts)]


def buffers(model: SparseModel) -> list[Tensor]:
    return [buffer for experts in experts_of(model) for buffer in experts.foreign.buffers()]


def stacks_of(model: SparseModel) -> list[FrozenStack]:
    return [module for module in model.module.modules() if isinstance(module, FrozenStack)]


def models(form: str, world_size: int, checkpointing: str) -> tuple[SparseModel, list[SparseModel], list[OneProcess]]:
    """A model with all experts, and those of the ranks; what is written into rank 0's arrives at all of them."""
    ranks: list[SparseModel] = []
    links = [OneProcess(rank, ranks, world_size) for rank in range(world_size)]
    whole = SparseModel(build_model("olmoe", SETTINGS, 0, "cpu"), (1, 4), foreign_form=form)
    for link in links:
        model = SparseModel(build_model("olmoe", SETTINGS, 0, "cpu"), (1, 4), "torch", form, SharedStorage(link))
        ranks.append(model)
    for model in (whole, *ranks):
        checkpoint_activations(model.module, checkpointing)

    def publish(stack: torch.nn.Module, index: int, stored: tuple[Tensor, Tensor]) -> None:
        assert isinstance(stack, FrozenStack)
        place = stacks_of(ranks[0]).index(stack)
        for rank in ranks[1:]:
            stacks_of(rank)[place].put(index, *stored)

    storage = ranks[0].foreign_storage
    assert isinstance(storage, SharedStorage)
    storage.publish = publish
    return whole, ranks, links


def gradients(model: SparseModel) -> list[Tensor]:
    ids = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(1))
    model.module.train()
    model.module.zero_grad()
    torch.autograd.backward(language_model_loss(model.module, ids, LossWeights(), model.held, 0.5).total)
    return [p.grad for _, p in model.trainable_parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("form", "world_size", "checkpointing"),
    [("fp32", 2, "none"), ("bf16", 3, "selective"), ("int8", 2, "layers"), ("int4", 3, "none")],
)
def test_each_rank_computes_the_gradients_of_the_whole_model(form: str, world_size: int, checkpointing: str) -> None:
    """Bit for bit, after writes and changes of the held experts; 3 ranks do not divide 32 and 20 rows evenly."""
    whole, ranks, _ = models(form, world_size, checkpointing)
    rng = np.random.default_rng(0)
    for held in ((1, 4), (0, 4, 5), (2,)):
        for model in (whole, *ranks):
            model.hold(held)
        for block in whole.layout.blocks:
            values_N = rng.standard_normal(block.size, dtype=np.float32) * np.float32(0.1)
            is_trained = block in whole.layout.trained_blocks(held)
            for model in (whole, *(ranks if is_trained else ranks[:1])):
                model.write_block(block.index, values_N)
        expected = gradients(whole)
        for model in ranks:
            found = gradients(model)
            assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_each_rank_stores_its_share(form: str) -> None:
    whole, ranks, _ = models(form, 2, "none")
    expected = sum(buffer.nbytes for buffer in buffers(whole)) / 2
    for model in ranks:
        assert sum(buffer.nbytes for buffer in buffers(model)) == expected
    if form in ("fp32", "bf16"):
        assert 2 * expected == 2 * 4 * 3 * 16 * 20 * bytes_per_weight(form)


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("layers", 3), ("selective", 3)])
def test_all_ranks_make_the_same_gathers_for_any_routing(checkpointing: str, passes: int) -> None:
    """Also a rank whose tokens meet held experts only."""
    _, ranks, links = models("int8", 2, checkpointing)
    for name, parameter in ranks[1].trainable_parameters():
        if name.endswith("gate.weight"):
            parameter.data.zero_()  # all experts are equally good, and the same two are chosen for all tokens
    for model in ranks:
        gradients(model)  # the first call also examines the output head
    held = tuple(np.flatnonzero(ranks[1].pop_routed_tokens().sum(axis=0)).tolist())
    assert len(held) == 2
    for model, link in zip(ranks, links, strict=True):
        model.pop_routed_tokens()
        model.hold(held)
        link.gathered = 0
        gradients(model)
    tokens = [np.delete(model.pop_routed_tokens().sum(axis=0), held).sum() for model in ranks]
    assert tokens[0] > tokens[1] == 0
    buffers_per_layer = 4
    assert [link.gathered for link in links] == 2 * [2 * passes * buffers_per_layer]


def test_reading_a_share_as_an_expert_is_refused() -> None:
    _, ranks, _ = models("fp32", 2, "none")
    block = ranks[0].layout.expert_block(0)
    with pytest.raises(ValueError, match="only a share"):
        ranks[0].read_block(block.index, np.empty(block.size, dtype=np.float32))
    held = ranks[0].layout.expert_block(1)
    ranks[0].read_block(held.index, np.empty(held.size, dtype=np.float32))
