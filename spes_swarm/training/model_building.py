"""Builds the model that a peer trains, as its settings ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import ModelConfig
from spes_swarm.model.activation_checkpointing import checkpoint_activations
from spes_swarm.model.compilation import check_compiler, compile_layers
from spes_swarm.model.kernels import load_kernel
from spes_swarm.model.sparse_model import SparseModel, build_empty_model


def check_tools(peer: PeerConfig, device: torch.device) -> None:
    """Fails early if something is missing that building or running the model needs.

    Raises:
        ConfigError: the expert kernel is unknown or does not load, or there is no working compiler.
    """
    load_kernel(peer.kernel)
    if peer.compile:
        check_compiler(device)


def build_trained_model(
    model: ModelConfig, held: Sequence[int], peer: PeerConfig, foreign_experts: str, device: torch.device
) -> SparseModel:
    """Returns the model without its weights; no device ever holds the whole of it in fp32.

    Args:
        model: the run's.
        held: the experts that are trained.
        peer: the settings of this peer.
        foreign_experts: form of the other experts: one of `frozen_stack.FORMS`.
        device: where it is trained.

    Raises:
        ConfigError: the architecture does not support one of the settings.
    """
    sparse = SparseModel(build_empty_model(model.type, model.settings), held, peer.kernel, foreign_experts)
    checkpoint_activations(sparse.module, peer.activation_checkpointing)
    if peer.compile:
        compile_layers(sparse.module)
    sparse.module.to(device)
    return sparse
