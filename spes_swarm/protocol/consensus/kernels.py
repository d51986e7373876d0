"""Kernels of the codecs that numpy has only one element at a time: torch's, where torch is loaded anyway.

Both give the same bits, since all of these are exact or rounded once, half to even.

Shapes: N elements, in B blocks of K.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spes_swarm.base.arrays import FloatArray

HalfArray = NDArray[np.float16]


def use_one_thread() -> None:
    """Has torch compute in the thread that calls it: its pool of threads does not survive a fork."""
    if (torch := _torch()) is not None:
        torch.set_num_threads(1)


def to_half(values_N: FloatArray) -> HalfArray:
    """Rounds to fp16; what is too large becomes infinite."""
    if (torch := _torch_for(values_N)) is not None:
        halves_N: HalfArray = torch.from_numpy(values_N).to(torch.float16).numpy()
        return halves_N
    with np.errstate(over="ignore"):
        return values_N.astype(np.float16)


def from_half(halves_N: HalfArray, out_N: FloatArray) -> None:
    """Writes the same values in fp32."""
    if (torch := _torch()) is None:
        out_N[:] = halves_N
    else:
        torch.from_numpy(out_N).copy_(torch.from_numpy(halves_N.copy()))


def extremes(values_BK: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The largest and the smallest value of each block; NaN if there is one in it."""
    if (torch := _torch_for(values_BK)) is None:
        return values_BK.max(axis=1), values_BK.min(axis=1)
    blocks = torch.from_numpy(values_BK)
    return blocks.amax(1).numpy(), blocks.amin(1).numpy()


def _torch_for(values: FloatArray) -> Any:
    """`_torch`, unless it would warn of memory that cannot be written, such as a message's."""
    return _torch() if values.flags.writeable else None


def _torch() -> Any:
    """torch, if it has been imported; to import it takes seconds, and not all who decode train."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "from_numpy") else None
