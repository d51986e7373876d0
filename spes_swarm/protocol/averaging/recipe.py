"""How the result of a part follows from its contributions, so that anybody can repeat a reducer's work.

All members of a group derive the same recipe from the plan. A reducer signs its digest with each result, so a proof
needs neither the plan nor the statements behind it. The recipe names the key of each contributor: a peer can certify
any number of keys, and a contribution that one of them has signed is not signed by the others.

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
from spes_swarm.protocol.averaging.commitments import KEY_BYTES, digest
from spes_swarm.protocol.consensus.codec import Codec, get_codec

# How far a result may be from the mean of its contributions, relative to it: the last bits of sums and products differ
# between machines.
TOLERANCE = 1e-3
# Relative to the contributions, which are longer if they cancel out: a contributor that knows the others' could make
# the mean arbitrarily short.
_ROUNDING = 1e-5
_TINY_RMS = 1e-30  # fp32 has fewer bits below 1e-38
_HUGE = 1e38  # beyond this, an encoding may overflow on one machine and not on another
# A value halfway between two codes is rounded up on one machine and down on another, and in small blocks the scale
# follows. So the mean is moved by this share of its distance to the result, before the two are compared.
_TOWARDS_RESULT = 3e-4
_ENERGY_TOLERANCE = 1.001  # for the reducer, 1: no contribution passes there and fails here
_MAX_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Share:
    """One contribution in an average."""

    peer_id: str
    key: bytes  # public; that of its statement, with which it signs what it sends in the exchange
    weight: float
    scale: float  # the factor by which the difference is multiplied
    most_energy: float  # the largest sum of squares that the difference may have; infinite: any
    full: bool  # its values are no difference: the result cannot be judged without the base that they are relative to


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one result follows from the contributions that it includes."""

    part: int
    num_elements: int
    codec: str  # of the contributions
    result_codec: str
    free_rms: float  # see Agreement.of; infinite: no deviation is shortened
    stretch: float
    shares: tuple[Share, ...]

    @property
    def content(self) -> list[Any]:
        """What is encoded."""
        shares = [[s.peer_id, s.key, s.weight, s.scale, s.most_energy, s.full] for s in self.shares]
        codecs = self.codec, self.result_codec
        return [self.part, self.num_elements, *codecs, self.free_rms, self.stretch, shares]

    @property
    def wire(self) -> bytes:
        """Its encoding, the same at all members."""
        return bytes(msgpack.packb(self.content, use_bin_type=True))

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
        case [str(peer_id), bytes(key), float(weight), float(scale), float(most_energy), bool(full)]:
            return Share(peer_id, key, weight, scale, most_energy, full)
    raise ProtocolError("malformed", "not a share of an average")


def _is_plausible(recipe: Recipe) -> bool:
    try:
        get_codec(recipe.codec), get_codec(recipe.result_codec)
    except ConfigError:
        return False
    return (
        not {type(recipe.part), type(recipe.num_elements)} - {int}  # True is an int, too
        and 0 < recipe.num_elements <= _MAX_ELEMENTS
        and 0 <= recipe.part < 1 << 32
        and recipe.free_rms >= 0
        and 1 <= recipe.stretch < math.inf
        and len({s.peer_id for s in recipe.shares}) == len(recipe.shares) > 0
        and all(len(s.key) == KEY_BYTES for s in recipe.shares)
        and all(0 < s.weight < math.inf and 0 < s.scale <= 1 and s.most_energy >= 0 for s in recipe.shares)
    )


def mean(
    differences: Sequence[FloatArray], weights: Sequence[float], free_rms: float, stretch: float
) -> tuple[FloatArray, Agreement]:
    """The weighted mean (N,) of M differences (N,), with deviations from the common direction clipped."""
    agreement = _agreement(differences, weights, free_rms, stretch)
    return _combined(agreement.coefficients_M.tolist(), differences), agreement


