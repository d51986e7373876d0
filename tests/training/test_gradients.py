"""Gradients of a batch in parts: the same as of the whole, and smaller parts where memory runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from spes_swarm.model.losses import LossWeights, language_model_loss
from spes_swarm.model.sparse_model import SparseModel, build_model
from spes_swarm.training import gradients
from spes_swarm.training.gradients import Gradients

torch.set_num_threads(1)

SETTINGS: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# The load balance depends on the split, as the module says.
WITHOUT_BALANCE = LossWeights(load_balance=0.0, router_z=0.25, logit_z=0.125)
HELD = (1, 4)


def batch(sequences: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, 50, (sequences, 16))


def make(micro_batch_size: int, weights: LossWeights = WITHOUT_BALANCE) -> tuple[SparseModel, Gradients, list[str]]:
    model = SparseModel(build_model("olmoe", SETTINGS, seed=0, device="cpu"), HELD)
    said: list[str] = []
    own = Gradients(
        model,
        weights,
        micro_batch_size,
        device=torch.device("cpu"),
        autocast=contextlib.nullcontext,
        warn=lambda kind, text: said.append(f"{kind}: {text}"),
    )
    return model, own, said


def gradients_of(model: SparseModel) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.trainable_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def assert_same(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_parts_of_any_size_give_the_gradients_of_the_whole(size: int) -> None:
    whole, compute, _ = make(7)
    loss = compute.compute(batch(7), 0.5)
    parts, compute_parts, said = make(size)
    assert compute_parts.compute(batch(7), 0.5) == pytest.approx(loss, rel=1e-6)
    assert_same(gradients_of(parts), gradients_of(whole))
    assert parts.pop_routed_tokens().tolist() == whole.pop_routed_tokens().tolist()
    assert said == []


def test_the_load_balance_is_that_of_each_part() -> None:
    weights = LossWeights(load_balance=0.5, router_z=0.0, logit_z=0.0)
    parts, compute, _ = make(2, weights)
    compute.compute(batch(4), 0.5)
    expected: dict[str, Tensor] = {}
    for rows in (slice(0, 2), slice(2, 4)):
        alone, compute_alone, _ = make(2, weights)
        compute_alone.compute(batch(4)[rows], 0.5)
        for name, gradient in gradients_of(alone).items():
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient / 2
    assert_same(gradients_of(parts), expected)


def test_gradients_of_the_last_step_are_forgotten() -> None:
    model, compute, _ = make(2)
    compute.compute(batch(4), 0.5)
    first = {name: gradient.clone() for name, gradient in gradients_of(model).items()}
    compute.compute(batch(4), 0.5)
    assert_same(gradients_of(model), first)


def starve(monkeypatch: pytest.MonkeyPatch, fits: Callable[[int], bool]) -> list[int]:
    """Makes the loss of more sequences than fit fail as torch does; returns the sizes that were tried."""
    original, tried = language_model_loss, list[int]()

    def starved(model: Any, ids: Tensor, *rest: Any, **more: Any) -> Any:
        tried.append(len(ids))
        losses = original(model, ids, *rest, **more)  # it fails after tokens were counted
        if not fits(len(ids)):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return losses

    monkeypatch.setattr(gradients, "language_model_loss", starved)
    return tried


def test_parts_that_do_not_fit_are_halved_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, compute, _ = make(10)
    compute.compute(batch(10), 0.5)
    tried = starve(monkeypatch, lambda size: size <= 3)
    parts, compute_parts, said = make(10)
    compute_parts.compute(batch(10), 0.5)
    assert tried == [10, 5, 2, 2, 2, 2, 2]
    assert_same(gradients_of(parts), gradients_of(whole))
    assert parts.pop_routed_tokens().tolist() == whole.pop_routed_tokens().tolist(), "failed attempts do not count"
    assert said == [
        "memory: 10 sequences at a time do not fit into memory: trying 5",
        "memory: 5 sequences at a time do not fit into memory: trying 2",
    ]
    compute_parts.compute(batch(10), 0.5)
    assert tried[7:] == [2, 2, 2, 2, 2]


def test_a_single_sequence_that_does_not_fit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = starve(monkeypatch, lambda size: False)
    with pytest.raises(torch.OutOfMemoryError):
        make(2)[1].compute(batch(2), 0.5)
    assert tried == [2, 1]


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(gradients, "language_model_loss", broken)
    with pytest.raises(RuntimeError, match="shapes differ"):
        make(2)[1].compute(batch(2), 0.5)


def with_context(sequences: int) -> npt.NDArray[np.int64]:
    """A batch in which few tokens are targets: many of some sequences, none of the second."""
    ids_BS = batch(sequences)
    is_target_BS = np.random.default_rng(1).random(ids_BS.shape) < np.linspace(0.1, 0.9, sequences)[:, None]
    is_target_BS[1] = False
    return np.where(is_target_BS, ids_BS, ~ids_BS)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_parts_with_unequal_numbers_of_targets_give_the_gradients_of_the_whole(size: int) -> None:
    whole, compute, _ = make(7)
    loss = compute.compute(with_context(7), 0.5)
    parts, compute_parts, _ = make(size)
    assert compute_parts.compute(with_context(7), 0.5) == pytest.approx(loss, rel=1e-6)
    assert_same(gradients_of(parts), gradients_of(whole))


def test_shares_with_unequal_numbers_of_targets_add_up() -> None:
    """As those of the ranks of a peer: each divides by the targets of the whole batch."""
    whole, compute, _ = make(7)
    loss = compute.compute(with_context(7), 0.5)
    total, losses = {name: torch.zeros_like(g) for name, g in gradients_of(whole).items()}, 0.0
    for share in (slice(0, 2), slice(2, 3), slice(3, None)):
        rank, compute_share, _ = make(2)
        losses += compute_share.compute(with_context(7), 0.5, share)
        for name, gradient in gradients_of(rank).items():
            total[name] += gradient
    assert losses == pytest.approx(loss, rel=1e-6)
    assert_same(total, gradients_of(whole))


def test_targets_alone_count_as_with_the_labels_of_transformers() -> None:
    samples_BS = with_context(5)
    ours, compute, _ = make(2, LossWeights(load_balance=0.0, router_z=0.0, logit_z=0.0))
    loss = compute.compute(samples_BS, 0.5)
    theirs, _, _ = make(2)
    ids_BS = torch.from_numpy(np.where(samples_BS < 0, -1 - samples_BS, samples_BS))
    labels_BS = torch.from_numpy(np.where(samples_BS < 0, -100, samples_BS))
    expected = theirs.module(input_ids=ids_BS, labels=labels_BS).loss
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert_same(gradients_of(ours), gradients_of(theirs))


def test_a_batch_without_a_target_has_no_loss() -> None:
    model, compute, _ = make(2, LossWeights(load_balance=0.0, router_z=0.0, logit_z=0.125))
    assert compute.compute(~batch(3), 0.5) == 0.0
    assert all(not gradient.any() for gradient in gradients_of(model).values())
