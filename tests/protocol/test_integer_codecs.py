"""The codecs int8 and int4, compared with a decoder that follows the documented layout in plain Python."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ProtocolError
from spes_swarm.protocol.consensus.codec import get_codec

BLOCK = 64
BITS = {"int8": 8, "int4": 4}
RATIO = {"int8": 3.8, "int4": 7.0}  # fp32 over encoded
RMS_ERROR = {"int8": 0.0065, "int4": 0.1}  # of normally distributed values, relative

integer_codecs = pytest.mark.parametrize("name", BITS)


@st.composite
def parts(draw: st.DrawFn) -> FloatArray:
    """Parts of any length, with values near each other, far apart, sparse or all zero, at any magnitude."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(1, 200))
    spread = draw(st.sampled_from([0, 1, 8]))  # standard deviation of the exponents
    values_N = rng.normal(size=size) * np.exp2(rng.normal(0, spread, size)) * (rng.random(size) < draw(st.floats(0, 1)))
    return (values_N * 2.0 ** draw(st.integers(-90, 60))).astype(np.float32)


def oracle_decode(name: str, data: bytes, size: int) -> list[float]:
    """The documented layout, number by number; exact in double precision."""
    num_blocks = math.ceil(size / BLOCK)
    (part_scale,) = struct.unpack_from("<f", data)
    scales = struct.unpack_from(f"<{num_blocks}e", data, 4)
    packed = data[4 + 2 * num_blocks :]
    unsigned = [code for byte in packed for code in ([byte] if BITS[name] == 8 else [byte & 15, byte >> 4])]
    codes = [code - (1 << BITS[name]) if code >= 1 << (BITS[name] - 1) else code for code in unsigned]
    return [code * scales[i // BLOCK] * part_scale for i, code in enumerate(codes[:size])]


def energy(values: FloatArray) -> float:
    return float(np.sum(np.square(values.astype(np.float64))))


@integer_codecs
@given(values_N=parts())
def test_decoding_follows_the_documented_layout(name: str, values_N: FloatArray) -> None:
    codec = get_codec(name)
    data = codec.encode(values_N)
    assert codec.decode(data, len(values_N)).tolist() == oracle_decode(name, data, len(values_N))


@pytest.mark.parametrize(
    ("name", "values", "data"),
    [
        # Peak 8: a part scale of 2^-11. In units of it the extreme, 16384, is code -8, so the scale is -2048.
        ("int4", [8.0, -1.0, 0.0, 2.0, -7.0], "0000003a" "00e8" "18" "e0" "07"),
        ("int8", [128.0, -1.0, 0.0, 2.0, -127.0], "0000003c" "00d8" "80" "01" "00" "fe" "7f"),
        # Below the smallest code that is not zero: lost. Least squares makes the step 8.25 / 8.
        ("int4", [-8.25, 0.25, 0.5], "0000003a" "2068" "08" "00"),
        ("int4", [0.0, 0.0], "0000803f" "0000" "00"),
        ("int8", [0.0, 0.0], "0000803f" "0000" "0000"),
        ("int4", [], "0000803f"),
        ("int8", [], "0000803f"),
    ],
)  # fmt: skip
def test_the_bytes_are_these(name: str, values: list[float], data: str) -> None:
    values_N = np.array(values, dtype=np.float32)
    encoded = get_codec(name).encode(values_N)
    assert encoded.hex() == data
    assert get_codec(name).decode(encoded, len(values)).tolist() == oracle_decode(name, encoded, len(values))


@integer_codecs
@pytest.mark.parametrize("size", [1024, 1025, 65536])  # from parts of small blocks on
def test_how_much_shorter_a_part_becomes(name: str, size: int) -> None:
    assert 4 * size / get_codec(name).num_bytes(size) >= RATIO[name]


@integer_codecs
@pytest.mark.parametrize("magnitude", [1e-30, 1e-9, 1.0, 1e30])
def test_the_error_is_small_at_any_magnitude(name: str, magnitude: float) -> None:
    values_N = (np.random.default_rng(0).normal(size=10_000) * magnitude).astype(np.float32)
    codec = get_codec(name)
    error_N = codec.decode(codec.encode(values_N), len(values_N)).astype(np.float64) - values_N
    relative = np.sqrt(np.sum(np.square(error_N)) / np.sum(np.square(values_N.astype(np.float64))))
    assert RMS_ERROR[name] / 2 < relative < RMS_ERROR[name]


@integer_codecs
@given(values_N=parts())
def test_no_block_has_a_larger_error_than_the_rounding_of_its_codes(name: str, values_N: FloatArray) -> None:
    codec = get_codec(name)
    decoded_N = codec.decode(codec.encode(values_N), len(values_N)).astype(np.float64)
    peak = float(np.abs(values_N).max(initial=0))
    for start in range(0, len(values_N), BLOCK):
        block_K = values_N[start : start + BLOCK].astype(np.float64)
        step = np.abs(block_K).max() / 2 ** (BITS[name] - 1)
        # Half a step, or a whole one at the end of the range that has one code fewer. The scale has 11 significant
        # bits, of which fewer count 2^29 below the peak.
        allowed_K = np.where(np.abs(block_K) > (2 ** (BITS[name] - 1) - 1.5) * step, 1.0, 0.5) * step
        allowed = np.linalg.norm(allowed_K) + np.linalg.norm(block_K) * 2**-11 + peak * 2.0**-30
        assert np.linalg.norm(decoded_N[start : start + BLOCK] - block_K) <= allowed


@integer_codecs
@given(values_N=parts())
def test_a_decoded_part_is_never_longer_than_the_values(name: str, values_N: FloatArray) -> None:
    """So no member exceeds the length that it has stated."""
    codec = get_codec(name)
    assert energy(codec.decode(codec.encode(values_N), len(values_N))) <= energy(values_N) * (1 + 2**-10)


@pytest.mark.parametrize("name", BITS)
def test_not_even_values_that_all_round_up_become_longer(name: str) -> None:
    """With the scale from the extreme alone, int4 would make their energy 1.6 times as large."""
    step = 1 / 2 ** (BITS[name] - 1)
    values_N = np.full(BLOCK, 0.51 * step, dtype=np.float32)
    values_N[0] = 1.0
    codec = get_codec(name)
    assert energy(codec.decode(codec.encode(values_N), BLOCK)) <= energy(values_N) * (1 + 2**-10)


@integer_codecs
@given(values_N=parts())
def test_encoding_decoded_values_again_loses_nothing(name: str, values_N: FloatArray) -> None:
    """A lone holder's part may be encoded twice: by the holder, and by another peer that reduces it."""
    codec = get_codec(name)
    decoded_N = codec.decode(codec.encode(values_N), len(values_N))
    again_N = codec.decode(codec.encode(decoded_N), len(values_N))
    np.testing.assert_array_equal(again_N, decoded_N)


@integer_codecs
@given(values_N=parts())
def test_zero_stays_zero(name: str, values_N: FloatArray) -> None:
    decoded_N = get_codec(name).decode(get_codec(name).encode(values_N), len(values_N))
    assert not decoded_N[values_N == 0].any()


@integer_codecs
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("code", [0, 1])  # a scale that is not finite is refused even where all codes are zero
def test_scales_that_are_not_finite_are_refused(name: str, bad: float, code: int) -> None:
    codec = get_codec(name)
    for part_scale, block_scale in ((1.0, bad), (bad, 1.0)):
        with pytest.raises(ProtocolError) as error:
            codec.decode(struct.pack("<fe2b", part_scale, block_scale, code, code)[: codec.num_bytes(2)], 2)
        assert error.value.kind == "nonfinite"


@integer_codecs
@pytest.mark.parametrize("part_scale", [0.0, -1.0, 2.0**127])  # the last one overflows with its block scale
def test_part_scales_that_no_peer_sends_are_refused(name: str, part_scale: float) -> None:
    codec = get_codec(name)
    with pytest.raises(ProtocolError) as error:
        codec.decode(struct.pack("<fe2b", part_scale, 1000.0, 7, 7)[: codec.num_bytes(2)], 2)
    assert error.value.kind == "nonfinite"


def test_a_code_after_the_last_is_refused() -> None:
    codec = get_codec("int4")
    data = codec.encode(np.ones(3, np.float32))
    assert codec.decode(data, 3).tolist() == [1.0] * 3
    with pytest.raises(ProtocolError) as error:
        codec.decode(data[:-1] + bytes([data[-1] | 0x10]), 3)
    assert error.value.kind == "malformed"
