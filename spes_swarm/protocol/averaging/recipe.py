"""How the result of a part follows from its contributions, so that anybody can repeat a reducer's work.

All members of a group derive the same recipe from the plan. A reducer signs its digest with each result, so a proof
needs neither the plan nor the statements behind it.

Shapes: M contributions to a part, N elements of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgpack
import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.base.errors import ConfigError, ProtocolError
from spes_swarm.protocol.averaging.agreement import Agreement
from spes_swarm.protocol.averaging.commitments import digest
from spes_swarm.protocol.consensus.codec import get_codec

# How far a result may be from the mean of its contributions, relative to it: the last bits of sums and products differ
# between machines.
TOLERANCE = 1e-3
_ENERGY_TOLERANCE = 1.001
_MAX_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """One contribution in an average."""

    peer_id: str
    weight: float
    scale: float  # the factor by which the difference is multiplied
    most_energy: float  # the largest sum of squares that the difference may have; infinite: any


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one result follows from the contributions that it includes, which are differences to the base."""

    part: int
    num_elements: int
    codec: str  # of the contributions
    result_codec: str
    free_rms: float  # see Agreement.of; infinite: no deviation is shortened
    stretch: float
    shares: tuple[Share, ...]

    @property
    def wire(self) -> bytes:
        """Its encoding, the same at all members."""
        shares = [[s.peer_id, s.weight, s.scale, s.most_energy] for s in self.shares]
        codecs = self.codec, self.result_codec
        content = [self.part, self.num_elements, *codecs, self.free_rms, self.stretch, shares]
        return bytes(msgpack.packb(content, use_bin_type=True))

    @property
    def digest(self) -> bytes:
        """Digest of `wire`."""
        return digest(self.wire)

    @classmethod
    def from_content(cls, content: Any) -> Self:
        """Reads the decoded `wire`.

        Raises:
            ProtocolError: (`malformed`) it is not a recipe.
        """
        match content:
            case [int(part), int(size), str(codec), str(result_codec), float(free_rms), float(stretch), list(shares)]:
                read = cls(part, size, codec, result_codec, free_rms, stretch, tuple(map(_share_of, shares)))
                if _is_plausible(read):
                    return read
        raise ProtocolError("malformed", "not a recipe of an average")


def _share_of(content: Any) -> Share:
    match content:
        case [str(peer_id), float(weight), float(scale), float(most_energy)]:
            return Share(peer_id, weight, scale, most_energy)
    raise ProtocolError("malformed", "not a share of an average")


def _is_plausible(recipe: Recipe) -> bool:
    try:
        get_codec(recipe.codec), get_codec(recipe.result_codec)
    except ConfigError:
        return False
    return (
        0 < recipe.num_elements <= _MAX_ELEMENTS
        and 0 <= recipe.part < 1 << 32
        and recipe.free_rms >= 0
        and 1 <= recipe.stretch < math.inf
        and len(recipe.shares) > 0
        and all(0 < s.weight < math.inf and 0 < s.scale <= 1 and s.most_energy >= 0 for s in recipe.shares)
    )


def mean(
    differences: Sequence[FloatArray], weights: Sequence[float], free_rms: float, stretch: float
) -> tuple[FloatArray, list[float]]:
    """The weighted mean (N,) of M differences (N,), with deviations from the common direction clipped.

    Returns:
        The mean, and the share of each member's deviation that is left.
    """
    weights_M = np.asarray(weights, dtype=np.float64)
    coefficients_M, factors = weights_M / weights_M.sum(), [1.0] * len(differences)
    if math.isfinite(free_rms):
        agreement = Agreement.of(np.stack(differences), list(weights), free_rms, stretch)
        coefficients_M, factors = agreement.coefficients_M, agreement.factors_M.tolist()
    mean_N = np.zeros(len(differences[0]), dtype=np.float64)
    for coefficient, difference_N in zip(coefficients_M.tolist(), differences, strict=True):
        mean_N += coefficient * difference_N.astype(np.float64)
    return mean_N.astype(np.float32), factors


def fault_of(recipe: Recipe, result: bytes, contributions: Sequence[bytes]) -> str | None:
    """What is wrong with a result, given its contributions in the order of the recipe's shares; None if nothing is.

    All are encoded. A result is right if it is as near to the mean as its codec can be: to be near to what another
    machine encodes would not do, since a coarse codec rounds equal values apart if they differ in their last bits.

    Raises:
        ProtocolError: (`shape`, `nonfinite`) a contribution cannot be decoded or overflows, so nothing follows about
            the result.
    """
    with np.errstate(all="ignore"):
        return _fault_of(recipe, result, contributions)


def _fault_of(recipe: Recipe, result: bytes, contributions: Sequence[bytes]) -> str | None:
    codec, size = get_codec(recipe.codec), recipe.num_elements
    differences = []
    for share, contribution in zip(recipe.shares, contributions, strict=True):
        difference_N = codec.decode(contribution, size)
        if sum_of_squares(difference_N) > _ENERGY_TOLERANCE * share.most_energy:
            return f"the contribution of {share.peer_id} is longer than stated"
        differences.append(difference_N * np.float32(share.scale) if share.scale < 1 else difference_N)
    mean_N, _ = mean(differences, [share.weight for share in recipe.shares], recipe.free_rms, recipe.stretch)
    length = sum_of_squares(mean_N)
    if not math.isfinite(length):
        raise ProtocolError("nonfinite", "the mean of the contributions overflows")
    result_codec = get_codec(recipe.result_codec)
    try:
        claimed_N = result_codec.decode(result, size)
    except ProtocolError as exc:
        return f"the result cannot be decoded: {exc}"
    nearest_N = result_codec.decode(result_codec.encode(mean_N), size)
    excess_N = np.abs(claimed_N - mean_N) - np.abs(nearest_N - mean_N)
    away = sum_of_squares(np.maximum(excess_N, 0))
    if away <= TOLERANCE**2 * length:
        return None
    by = f"by {math.sqrt(away / length):.3g} of its length" if length > 0 else "although that is zero"
    return f"the result differs from the mean of its contributions {by}"
