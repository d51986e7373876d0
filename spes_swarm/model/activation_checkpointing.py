"""Computes activations again in backward instead of keeping them, layer by layer.

`layers` keeps the input of each layer only, and its backward runs the whole layer once more: about a third more
arithmetic. `selective` keeps the results of matrix products and of attention, too, and repeats what is cheap: norms,
activation functions, softmaxes and casts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from spes_swarm.base.errors import ConfigError

_aten = torch.ops.aten
# What `selective` keeps: the operations that cost most to repeat. `mm.out` is not among them, because the kernel `loop`
# writes one group after the other into the same tensor, and torch refuses a kept tensor that has been written to.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._grouped_mm.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Switches activation checkpointing of a transformers model on: `kind` is "none", "layers" or "selective".

    Raises:
        ConfigError: transformers has no checkpointing for this architecture.
    """
    if kind == "none":
        return
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"activation_checkpointing: found {kind}, but transformers does not support it for "
            f"{type(model).__name__}; use none"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # transformers 5 renames the method on the way to 6.
    newer = hasattr(model, "activation_checkpointing_enable")
    enable: Any = getattr(model, "activation_checkpointing_enable" if newer else "gradient_checkpointing_enable")
    enable(options)


def _policy(_context: Any, operation: Any, *_arguments: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
