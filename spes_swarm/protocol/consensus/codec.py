"""The codecs, which encode the fp32 values of a part for the wire.

A reducer encodes its result once, and all members, including the reducer, apply the decoded bytes. Decoding must
therefore be bit-identical on all machines: element-wise numpy operations on little-endian data, no reductions.

Shapes: N elements of one part, in B blocks of K.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from spes_swarm.base.arrays import FloatArray, scratch, sum_of_squares
from spes_swarm.base.errors import ConfigError, ProtocolError
from spes_swarm.protocol.consensus.kernels import extremes, from_half, to_half

_HEADER = np.dtype("<f4")  # the scale of a part
_TOP_EXPONENT = 15  # of fp16
_MAX_EXPONENT = 90  # far from where fp32 ends


class Codec(ABC):
    """Encodes differences to the reference."""

    name: str
    # The rounding error is too large to lose: whoever encodes its own difference keeps the error in its live weights,
    # so that it is part of the next difference (error feedback).
    error_feedback: bool

    @abstractmethod
    def num_bytes(self, num_elements: int) -> int:
        """Length of the encoding of `num_elements` values."""

    @abstractmethod
    def encode(self, values_N: FloatArray) -> bytes:
        """Encodes finite fp32 values."""

    @abstractmethod
    def decode(self, data: bytes, num_elements: int, out_N: FloatArray | None = None) -> FloatArray:
        """Decodes `num_elements` values, up to the codec's precision, into `out_N` if it is given.

        Raises:
            ProtocolError: (`shape`) the length is wrong; (`nonfinite`) a value is NaN or infinite.
        """

    def energy(self, data: bytes, num_elements: int) -> float:
        """The sum of squares of the decoded values; raises what `decode` does."""
        return sum_of_squares(self.decode(data, num_elements, scratch("energy", num_elements)))


class Fp32(Codec):
    """Plain little-endian fp32: exact."""

    name = "fp32"
    error_feedback = False

    def num_bytes(self, num_elements: int) -> int:
        """Four bytes per element."""
        return 4 * num_elements

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        return values_N.astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes, num_elements: int, out_N: FloatArray | None = None) -> FloatArray:
        """See Codec.decode."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        values_N = _check_finite(np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False))
        if out_N is None:
            return values_N
        out_N[:] = values_N
        return out_N


