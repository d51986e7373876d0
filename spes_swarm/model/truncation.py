"""Truncates the normal distribution of initial weights.

OLMo, from which the authors' code of SPES derives, cuts its initial weights off at three standard deviations
(`init_cutoff_factor`); transformers does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Elements compared at a time (64 MiB of fp32).
_CHUNK_ELEMENTS = 2**24


@torch.no_grad()
def redraw_tails(parameters: Iterable[Tensor], std: float, cutoff: float) -> None:
    """Draws all entries of matrices beyond `cutoff * std` again, in place, until none is left.

    The entries then follow N(0, std) truncated at +- `cutoff * std`, if they followed N(0, std) before. Vectors (norms,
    biases) are constants and stay. Draws come from the global random state of the CPU: equal states and parameters
    give equal bits.

    Args:
        parameters: contiguous, on the CPU.
        std: above 0.
        cutoff: standard deviations; at least 1, so that few draws are repeated.
    """
    limit = cutoff * std
    for parameter in parameters:
        if parameter.dim() < 2:
            continue
        for chunk_C in torch.split(parameter.view(-1), _CHUNK_ELEMENTS):
            beyond_R = (chunk_C.abs() > limit).nonzero().squeeze(1)
            while len(beyond_R):
                drawn_R = torch.empty(len(beyond_R), dtype=parameter.dtype).normal_(0.0, std)
                chunk_C[beyond_R] = drawn_R
                beyond_R = beyond_R[drawn_R.abs() > limit]
