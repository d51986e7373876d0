"""Training goes on from saved optimiser state exactly as it would have without the interruption."""

from __future__ import annotations

import copy

import torch
from torch import nn

from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.saved_state import load_optimiser_arrays, optimiser_arrays


def adamw(model: nn.Module) -> PeerAdamW:
    return PeerAdamW([{"params": list(model.parameters())}], lr=0.1, betas=(0.9, 0.95), eps=1e-8)


def train_step(model: nn.Module, optimiser: PeerAdamW) -> None:
    optimiser.zero_grad()
    torch.autograd.backward(model(torch.arange(6.0).view(2, 3)).square().sum())
    optimiser.step()


def test_a_restored_optimiser_continues_bit_for_bit() -> None:
    model = nn.Linear(3, 4)
    optimiser = adamw(model)
    train_step(model, optimiser)
    train_step(model, optimiser)
    names = {f"{name}/{key}" for name in ("weight", "bias") for key in ("step", "exp_avg", "exp_avg_sq")}
    arrays = optimiser_arrays(optimiser, dict(model.named_parameters()))
    assert arrays.keys() == names
    again = copy.deepcopy(model)
    restored = adamw(again)
    load_optimiser_arrays(restored, dict(again.named_parameters()), arrays)
    train_step(model, optimiser)
    train_step(again, restored)
    for left, right in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(left, right)


def test_what_was_never_stepped_has_no_state() -> None:
    model = nn.Linear(3, 4)
    optimiser = adamw(model)
    parameters = dict(model.named_parameters())
    assert optimiser_arrays(optimiser, parameters) == {}
    load_optimiser_arrays(optimiser, parameters, {})
    assert not optimiser.state