def _agreement(
    differences: Sequence[FloatArray], weights: Sequence[float], free_rms: float, stretch: float
) -> Agreement:
    if math.isfinite(free_rms):
        return Agreement.of(np.stack(differences), list(weights), free_rms, stretch)
    return Agreement.unbounded(weights, len(differences[0]))


def _combined(coefficients: Sequence[float], differences: Sequence[FloatArray]) -> FloatArray:
    combined_N = np.zeros(len(differences[0]), dtype=np.float64)
    for coefficient, difference_N in zip(coefficients, differences, strict=True):
        combined_N += coefficient * difference_N.astype(np.float64)
    return combined_N.astype(np.float32)


def fault_of(recipe: Recipe, result: bytes, contributions: Sequence[bytes]) -> str | None:
    """What is wrong with a result, given its contributions in the order of the recipe's shares; None if nothing is.

    Raises:
        ProtocolError: see `judge`.
    """
    return judge(recipe, result, contributions)[0]


def judge(recipe: Recipe, result: bytes, contributions: Sequence[bytes]) -> tuple[str | None, Agreement | None]:
    """What `fault_of` returns, and how the contributions agree; None if one of them makes the result faulty.

    All are encoded. A result is right if it is as near to the mean as its codec can be: to be near to what another
    machine encodes would not do, since a coarse codec rounds equal values apart if they differ in their last bits.

    Raises:
        ProtocolError: (`form`, `nonfinite`) a contribution is not a difference, or the mean overflows, so nothing
            follows about the result.
    """
    if any(share.full for share in recipe.shares):
        raise ProtocolError("form", "a contribution is not a difference")
    with np.errstate(all="ignore"):
        return _judge(recipe, result, contributions)


def _judge(recipe: Recipe, result: bytes, contributions: Sequence[bytes]) -> tuple[str | None, Agreement | None]:
    codec, size = get_codec(recipe.codec), recipe.num_elements
    differences = []
    for share, contribution in zip(recipe.shares, contributions, strict=True):
        try:
            difference_N = codec.decode(contribution, size)
        except ProtocolError as exc:
            return f"it includes a contribution of {share.peer_id} that cannot be decoded: {exc}", None
        if sum_of_squares(difference_N) > _ENERGY_TOLERANCE * share.most_energy:
            return f"the contribution of {share.peer_id} is longer than stated", None
        differences.append(difference_N * np.float32(share.scale) if share.scale < 1 else difference_N)
    weights = [share.weight for share in recipe.shares]
    agreement = _agreement(differences, weights, recipe.free_rms, recipe.stretch)
    coefficients = agreement.coefficients_M.tolist()
    mean_N = _combined(coefficients, differences)
    if not np.max(np.abs(mean_N)) < _HUGE:
        raise ProtocolError("nonfinite", "the mean of the contributions overflows")
    result_codec = get_codec(recipe.result_codec)
    try:
        claimed_N = result_codec.decode(result, size)
    except ProtocolError as exc:
        return f"the result cannot be decoded: {exc}", agreement
    away, length = math.sqrt(_excess(result_codec, claimed_N, mean_N)), math.sqrt(sum_of_squares(mean_N))
    lengths = [abs(c) * math.sqrt(sum_of_squares(d)) for c, d in zip(coefficients, differences, strict=True)]
    if away <= TOLERANCE * length + _ROUNDING * sum(lengths) + _TINY_RMS * math.sqrt(size):
        return None, agreement
    by = f"by {away / length:.3g} of its length" if length > 0 else "although that is zero"
    return f"the result differs from the mean of its contributions {by}", agreement


def _excess(codec: Codec, claimed_N: FloatArray, mean_N: FloatArray) -> float:
    """How much further a result is from the mean than its codec makes it, as a sum of squares."""
    exact_N = mean_N.astype(np.float64)
    near_N = (exact_N + _TOWARDS_RESULT * (claimed_N - exact_N)).astype(np.float32)
    nearest_N = codec.decode(codec.encode(near_N), len(near_N))
    excess_N = np.abs(claimed_N - exact_N) - np.abs(nearest_N - exact_N)
    return float(np.sum(np.square(np.maximum(excess_N, 0))))
