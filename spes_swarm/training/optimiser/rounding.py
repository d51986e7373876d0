"""Rounds tensors to 8 bits, each block of elements with its own scale.

Tensor suffixes: N elements, B blocks, W elements of a block.

A code c stands for `scale * (c / largest) ** power`: small numbers are rounded more finely than large ones of the same
block. Codes are rounded up or down at random, such that the expected value is the number itself. Moments change by a
few percent per step, which is often less than half of the gap between two codes: rounding to the nearest one would undo
such changes, and the first moment of a token that no longer occurs would never vanish.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# Rows of embeddings can differ by orders of magnitude; a block of this size lies in one row of most models.
BLOCK_ELEMENTS = 128
# The largest element of a block is exact. With fewer bits a slow decay would be rounded away.
SCALE_DTYPE = torch.float32


def num_blocks(num_elements: int) -> int:
    """Returns the number of blocks, of which the last may be partial."""
    return -(-num_elements // BLOCK_ELEMENTS)


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """A map between numbers and codes of 8 bits."""

    dtype: torch.dtype
    largest: int  # code
    squarings: int  # the power is 2 ** squarings
    # A positive number is never rounded to zero.
    positive: bool

    def encode(self, values_N: Tensor, noise_N: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the codes (N,) and scales (B,) of fp32 numbers.

        `noise_N` is uniform in [0, 1). Without it, numbers are rounded to the nearest code: those of `decode` get
        their codes back.
        """
        values_BW = _in_blocks(values_N)
        noise_BW = 0.5 if noise_N is None else _in_blocks(noise_N)
        magnitudes_BW = values_BW.abs()
        scales_B = magnitudes_BW.amax(dim=-1)
        # All codes of a block of zeros are zero.
        magnitudes_BW.div_(scales_B.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1))
        codes_BW = magnitudes_BW
        for _ in range(self.squarings):
            codes_BW = codes_BW.sqrt_()
        codes_BW.mul_(self.largest)
        below_BW = codes_BW.floor()
        # The probability of rounding up is the share of the gap between two codes' numbers that is below the number.
        low_BW, high_BW = self._power(below_BW), self._power(below_BW + 1)
        up_BW = self._power(codes_BW).sub_(low_BW) > high_BW.sub_(low_BW).mul_(noise_BW)
        codes_BW = below_BW.add_(up_BW).clamp_max_(self.largest)
        if self.positive:
            codes_BW = torch.where(values_BW > 0, codes_BW.clamp_min(1), codes_BW)
        else:
            codes_BW.copysign_(values_BW)
        return codes_BW.to(self.dtype).view(-1)[: len(values_N)], scales_B

    def decode(self, codes_N: Tensor, scales_B: Tensor) -> Tensor:
        """Returns the fp32 numbers (N,)."""
        codes_BW = _in_blocks(codes_N).to(torch.float32).div_(self.largest)
        signs_BW = None if self.positive else codes_BW.sign()
        for _ in range(self.squarings):
            codes_BW.square_()
        codes_BW.mul_(scales_B.unsqueeze(-1))
        if signs_BW is not None:
            codes_BW.mul_(signs_BW)
        return codes_BW.view(-1)[: len(codes_N)]

    def _power(self, codes: Tensor) -> Tensor:
        for _ in range(self.squarings):
            codes = codes.square()
        return codes


def _in_blocks(values_N: Tensor) -> Tensor:
    padding = -len(values_N) % BLOCK_ELEMENTS
    return (functional.pad(values_N, (0, padding)) if padding else values_N).view(-1, BLOCK_ELEMENTS)


# Second moments span twice as many orders of magnitude as first ones, and AdamW divides by their square root.
FIRST_MOMENT = Rounding(dtype=torch.int8, largest=127, squarings=1, positive=False)
SECOND_MOMENT = Rounding(dtype=torch.uint8, largest=255, squarings=2, positive=True)
