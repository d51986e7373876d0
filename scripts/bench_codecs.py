"""Codecs: bytes, error and time per value, on random parts.

    .venv/bin/python scripts/bench_codecs.py

The error is the root mean square of the rounding error over that of the values. `longer` is the largest ratio of the
length of a decoded block of 64 values to that of the block: above 1, a codec lengthens differences.
"""

from __future__ import annotations

import time

import numpy as np

from spes_swarm.base.arrays import FloatArray, sum_of_squares
from spes_swarm.protocol.consensus.codec import CODECS

_PART_ELEMENTS = 65_536
_NUM_PARTS = 16
_BLOCK = 64


def main() -> int:
    """Prints a line for each codec and distribution."""
    rng = np.random.default_rng(0)
    shape = _NUM_PARTS, _PART_ELEMENTS
    kinds = {
        "normal": rng.normal(size=shape),
        "Laplace": rng.laplace(size=shape),
        "t, 3": rng.standard_t(3, size=shape),
    }
    parts = {kind: (1e-4 * values).astype(np.float32) for kind, values in kinds.items()}
    print(
        f"{'codec':6} {'values':8} {'fp32 / bytes':>12} {'error':>8} {'longer':>8} {'encode ns':>10} {'decode ns':>10}"
    )
    for name, codec in CODECS.items():
        for kind, values_PN in parts.items():
            begun = time.process_time()
            encoded = [codec.encode(values_N) for values_N in values_PN]
            between = time.process_time()
            decoded_PN = np.stack([codec.decode(data, _PART_ELEMENTS) for data in encoded])
            ended = time.process_time()
            ratio = values_PN.nbytes / sum(map(len, encoded))
            error = np.sqrt(sum_of_squares(decoded_PN - values_PN) / sum_of_squares(values_PN))
            longer = np.sqrt((_block_energies(decoded_PN) / _block_energies(values_PN)).max())
            encode_ns, decode_ns = (1e9 * s / values_PN.size for s in (between - begun, ended - between))
            print(f"{name:6} {kind:8} {ratio:12.2f} {error:8.2%} {longer:8.4f} {encode_ns:10.1f} {decode_ns:10.1f}")
    return 0


def _block_energies(values: FloatArray) -> FloatArray:
    energies: FloatArray = np.square(values.reshape(-1, _BLOCK)).sum(axis=1)
    return energies


if __name__ == "__main__":
    raise SystemExit(main())
