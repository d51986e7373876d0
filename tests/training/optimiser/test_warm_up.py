"""The warm-up of adopted experts, against AdamW itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.warm_up import WarmUp
from tests.helpers.swarm import TINY_RUN


def model(held: Sequence[int]) -> SparseModel:
    return SparseModel(build_model("olmoe", TINY_RUN["model"]["settings"], 0, "cpu"), held)


def optimiser(of: SparseModel) -> PeerAdamW:
    return PeerAdamW(of.param_groups(0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)


def test_adopted_experts_warm_up_and_nothing_else_is_touched() -> None:
    warm, plain = model([0, 5]), model([0, 5])
    warm_up = WarmUp(4)
    warm_up.start([5])
    warm_adamw, plain_adamw = optimiser(warm), optimiser(plain)
    for number in range(1, 7):
        # Both begin each step from the same place, so the steps can be compared.
        for (_, a), (_, b) in zip(warm.trainable_parameters(), plain.trainable_parameters(), strict=True):
            with torch.no_grad():
                b.copy_(a)
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(number))
            b.grad = a.grad.clone()
        before = {name: p.detach().clone() for name, p in plain.trainable_parameters()}
        plain_adamw.step()
        warm_up.step(warm, warm_adamw.step)
        share = min(1.0, number / 5)
        for (name, a), (_, b) in zip(warm.trainable_parameters(), plain.trainable_parameters(), strict=True):
            expected = b.detach().clone()
            if "experts" in name:
                row = warm.held.index(5)
                expected[row] = before[name][row] + share * (b.detach()[row] - before[name][row])
            torch.testing.assert_close(a.detach(), expected, rtol=0, atol=1e-6)
