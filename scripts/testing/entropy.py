"""Entropy of a corpus."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unigram_entropy(tokens: NDArray[Any]) -> float:
    """Entropy in nats per token of single tokens (1-D, not empty): the loss of a model that ignores all context."""
    _, counts = np.unique(tokens, return_counts=True)
    shares = counts / len(tokens)
    return float(-np.sum(shares * np.log(shares))) if len(shares) > 1 else 0.0
