"""The entropy that the demo's loss is compared with."""

from __future__ import annotations

import math

import numpy as np
import pytest

from scripts.testing.entropy import unigram_entropy


def test_unigram_entropy() -> None:
    assert unigram_entropy(np.zeros(10, np.uint16)) == 0.0
    assert unigram_entropy(np.arange(256, dtype=np.uint16)) == pytest.approx(math.log(256))
    skewed = np.array([0] * 3 + [7])
    assert unigram_entropy(skewed) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
