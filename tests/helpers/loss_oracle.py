"""The losses of SPES as loops over tokens in float64, transcribed from their definitions.

Nothing is shared with spes_swarm/model/losses.py. Sources: cross-entropy and logit z-loss, PaLM (arXiv 2204.02311,
section 5); load balance, Switch Transformer (arXiv 2101.03961, Eqs. 4-6) with the factor of SPES (arXiv 2602.11543) on
the load of local experts; router z-loss, ST-MoE (arXiv 2202.08906, Eq. 5), summed over layers.

Tensor suffixes: B sequences, S positions, V vocabulary, T tokens, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array64 = npt.NDArray[np.float64]


class Oracle(NamedTuple):
    """The parts of the loss, without their weights."""

    cross_entropy: float
    load_balance: float
    router_z: float
    logit_z: float


def _float64(x: Tensor) -> Array64:
    return x.detach().double().cpu().numpy()


def _log_sum_exp(row: Array64) -> float:
    top = float(row.max())
    return top + math.log(math.fsum(np.exp(row - top)))


def naive_cross_entropy_and_z(logits_BSV: Tensor, ids_BS: Tensor) -> tuple[float, float]:
    """Means over all positions but the last of a sequence: of -log p(next token), and of the squared log-sum-exp."""
    nats, squares = [], []
    for rows, tokens in zip(_float64(logits_BSV), ids_BS.tolist(), strict=True):
        for row, following in zip(rows[:-1], tokens[1:], strict=True):
            log_sum_exp = _log_sum_exp(row)
            nats.append(log_sum_exp - row[following])
            squares.append(log_sum_exp**2)
    return math.fsum(nats) / len(nats), math.fsum(squares) / len(squares)


def naive_balance_factor(progress: float, start: float, fraction: float) -> float:
    """The factor on the load of local experts: from `start` to 1 along a line, until `fraction` of training is done."""
    return 1.0 if progress >= fraction else start * (1 - progress / fraction) + progress / fraction


def naive_balance(router_logits: Sequence[Tensor], k: int, held: Collection[int], factor: float) -> float:
    """Mean over layers of E * sum over experts of (share of choices) * (mean probability), local shares * factor."""
    per_layer = []
    for logits_TE in map(_float64, router_logits):
        num_tokens, num_experts = logits_TE.shape
        share, probability = [0.0] * num_experts, [0.0] * num_experts
        for row in logits_TE:
            log_sum_exp = _log_sum_exp(row)
            for expert in range(num_experts):
                probability[expert] += math.exp(row[expert] - log_sum_exp) / num_tokens
            for expert in sorted(range(num_experts), key=lambda expert: -row[expert])[:k]:
                share[expert] += 1 / (num_tokens * k)
        counted = [share[e] * (factor if e in held else 1.0) for e in range(num_experts)]
        per_layer.append(num_experts * math.fsum(f * p for f, p in zip(counted, probability, strict=True)))
    return math.fsum(per_layer) / len(per_layer)


def naive_router_z(router_logits: Sequence[Tensor]) -> float:
    """Sum over layers of the mean over tokens of the squared log-sum-exp."""
    total = 0.0
    for logits_TE in map(_float64, router_logits):
        total += math.fsum(_log_sum_exp(row) ** 2 for row in logits_TE) / len(logits_TE)
    return total


def naive_losses(
    logits_BSV: Tensor, ids_BS: Tensor, router_logits: Sequence[Tensor], k: int, held: Collection[int], factor: float
) -> Oracle:
    """All parts of the loss of one batch."""
    cross_entropy, logit_z = naive_cross_entropy_and_z(logits_BSV, ids_BS)
    return Oracle(cross_entropy, naive_balance(router_logits, k, held, factor), naive_router_z(router_logits), logit_z)


def closest_choice(router_logits: Sequence[Tensor], k: int) -> float:
    """The smallest distance between the last expert that a token chooses and the first that it does not.

    If it is a rounding error, the choice is a toss-up, and so is what follows from it.
    """
    distances = [math.inf]
    for logits_TE in map(_float64, router_logits):
        if k < logits_TE.shape[1]:
            ranked_TE = -np.sort(-logits_TE, axis=1)
            distances.append(float((ranked_TE[:, k - 1] - ranked_TE[:, k]).min()))
    return min(distances)
