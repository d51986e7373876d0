"""Where the moments of an optimiser are stored, and how many elements a step treats at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

# By their names in torch.
MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's first and second
MOMENTUM = ("momentum_buffer",)  # Muon's only one
FORMS = ("device", "host")
# Moments in host memory pass through copies on the device of so many elements at a time: few enough for a CPU's cache,
# or enough for a GPU to be busy.
_PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 20}
# Elements of equal matrices that Muon multiplies at a time; a larger matrix is multiplied alone.
_BATCH_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 23}


def pieces(start: int, stop: int, device: torch.device) -> Iterator[slice]:
    """Cuts a range of a parameter's elements into what a step of that device moves at a time."""
    size = _PIECE_ELEMENTS.get(device.type, _PIECE_ELEMENTS["cuda"])
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


def batch_elements(device: torch.device) -> int:
    """Returns how many elements of equal matrices Muon multiplies at a time, unless one matrix has more."""
    return _BATCH_ELEMENTS.get(device.type, _BATCH_ELEMENTS["cuda"])
