"""The expert merge of SPES as loops in float64, transcribed from Eqs. 5-6 (arXiv 2602.11543) as printed.

Nothing is shared with spes_swarm/model/merge.py.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array32 = npt.NDArray[np.float32]
Array64 = npt.NDArray[np.float64]


def _cosine(a: list[float], b: list[float]) -> float:
    dot = math.fsum(x * y for x, y in zip(a, b, strict=True))
    return dot / (math.sqrt(math.fsum(x * x for x in a)) * math.sqrt(math.fsum(y * y for y in b)))


def equations_5_and_6(gate_up: Array32, down: Array32, alpha: float, k: int) -> tuple[Array64, Array64]:
    """Merges one layer: gate_up (E, 2 F, D), whose first F rows are w_in, and down (E, D, F).

    With K above E - 1, an expert has E - 1 neighbours: all others.
    """
    num_experts, two_ffn, dim = gate_up.shape
    w_in = [[float(gate_up[j, f, d]) for f in range(two_ffn // 2) for d in range(dim)] for j in range(num_experts)]
    results = []
    for phi in (gate_up.astype(np.float64), down.astype(np.float64)):
        new_phi = phi.copy()
        for j in range(num_experts):
            others = [i for i in range(num_experts) if i != j]
            q_j = sorted(others, key=lambda i: (-_cosine(w_in[j], w_in[i]), i))[:k]
            if q_j:
                new_phi[j] = phi[j] + alpha * sum(phi[i] - phi[j] for i in q_j) / len(q_j)
        results.append(new_phi)
    return results[0], results[1]
