"""All machines decode the same bits, whatever their vector units, and whether or not torch is loaded."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from spes_swarm.protocol.consensus.codec import CODECS

_NUMPY = importlib.import_module(f"numpy.{'_core' if hasattr(np, '_core') else 'core'}._multiarray_umath")
# The vector units that this build of numpy has code for and this machine has.
_UNITS = [name for name in _NUMPY.__cpu_dispatch__ if _NUMPY.__cpu_features__[name]]
_BEYOND_AVX2 = [name for name in _UNITS if "512" in name or name == "X86_V4"]
_SIZES = 1, 63, 64, 65, 1000, 40_000


def decoded() -> str:
    """Digest of new values of parts, as a commit makes them."""
    hasher = blake3()
    rng = np.random.default_rng(0)
    for codec in CODECS.values():
        for size in _SIZES:
            for exponent in (-120, -20, 0, 90):
                base_N = rng.integers(-1000, 1000, size).astype(np.float32)
                data = payload(rng, codec.name, size, exponent)
                hasher.update(np.add(base_N, codec.decode(data, size)).tobytes())
    return hasher.hexdigest()


def payload(rng: np.random.Generator, name: str, size: int, exponent: int) -> bytes:
    """An encoding of which no bit depends on the machine."""
    if name == "fp32":
        return rng.integers(0, 1000, size).astype("<f4").tobytes()
    header = np.array([2.0**exponent], "<f4").tobytes()
    if name == "fp16":
        return header + rng.integers(0, 0x7000, size).astype("<u2").tobytes()
    scales = rng.integers(0, 0x7000, -(-size // 64)).astype("<u2").tobytes()
    codes = rng.integers(0, 256, -(-size // (2 if name == "int4" else 1))).astype(np.uint8)
    if name == "int4" and size % 2:
        codes[-1] &= 15
    return header + scales + codes.tobytes()


@pytest.mark.parametrize("imports", ["", "import torch"])
@pytest.mark.parametrize(
    ("disabled", "torch_has", "blas_has"),
    [(_UNITS, "default", "Nehalem"), (_BEYOND_AVX2, "avx2", "Haswell")],
    ids=["plain", "avx2"],
)
def test_other_vector_units_decode_the_same_bits(
    disabled: list[str], torch_has: str, blas_has: str, imports: str
) -> None:
    program = f"{imports}\nfrom {__name__} import _UNITS, decoded\nprint(*_UNITS, decoded())\n"
    changed = {"ATEN_CPU_CAPABILITY": torch_has, "OPENBLAS_CORETYPE": blas_has}
    if disabled:
        changed["NPY_DISABLE_CPU_FEATURES"] = " ".join(disabled)
    *units, digest = _printed(program, changed).split()
    assert not set(units) & set(disabled)
    assert digest == decoded()


def _printed(program: str, changed: dict[str, str]) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), **changed}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()
