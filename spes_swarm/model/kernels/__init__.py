"""Expert kernels by name; see `products` for what a kernel is."""

from spes_swarm.model.kernels.products import (
    Dispatch,
    ExpertKernel,
    Groups,
    LoopKernel,
    SortedChoices,
    TorchKernel,
    grouped_mm_applies,
)
from spes_swarm.model.kernels.registry import KERNELS, load_kernel

__all__ = [
    "KERNELS",
    "Dispatch",
    "ExpertKernel",
    "Groups",
    "LoopKernel",
    "SortedChoices",
    "TorchKernel",
    "grouped_mm_applies",
    "load_kernel",
]
