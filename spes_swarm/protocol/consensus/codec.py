"""The codecs, which encode the fp32 values of a part for the wire.

A reducer encodes its result once, and all members, including the reducer, apply the decoded bytes. Decoding must
therefore be bit-identical on all machines: element-wise numpy operations on little-endian data, no reductions.

Shapes: N elements of one part.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError, ProtocolError


class Codec(Protocol):
    """Encodes differences to the reference."""

    name: str

    def num_bytes(self, num_elements: int) -> int:
        """Length of the encoding of `num_elements` values."""

    def encode(self, values_N: FloatArray) -> bytes:
        """Encodes finite fp32 values."""

    def decode(self, data: bytes, num_elements: int) -> FloatArray:
        """Decodes `num_elements` values, up to the codec's precision.

        Raises:
            ProtocolError: (`shape`) the length is wrong; (`nonfinite`) a value is NaN or infinite.
        """


class Fp32:
    """Plain little-endian fp32: exact."""

    name = "fp32"

    def num_bytes(self, num_elements: int) -> int:
        """Four bytes per element."""
        return 4 * num_elements

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        return values_N.astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes, num_elements: int) -> FloatArray:
        """See Codec.decode."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        return _check_finite(np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False))


class Fp16:
    """Half precision with one power-of-two scale per part.

    The scale maps the largest magnitude to [2^14, 2^15), so that large values do not overflow and the tiny differences
    of late training do not become fp16 subnormals. Scaling by a power of two is exact.
    """

    name = "fp16"
    _header = np.dtype("<f4")
    _top_exponent = 15

    def num_bytes(self, num_elements: int) -> int:
        """Two bytes per element plus four for the scale."""
        return self._header.itemsize + 2 * num_elements

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        peak = float(np.max(np.abs(values_N), initial=0.0))
        # frexp gives peak = m * 2^e with m in [0.5, 1); clipped so that the scale itself is a normal fp32 number.
        exponent = int(np.clip(np.frexp(peak)[1] - self._top_exponent, -126, 126)) if peak > 0 else 0
        scale = np.float32(2.0**exponent)
        halves_N = (values_N / scale).astype("<f2")
        return np.array([scale], dtype=self._header).tobytes() + halves_N.tobytes()

    def decode(self, data: bytes, num_elements: int) -> FloatArray:
        """See Codec.decode."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        scale = np.float32(np.frombuffer(data, dtype=self._header, count=1)[0])
        if not (np.isfinite(scale) and scale > 0):
            raise ProtocolError("nonfinite", f"the fp16 scale is {scale}, expected a positive finite number")
        halves_N = np.frombuffer(data, dtype="<f2", offset=self._header.itemsize)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            return _check_finite(halves_N.astype(np.float32) * scale)


def _check_length(data: bytes, expected: int, name: str) -> None:
    if len(data) != expected:
        raise ProtocolError("shape", f"{name} part of {len(data)} bytes, expected {expected}")


def _check_finite(values_N: FloatArray) -> FloatArray:
    if not np.isfinite(values_N).all():
        raise ProtocolError("nonfinite", "a part has NaN or infinite values")
    return values_N


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Fp16())}
EXACT = CODECS["fp32"]


def get_codec(name: str) -> Codec:
    """Looks up a codec by name.

    Raises:
        ConfigError: no codec has that name.
    """
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; valid codecs: {', '.join(CODECS)}")
    return CODECS[name]
