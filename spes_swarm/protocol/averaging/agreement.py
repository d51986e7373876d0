"""The mean of several contributions, in which none deviates much further from the common direction than most.

Centred clipping (Karimireddy, He and Jaggi 2021, "Learning from History for Byzantine Robust Optimization") around the
geometric median. The component along the median's direction is kept, so a fast member's longer difference counts in
full; the deviation from it is shortened to MAX_DEVIATION times the median deviation. A contribution of pure noise then
does no more harm than the noise in every honest one.

Shapes: M members that contribute to a part, N elements of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

import numpy as np
from numpy.typing import NDArray

from spes_swarm.base.arrays import FloatArray, pieces

# A contribution may deviate this many times as far from the common direction as the median one.
MAX_DEVIATION = 1.5
# Fewer contributions than this have no majority.
MIN_TO_AGREE = 3
_WEISZFELD_STEPS = 8
# Others repeat this on their machines, and a result that differs from theirs counts as a lie. So no choice of
# contributions may make it depend on the last bits. Inner products are added up in fp64, and what is divided by, or
# compared, is bounded below, relative to the contributions.
_LEAST_CENTRE = 1e-4
_LEAST_DEVIATION = 1e-6
# Members agree if the usual cosine between two of them is larger than this, and so many times larger than chance, which
# is about 1 / sqrt(N). From there to twice as much, opposition counts by degrees.
_AGREED, _BEYOND_CHANCE = 0.02, 4.0


@dataclass(frozen=True, slots=True)
class Agreement:
    """How much each contribution counts in the mean."""

    # The result is the linear combination of the contributions with these coefficients.
    coefficients_M: NDArray[np.float64]
    factors_M: NDArray[np.float64]  # the share of each member's deviation that is left; 1 if nothing was shortened
    cosine_MM: NDArray[np.float64]  # between contributions; none are compared if there are fewer than MIN_TO_AGREE
    energy_M: NDArray[np.float64]  # sums of squares of the contributions; 0 if none are compared
    num_elements: int

    @classmethod
    def of(
        cls, differences_MN: FloatArray, weights_M: Sequence[float], free_rms: float, stretch: float = 1.0
    ) -> Agreement:
        """Weighs the contributions of one part.

        Only inner products of contributions are needed, so the cost is that of one M x N by N x M matrix product.

        Args:
            differences_MN: finite.
            weights_M: positive.
            free_rms: RMS of a deviation that is never shortened.
            stretch: ratio of the usual length of contributions to that in this round, at least 1. If most members have
                only begun when a round is called, one that is further along deviates from them by more than they do.
        """
        num_members, num_elements = differences_MN.shape
        weights = np.asarray(weights_M, dtype=np.float64)
        weights /= weights.sum()
        ones_M = np.ones(num_members)
        if num_members < MIN_TO_AGREE:
            return cls.unbounded(weights_M, num_elements)
        gram_MM = _gram(differences_MN)
        if not gram_MM.any():
            return cls.unbounded(weights_M, num_elements)
        centre_M = _geometric_median(gram_MM)
        centre_energy = max(0.0, float(centre_M @ gram_MM @ centre_M))
        divisor = centre_energy + _LEAST_CENTRE**2 * median_low(np.diag(gram_MM).tolist())
        along_M = np.maximum(0.0, gram_MM @ centre_M) / divisor if divisor > 0 else 0 * ones_M
        deviation_M = np.sqrt(np.maximum(0.0, _distances_squared(gram_MM, centre_M, along_M)))
        length_M = np.maximum(1.0, along_M)
        allowed = MAX_DEVIATION * median_low((deviation_M / length_M).tolist())
        allowed = max(allowed, free_rms * math.sqrt(num_elements), _LEAST_DEVIATION * math.sqrt(centre_energy))
        # A member that deviates has not done more of the same work, whatever its length along the centre: its length
        # beyond `stretch` is shortened by the same factor f, and the deviation may be `allowed` per unit of the length
        # that is left: f * deviation = allowed * (stretch + (length - stretch) * f). Within bounds, f is 1.
        length_M = np.maximum(stretch, along_M)
        beyond_M = deviation_M - allowed * (length_M - stretch)
        factors_M = ones_M.copy()
        aside_M = beyond_M > allowed * stretch
        factors_M[aside_M] = allowed * stretch / beyond_M[aside_M]
        kept_M = np.minimum(along_M, stretch + (length_M - stretch) * factors_M)
        coefficients_M = weights * factors_M + (weights @ (kept_M - factors_M * along_M)) * centre_M
        return cls(coefficients_M, factors_M, _cosines(gram_MM), np.diag(gram_MM), num_elements)

    @classmethod
    def unbounded(cls, weights_M: Sequence[float], num_elements: int) -> Agreement:
        """The weighted mean of any contributions."""
        weights = np.asarray(weights_M, dtype=np.float64)
        ones_M = np.ones(len(weights))
        return cls(weights / weights.sum(), ones_M, np.eye(len(weights)), 0 * ones_M, num_elements)

    def opposition(self, own: int) -> list[float] | None:
        """How far each contribution points against those of most others, as the member with contribution `own` sees it.

        1 is as far as contributions usually point in the same direction; where they do not clearly do so, all get 0.
        None if its own one agrees with less than half of the others: then these may be the ones to be opposed.
        """
        if len(self.cosine_MM) < MIN_TO_AGREE:
            return None
        with_others_M = [median_high(row[:i] + row[i + 1 :]) for i, row in enumerate(self.cosine_MM.tolist())]
        usual = median_low(with_others_M)
        agreed = max(_AGREED, _BEYOND_CHANCE / math.sqrt(self.num_elements))
        if with_others_M[own] <= 0:
            return None
        if usual <= agreed:
            return [0.0] * len(with_others_M)
        against_M = -np.maximum(with_others_M, self.cosine_MM[own])  # those that point with its own one oppose nobody
        found: list[float] = (min(1.0, usual / agreed - 1) * np.clip(against_M / usual, 0, 1)).tolist()
        return found


def _gram(differences_MN: FloatArray) -> NDArray[np.float64]:
    """The inner products of the contributions; squares of fp32 values neither over- nor underflow in fp64."""
    num_members, num_elements = differences_MN.shape
    gram_MM = np.zeros((num_members, num_members))
    for where in pieces(num_elements):
        piece_MK = differences_MN[:, where].astype(np.float64)
        gram_MM += piece_MK @ piece_MK.T
    return gram_MM


def _distances_squared(
    gram_MM: NDArray[np.float64], centre_M: NDArray[np.float64], along_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Squared distance of each contribution from `along` times the centre."""
    dots_M = gram_MM @ centre_M
    result: NDArray[np.float64] = np.diag(gram_MM) - 2 * along_M * dots_M + along_M**2 * float(centre_M @ dots_M)
    return result


def _cosines(gram_MM: NDArray[np.float64]) -> NDArray[np.float64]:
    length_M = np.sqrt(np.diag(gram_MM))
    length_M[length_M == 0] = 1
    cosine_MM: NDArray[np.float64] = gram_MM / length_M / length_M[:, None]
    return cosine_MM


def _geometric_median(gram_MM: NDArray[np.float64]) -> NDArray[np.float64]:
    """The point with the least sum of distances, as a combination of the contributions (Weiszfeld's algorithm).

    Every member has one vote whatever its weight, and more than half of them decide where the median lies. Iteration
    begins at the mean of the directions, so that no contribution dominates by its length.
    """
    num_members = len(gram_MM)
    length_M = np.sqrt(np.diag(gram_MM))
    floor = 1e-6 * float(np.max(length_M))
    centre_M = 1.0 / np.maximum(length_M, floor)
    centre_M /= centre_M.sum()
    for _ in range(_WEISZFELD_STEPS):
        distance_M = np.sqrt(np.maximum(0.0, _distances_squared(gram_MM, centre_M, np.ones(num_members))))
        centre_M = 1.0 / np.maximum(distance_M, floor)
        centre_M /= centre_M.sum()
    return centre_M
