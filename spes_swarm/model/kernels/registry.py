"""The expert kernels that a peer can name."""

from __future__ import annotations

from collections.abc import Callable

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.kernels.megablocks import load_megablocks
from spes_swarm.model.kernels.products import ExpertKernel, LoopKernel, TorchKernel

KERNELS: dict[str, Callable[[], ExpertKernel]] = {
    "torch": TorchKernel,
    "loop": LoopKernel,
    "megablocks": load_megablocks,
}


def load_kernel(name: str) -> ExpertKernel:
    """Returns the kernel called `name`.

    Raises:
        ConfigError: the kernel is unknown, or something it needs is missing or does not load.
    """
    if name not in KERNELS:
        raise ConfigError(f"unknown expert kernel {name!r}; known: {', '.join(KERNELS)}")
    return KERNELS[name]()
