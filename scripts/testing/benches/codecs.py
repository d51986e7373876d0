"""Codecs: bytes, error and time per value, on random parts.

ratio        bytes of the values in fp32 by those of the encoded part
error        root mean square of the rounding error by that of the values
longer       largest ratio of the length of a decoded block of 64 values to that of the block: above 1, a codec
             lengthens differences
encode_ns    CPU time per value
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from scripts.testing.benchmark import Row
from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.protocol.consensus.codec import CODECS

_PART_ELEMENTS = 65_536
_BLOCK = 64


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command line."""
    parser.add_argument("--parts", type=int, default=16, help=f"of {_PART_ELEMENTS:,} values")


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each codec and distribution."""
    rng = np.random.default_rng(0)
    shape = options.parts, _PART_ELEMENTS
    kinds = {
        "normal": rng.normal(size=shape),
        "Laplace": rng.laplace(size=shape),
        "t, 3": rng.standard_t(3, size=shape),
    }
    parts = {kind: (1e-4 * values).astype(np.float32) for kind, values in kinds.items()}
    for name, codec in CODECS.items():
        for kind, values_PN in parts.items():
            begun = time.process_time()
            encoded = [codec.encode(values_N) for values_N in values_PN]
            between = time.process_time()
            decoded_PN = np.stack([codec.decode(data, _PART_ELEMENTS) for data in encoded])
            ended = time.process_time()
            yield {
                "codec": name,
                "values": kind,
                "ratio": values_PN.nbytes / sum(map(len, encoded)),
                "error": float(np.sqrt(sum_of_squares(decoded_PN - values_PN) / sum_of_squares(values_PN))),
                "longer": float(np.sqrt((_block_energies(decoded_PN) / _block_energies(values_PN)).max())),
                "encode_ns": 1e9 * (between - begun) / values_PN.size,
                "decode_ns": 1e9 * (ended - between) / values_PN.size,
            }


def _block_energies(values: FloatArray) -> FloatArray:
    energies: FloatArray = np.square(values.reshape(-1, _BLOCK)).sum(axis=1)
    return energies
