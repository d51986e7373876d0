"""The codecs, which encode the fp32 values of a part for the wire.

A reducer encodes its result once, and all members, including the reducer, apply the decoded bytes. Decoding must
therefore be bit-identical on all machines: element-wise numpy operations on little-endian data, no reductions.

Shapes: N elements of one part, in B blocks of K.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError, ProtocolError

_HEADER = np.dtype("<f4")  # the scale of a part
_TOP_EXPONENT = 15  # of fp16


class Codec(Protocol):
    """Encodes differences to the reference."""

    name: str
    # The rounding error is too large to lose: whoever encodes its own difference keeps the error in its live weights,
    # so that it is part of the next difference (error feedback).
    error_feedback: bool

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
    error_feedback = False

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
    error_feedback = False  # about 2^-12 of each value; with feedback, checkpoints would contain all trained blocks

    def num_bytes(self, num_elements: int) -> int:
        """Two bytes per element plus four for the scale."""
        return _HEADER.itemsize + 2 * num_elements

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        scale = _part_scale(values_N)
        halves_N = (values_N / scale).astype("<f2")
        return np.array([scale], dtype=_HEADER).tobytes() + halves_N.tobytes()

    def decode(self, data: bytes, num_elements: int) -> FloatArray:
        """See Codec.decode."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        scale = _read_part_scale(data, self.name)
        halves_N = np.frombuffer(data, dtype="<f2", offset=_HEADER.itemsize)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            return _check_finite(halves_N.astype(np.float32) * scale)


class BlockInteger:
    """Integers of 4 or 8 bits with one fp16 scale per block of 64 elements, and one power-of-two scale per part.

    The scale of a block is signed: it maps the element of the largest magnitude to the lowest code, because two's
    complement has one more code below zero than above. Zero stays zero. Once the codes are known, the scale is replaced
    by the least-squares one. The decoded block is then the projection of the values onto the codes, so its sum of
    squares is never larger than theirs, up to the rounding of the scale (2^-11): a contribution is never longer than
    stated. Encoding decoded values again loses nothing.

    Layout: the part's scale (fp32), B block scales (fp16), N codes. A byte has two codes of 4 bits, the first in its
    low half; if N is odd, the last high half is zero.
    """

    error_feedback = True
    _block = 64
    _scale = np.dtype("<f2")

    def __init__(self, bits: int) -> None:
        """Takes the bits per code: 4 or 8."""
        self.name = f"int{bits}"
        self._per_byte = 8 // bits
        self._lowest = -(1 << (bits - 1))
        # For each byte, the values of the codes in it.
        byte_codes = (np.arange(256)[:, None] >> (bits * np.arange(self._per_byte))) & ((1 << bits) - 1)
        values = (((byte_codes - self._lowest) % (1 << bits)) + self._lowest).astype(np.float32)
        self._values_of_byte = values.view(f"u{4 * self._per_byte}").reshape(-1)  # of one byte as one number

    def num_bytes(self, num_elements: int) -> int:
        """Half a byte or one byte per element, two per block of 64 and four for the part."""
        num_blocks = -(-num_elements // self._block)
        return _HEADER.itemsize + self._scale.itemsize * num_blocks + -(-num_elements // self._per_byte)

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        part_scale = _part_scale(values_N)
        num_elements = len(values_N)
        values_BK = np.zeros((-(-num_elements // self._block), self._block), dtype=np.float32)
        np.divide(values_N, part_scale, out=values_BK.reshape(-1)[:num_elements])
        highest_B, lowest_B = values_BK.max(axis=1), values_BK.min(axis=1)
        step_B = np.where(highest_B > -lowest_B, highest_B, lowest_B) / np.float32(self._lowest)
        step_B[step_B == 0] = 1
        with np.errstate(invalid="ignore"):  # a block with NaN has the scale NaN, which is refused
            # The other end of the range has one code fewer.
            codes_BK = np.clip(np.rint(values_BK / step_B[:, None]), self._lowest, -self._lowest - 1)
            energy_B = np.einsum("bk,bk->b", codes_BK, codes_BK)
            scale_B = np.einsum("bk,bk->b", codes_BK, values_BK) / np.maximum(energy_B, 1)
            codes_N = codes_BK.astype(np.int8).reshape(-1)[:num_elements].view(np.uint8)
        if self._per_byte == 2:
            codes_N = np.pad(codes_N, (0, num_elements % 2)) & 15
            codes_N = codes_N[0::2] | codes_N[1::2] << 4
        header = np.array([part_scale], dtype=_HEADER)
        return b"".join(array.tobytes() for array in (header, scale_B.astype(self._scale), codes_N))

    def decode(self, data: bytes, num_elements: int) -> FloatArray:
        """See Codec.decode.

        Raises:
            ProtocolError: (`malformed`) the unused half of the last byte is not zero.
        """
        _check_length(data, self.num_bytes(num_elements), self.name)
        part_scale = _read_part_scale(data, self.name)
        num_blocks = -(-num_elements // self._block)
        scale_B = np.frombuffer(data, dtype=self._scale, count=num_blocks, offset=_HEADER.itemsize).astype(np.float32)
        packed = np.frombuffer(data, dtype=np.uint8, offset=_HEADER.itemsize + self._scale.itemsize * num_blocks)
        if num_elements % self._per_byte and packed[-1] >> 4:
            raise ProtocolError("malformed", f"the unused bits of an {self.name} part are not zero")
        values_N = np.zeros(num_blocks * self._block, dtype=np.float32)
        codes_N = self._values_of_byte.take(packed).view(np.float32)
        values_N[: len(codes_N)] = codes_N
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            values_BK = values_N.reshape(num_blocks, self._block)
            values_BK *= scale_B[:, None]  # exact: a code and an fp16 number have at most 19 bits together
            values_N *= part_scale
        return _check_finite(values_N[:num_elements])


def _part_scale(values_N: FloatArray) -> np.float32:
    """The power of two that, as a divisor, brings the largest magnitude to [2^14, 2^15), for fp16."""
    peak = float(np.max(np.abs(values_N), initial=0.0))
    # frexp gives peak = m * 2^e with m in [0.5, 1); clipped so that the scale itself is a normal fp32 number.
    exponent = int(np.clip(np.frexp(peak)[1] - _TOP_EXPONENT, -126, 126)) if peak > 0 else 0
    return np.float32(2.0**exponent)


def _read_part_scale(data: bytes, name: str) -> np.float32:
    scale = np.float32(np.frombuffer(data, dtype=_HEADER, count=1)[0])
    if not (np.isfinite(scale) and scale > 0):
        raise ProtocolError("nonfinite", f"the {name} scale is {scale}, expected a positive finite number")
    return scale


def _check_length(data: bytes, expected: int, name: str) -> None:
    if len(data) != expected:
        raise ProtocolError("shape", f"{name} part of {len(data)} bytes, expected {expected}")


def _check_finite(values_N: FloatArray) -> FloatArray:
    if not np.isfinite(values_N).all():
        raise ProtocolError("nonfinite", "a part has NaN or infinite values")
    return values_N


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Fp16(), BlockInteger(8), BlockInteger(4))}
EXACT = CODECS["fp32"]


def get_codec(name: str) -> Codec:
    """Looks up a codec by name.

    Raises:
        ConfigError: no codec has that name.
    """
    if name not in CODECS:
        raise ConfigError(f"unknown codec {name!r}; valid codecs: {', '.join(CODECS)}")
    return CODECS[name]