class Fp16(Codec):
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
        peak = float(max(np.max(values_N, initial=0.0), -np.min(values_N, initial=0.0)))
        scale = _part_scale(peak)
        scaled_N = np.divide(values_N, scale, out=scratch("fp16", len(values_N)))
        return np.array([scale], dtype=_HEADER).tobytes() + to_half(scaled_N).astype("<f2", copy=False).tobytes()

    def decode(self, data: bytes, num_elements: int, out_N: FloatArray | None = None) -> FloatArray:
        """See Codec.decode."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        scale = _read_part_scale(data, self.name)
        halves_N = np.frombuffer(data, dtype="<f2", offset=_HEADER.itemsize)
        values_N = np.empty(num_elements, np.float32) if out_N is None else out_N
        from_half(halves_N.astype(np.float16, copy=False), values_N)
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            values_N *= scale
        return _check_finite(values_N)


class BlockInteger(Codec):
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
        if bits == 4:
            self._squares_of_byte = np.sum(np.square(values), axis=1).astype(np.uint8).tobytes()
        self._values_of_byte = values.view(f"u{4 * self._per_byte}").reshape(-1)  # of one byte as one number

    def num_bytes(self, num_elements: int) -> int:
        """Half a byte or one byte per element, two per block of 64 and four for the part."""
        num_blocks = -(-num_elements // self._block)
        return _HEADER.itemsize + self._scale.itemsize * num_blocks + -(-num_elements // self._per_byte)

    def encode(self, values_N: FloatArray) -> bytes:
        """See Codec.encode."""
        num_elements, num_blocks = len(values_N), -(-len(values_N) // self._block)
        if num_elements % self._block:
            padded_N = scratch("padded", num_blocks * self._block)
            padded_N[:num_elements], padded_N[num_elements:] = values_N, 0
            values_N = padded_N
        values_BK = values_N.reshape(num_blocks, self._block)
        highest_B, lowest_B = extremes(values_BK)
        peak = float(max(np.max(highest_B, initial=0.0), -np.min(lowest_B, initial=0.0)))
        part_scale = step_scale = _part_scale(peak)
        if not _scales_exactly(part_scale):
            values_BK, highest_B, lowest_B = values_BK / part_scale, highest_B / part_scale, lowest_B / part_scale
            step_scale = np.float32(1)
        step_B = np.where(highest_B > -lowest_B, highest_B, lowest_B) / np.float32(self._lowest)
        step_B[step_B == 0] = 1
        codes_BK = scratch("codes", values_BK.size).reshape(values_BK.shape)
        with np.errstate(invalid="ignore"):  # a block with NaN has the scale NaN, which is refused
            np.divide(values_BK, step_B[:, None], out=codes_BK)
            np.rint(codes_BK, out=codes_BK)
            # The other end of the range has one code fewer.
            np.minimum(codes_BK, np.float32(-self._lowest - 1), out=codes_BK)
            energy_B = np.einsum("bk,bk->b", codes_BK, codes_BK)
            scale_B = np.einsum("bk,bk->b", codes_BK, values_BK) / (np.maximum(energy_B, 1) * step_scale)
            codes_N = scratch("integers", codes_BK.size, np.int8)
            codes_N.reshape(codes_BK.shape)[...] = codes_BK
        codes_N = codes_N.view(np.uint8)
        num_bytes = -(-num_elements // self._per_byte)
        if self._per_byte == 2:
            pairs_N = codes_N.view("<u2")  # the first code of each pair is in the low byte
            codes_N = (pairs_N & 15 | pairs_N >> 4 & 0xF0).astype(np.uint8)
        header = np.array([part_scale], dtype=_HEADER)
        return b"".join(array.tobytes() for array in (header, scale_B.astype(self._scale), codes_N[:num_bytes]))

    def decode(self, data: bytes, num_elements: int, out_N: FloatArray | None = None) -> FloatArray:
        """See Codec.decode.

        Raises:
            ProtocolError: (`malformed`) the unused half of the last byte is not zero.
        """
        part_scale, scale_B, packed = self._read(data, num_elements)
        codes_N = scratch("codes", len(packed) * self._per_byte)
        # No byte is beyond the table. numpy would copy all to check that first.
        self._values_of_byte.take(packed, out=codes_N.view(self._values_of_byte.dtype), mode="clip")
        values_N = np.empty(num_elements, np.float32) if out_N is None else out_N
        is_exact, whole = _scales_exactly(part_scale), num_elements // self._block * self._block
        with np.errstate(over="ignore", invalid="ignore"):  # the result is checked
            factor_B = scale_B * part_scale if is_exact else scale_B
            # Exact: a code and an fp16 number have at most 19 bits together.
            blocks_BK = codes_N[:whole].reshape(-1, self._block)
            np.multiply(blocks_BK, factor_B[: len(blocks_BK), None], out=values_N[:whole].reshape(-1, self._block))
            if whole < num_elements:
                np.multiply(codes_N[whole:num_elements], factor_B[-1], out=values_N[whole:])
            if not is_exact:
                values_N *= part_scale
        return values_N if self._is_finite(part_scale, scale_B) else _check_finite(values_N)

    def energy(self, data: bytes, num_elements: int) -> float:
        """See Codec.energy."""
        part_scale, scale_B, packed = self._read(data, num_elements)
        if self._per_byte == 1 or not (_scales_exactly(part_scale) and self._is_finite(part_scale, scale_B)):
            return super().energy(data, num_elements)
        squares = np.frombuffer(packed.tobytes().translate(self._squares_of_byte), np.uint8)
        whole, per_block = num_elements // self._block, self._block // self._per_byte
        squares_B = np.empty(len(scale_B))
        np.sum(squares[: whole * per_block].reshape(-1, per_block), axis=1, dtype=np.uint16, out=squares_B[:whole])
        squares_B[whole:] = np.sum(squares[whole * per_block :], dtype=np.int64)
        return float(np.sum(squares_B * np.square(scale_B.astype(np.float64)))) * float(part_scale) ** 2

    def _read(self, data: bytes, num_elements: int) -> tuple[np.float32, FloatArray, NDArray[np.uint8]]:
        """The scales of a part and its blocks, and the packed codes."""
        _check_length(data, self.num_bytes(num_elements), self.name)
        part_scale = _read_part_scale(data, self.name)
        num_blocks = -(-num_elements // self._block)
        scale_B = np.frombuffer(data, dtype=self._scale, count=num_blocks, offset=_HEADER.itemsize).astype(np.float32)
        packed = np.frombuffer(data, dtype=np.uint8, offset=_HEADER.itemsize + self._scale.itemsize * num_blocks)
        if num_elements % self._per_byte and packed[-1] >> 4:
            raise ProtocolError("malformed", f"the unused bits of an {self.name} part are not zero")
        return part_scale, scale_B, packed

    def _is_finite(self, part_scale: np.float32, scale_B: FloatArray) -> bool:
        """Returns True if no codes give an infinite value or NaN."""
        largest = -self._lowest * float(part_scale) * float(np.max(np.abs(scale_B), initial=0.0))
        return largest < float(np.finfo(np.float32).max)


def _part_scale(peak: float) -> np.float32:
    """The power of two that, as a divisor, brings the largest magnitude, `peak`, to [2^14, 2^15), for fp16."""
    # frexp gives peak = m * 2^e with m in [0.5, 1); clipped so that the scale itself is a normal fp32 number.
    exponent = int(np.clip(np.frexp(peak)[1] - _TOP_EXPONENT, -126, 126)) if peak > 0 else 0
    return np.float32(2.0**exponent)


def _scales_exactly(part_scale: np.float32) -> bool:
    """Returns True if multiplying by it is exact, so that it does not matter when that is done."""
    mantissa, exponent = np.frexp(part_scale)
    return bool(mantissa == 0.5 and abs(exponent) <= _MAX_EXPONENT)


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
