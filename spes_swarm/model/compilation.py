"""Compiles the decoder layers of a transformers model with `torch.compile`.

A layer's MoE block runs as it is: its shapes depend on the routing, and transformers records the router's logits inside
it. What comes before and after is compiled, once for all layers of a class, and again for every new shape of a batch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.experts import SparseExperts


def check_compiler(device: torch.device) -> None:
    """Compiles a trivial function, which takes seconds, because compilers can fail in many ways.

    Raises:
        ConfigError: `torch.compile` does not work for this device.
    """
    if (missing := _missing_tool(device)) is not None:
        raise ConfigError(f"compile: found true, but torch.compile needs {missing}; install it, or use false")
    try:
        torch.compile(_increment, dynamic=False)(torch.zeros(8, device=device))
    except Exception as exc:
        reason = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise ConfigError(f"compile: found true, but torch.compile fails on this machine: {reason}; use false") from exc


def _increment(x: Tensor) -> Tensor:
    return x + 1


def _missing_tool(device: torch.device) -> str | None:
    """Returns what torch's compiler calls and this machine lacks, or None."""
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "the package triton, which is not installed"
        names, kind = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], "a C compiler"
    else:
        names, kind = [os.environ.get("CXX", "g++")], "a C++ compiler"
    if any(shutil.which(name) for name in names):
        return None
    return f"{kind}, and {' or '.join(names)} is not installed"


def compile_layers(model: nn.Module) -> None:
    """Compiles the decoder layers of a model with `SparseExperts` in place, when they are first called.

    Activation checkpointing wraps the compiled code. `selective` does not see the products inside compiled code, so
    those are recomputed; those of the MoE block are kept as before.

    Raises:
        ConfigError: transformers' class of the layers is not one that can be compiled here.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"compile: found true, but the layers of {type(model).__name__} are not supported; use false")
    for module in model.modules():
        if any(isinstance(child, SparseExperts) for child in module.children()):
            block: Any = module
            block.forward = torch.compiler.disable(block.forward)  # type: ignore[no-untyped-call]
    compiled: dict[type, type] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = _compiled_class(kind)
        layer.__class__ = compiled[kind]


def _compiled_class(kind: type) -> type:
    """Returns a subclass whose forward pass is compiled.

    `GradientCheckpointingLayer` adds checkpointing to the `forward` of each subclass. The subclass gets the function
    without it, and has it added again.
    """
    forward: Any = getattr(kind, "forward")  # noqa: B009  # mypy knows of no forward
    plain = getattr(forward, "__wrapped__", forward)
    return type(kind.__name__, (kind,), {"forward": torch.compile(plain, dynamic=False)})
