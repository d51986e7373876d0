"""The optimisers that a run can choose, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from spes_swarm.config.run import TrainingConfig
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.matrices import hidden_matrices
from spes_swarm.training.optimiser.muon import PeerMuon
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser

Groups = list[dict[str, Any]]


def make_optimiser(model: SparseModel, training: TrainingConfig, *, form: str = "device") -> PeerOptimiser:
    """Makes the optimiser of a run for a model; `form`, one of `moment_storage.FORMS`, says where the moments are.

    The model must be on its device. Pass the optimiser to `SparseModel.hold`.
    """
    return _OPTIMISERS[training.optimiser].make(model, training, form)


def matrix_moments(optimiser: str) -> tuple[str, ...]:
    """Returns the names of the moments of experts and hidden matrices; other weights have those of AdamW."""
    return _OPTIMISERS[optimiser].kind.expert_moments


def _adamw(model: SparseModel, training: TrainingConfig, form: str) -> PeerOptimiser:
    return PeerAdamW(
        model.param_groups(training.weight_decay, training.decay_norm_and_bias),
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        form=form,
    )


def _muon(model: SparseModel, training: TrainingConfig, form: str) -> PeerOptimiser:
    return PeerMuon(
        _muon_groups(model, training),
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_eps,
        form=form,
    )


def _muon_groups(model: SparseModel, training: TrainingConfig) -> Groups:
    """Returns the groups of AdamW, which have their own peak, and those of Muon."""
    names = hidden_matrices(model.module)
    fused, single = model.expert_stacks()
    single = [*single, *(parameter for name, parameter in model.module.named_parameters() if name in names)]
    of_muon: set[nn.Parameter] = {*fused, *single}
    ratio = (training.adamw_learning_rate or training.learning_rate) / training.learning_rate
    groups = model.param_groups(training.weight_decay, training.decay_norm_and_bias)
    for group in groups:
        group["params"] = [parameter for parameter in group["params"] if parameter not in of_muon]
        group["peak_ratio"] = ratio
    for parameters, matrices in ((fused, 2), (single, 1)):
        groups.append(
            {
                "params": parameters,
                "matrices": matrices,
                "momentum": training.muon_momentum,
                "weight_decay": training.weight_decay,
            }
        )
    return groups


@dataclass(frozen=True)
class _Entry:
    make: Callable[[SparseModel, TrainingConfig, str], PeerOptimiser]
    kind: type[PeerOptimiser]


_OPTIMISERS = {"adamw": _Entry(_adamw, PeerAdamW), "muon": _Entry(_muon, PeerMuon)}
