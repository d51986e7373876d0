"""What a part's values become on the way: compared with Python's own arithmetic on single numbers."""

from __future__ import annotations

import math
import re
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import ConfigError, ProtocolError
from spes_swarm.protocol.consensus.codec import CODECS, EXACT, Codec, get_codec

# Differences to the reference: what comes near the end of fp32 is refused by every reducer anyway.
numbers = st.floats(-(2.0**123), 2.0**123, width=32)
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


def array(values: list[float]) -> FloatArray:
    return np.array(values, dtype=np.float32)


def kind_of(error: pytest.ExceptionInfo[ProtocolError]) -> str:
    return error.value.kind


@given(st.lists(numbers, max_size=50))
def test_fp32_is_the_values_themselves(values: list[float]) -> None:
    data = EXACT.encode(array(values))
    assert data == struct.pack(f"<{len(values)}f", *values)
    assert EXACT.decode(data, len(values)).tobytes() == data


@given(st.lists(numbers, min_size=1, max_size=50))
def test_fp16_rounds_every_value_to_half_precision_at_one_power_of_two(values: list[float]) -> None:
    codec = get_codec("fp16")
    data = codec.encode(array(values))
    (scale,) = struct.unpack_from("<f", data)
    expected = [struct.unpack("<e", struct.pack("<e", value / scale))[0] * scale for value in values]
    assert codec.decode(data, len(values)).tolist() == expected


@given(st.lists(numbers, min_size=1, max_size=50).filter(lambda values: max(map(abs, values)) > 1e-30))
def test_fp16_uses_the_whole_range_of_half_precision(values: list[float]) -> None:
    (scale,) = struct.unpack_from("<f", get_codec("fp16").encode(array(values)))
    assert math.log2(scale).is_integer()
    assert 2**14 <= max(map(abs, values)) / scale < 2**15


@given(st.integers(-120, 100), st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=50))
def test_fp16_is_as_exact_for_tiny_differences_as_for_large_ones(exponent: int, values: list[float]) -> None:
    values_N = np.ldexp(array([*values, 1.0]), exponent).astype(np.float32)
    codec = get_codec("fp16")
    error_N = np.abs(codec.decode(codec.encode(values_N), len(values_N)).astype(np.float64) - values_N)
    peak = 2.0**exponent
    # Half precision has 11 significant bits, and the peak lies 29 binary places above its smallest step.
    allowed_N = np.maximum(np.abs(values_N.astype(np.float64)) * 2**-11, peak * 2**-39)
    # At the lower end of fp32 there is no smaller scale to be had.
    assert (error_N <= np.maximum(allowed_N, 2.0**-150)).all()


@every_codec
@given(values=st.lists(numbers, max_size=50))
def test_the_length_is_known_beforehand(codec: Codec, values: list[float]) -> None:
    assert len(codec.encode(array(values))) == codec.num_bytes(len(values))


@every_codec
def test_nothing_changed_stays_nothing(codec: Codec) -> None:
    assert codec.decode(codec.encode(np.zeros(100, np.float32)), 100).tolist() == [0.0] * 100


@every_codec
def test_the_callers_values_are_left_alone(codec: Codec) -> None:
    values_N = np.linspace(-3, 5, 100, dtype=np.float32)
    before = values_N.tobytes()
    decoded_N = codec.decode(codec.encode(values_N), 100)
    assert values_N.tobytes() == before
    assert not np.shares_memory(values_N, decoded_N)


@every_codec
@given(data=st.binary(max_size=100), num_elements=st.integers(0, 30))
def test_whatever_a_peer_sends_is_finite_or_refused(codec: Codec, data: bytes, num_elements: int) -> None:
    try:
        values_N = codec.decode(data, num_elements)
    except ProtocolError:
        return
    assert len(data) == codec.num_bytes(num_elements)
    assert values_N.shape == (num_elements,)
    assert values_N.dtype == np.float32
    assert np.isfinite(values_N).all()


@every_codec
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_part_of_another_length_is_refused(codec: Codec, difference: int) -> None:
    data = codec.encode(np.ones(10, np.float32))
    with pytest.raises(ProtocolError) as error:
        codec.decode((data + b"\0")[: len(data) + difference], 10)
    assert kind_of(error) == "shape"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    for data, codec in (
        (struct.pack("<3f", 1.0, bad, 2.0), "fp32"),
        (struct.pack("<f3e", 1.0, 1.0, bad, 2.0), "fp16"),
        (struct.pack("<f3e", bad, 1.0, 1.0, 1.0), "fp16"),
        (struct.pack("<f3e", 2.0**127, 1.0, 60000.0, 1.0), "fp16"),  # finite halves, but not their product
        (struct.pack("<f3e", 0.0, 1.0, 1.0, 1.0), "fp16"),
        (struct.pack("<f3e", -1.0, 1.0, 1.0, 1.0), "fp16"),
    ):
        with pytest.raises(ProtocolError) as error:
            get_codec(codec).decode(data, 3)
        assert kind_of(error) == "nonfinite"


def test_an_unknown_codec_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'zip'.*fp32.*fp16"):
        get_codec("zip")


@every_codec
@given(data=st.data())
def test_the_energy_is_that_of_the_decoded_values(codec: Codec, data: st.DataObject) -> None:
    """Of any bytes: a hostile scale is no power of two. What cannot be decoded has no energy either."""
    size = data.draw(st.integers(1, 200))
    encoded = data.draw(st.binary(min_size=codec.num_bytes(size), max_size=codec.num_bytes(size)))
    try:
        decoded_N = codec.decode(encoded, size)
    except ProtocolError as exc:
        with pytest.raises(ProtocolError, match=re.escape(str(exc))):
            codec.energy(encoded, size)
        return
    out_N = np.full(size, np.nan, dtype=np.float32)
    assert codec.decode(encoded, size, out_N) is out_N
    assert out_N.tobytes() == decoded_N.tobytes()
    expected = math.fsum(float(value) ** 2 for value in decoded_N)
    assert codec.energy(encoded, size) == pytest.approx(expected, rel=1e-6, abs=0)


def test_the_energy_of_a_part_whose_values_are_rounded_to_subnormal_ones() -> None:
    """Otherwise a contribution that its reducer accepts would be too long for an auditor, who decodes it."""
    codec = get_codec("int4")
    encoded = struct.pack("<f", 2.0**-149) + struct.pack("<e", 0.501) + bytes([0x11]) * 32
    expected = math.fsum(float(value) ** 2 for value in codec.decode(encoded, 64))
    assert codec.energy(encoded, 64) == expected == 64 * 2.0**-298


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_signalling_nan_among_scales_is_refused_like_others(name: str) -> None:
    codec = get_codec(name)
    encoded = struct.pack("<f", 0.5) + struct.pack("<H", 0x7C01) + bytes(codec.num_bytes(64) - 6)
    for read in (codec.decode, codec.energy):
        with pytest.raises(ProtocolError, match="NaN or infinite"):
            read(encoded, 64)
