"""Expert merging, the warm-up of SPES (arXiv 2602.11543, Eqs. 5-6): similar experts move closer early in training.

Array suffixes: N elements of the flat vector, E experts, F expert ffn dim, D model dim, P elements of one tensor of one
expert, K neighbours.

Per layer, A_jk = cos(w_in_j, w_in_k) over the flattened gate/input projections, Q_j = the K experts most similar to j
(excluding j itself), and phi_j <- phi_j + alpha * mean_{k in Q_j}(phi_k - phi_j) for *all* matrices of an expert, with
the donors' values from before the merge.

Merged values go to live weights only. Sums over a matrix differ in the last bits between machines, so the merge must
never touch the reference, which all peers share bit for bit (docs/architecture.md). Similarities are summed in fp64,
which makes it very unlikely that two machines choose different neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from spes_swarm.base.arrays import FloatArray
from spes_swarm.protocol.consensus.layout import Layout, TensorSlot

GATE_UP = "gate_up_proj"  # (2F, D) per expert: transformers puts the F gate rows before the F up rows
# Similarities convert this many elements per expert to fp64 at a time (8 MiB), never a whole layer.
CHUNK_ELEMENTS = 2**20


def merge_alpha(step: int, alpha: float, merge_steps: int) -> float:
    """Merge strength after `step` local steps: alpha * (1 - min(step / merge_steps, 1)); 0 without merge_steps."""
    if merge_steps <= 0:
        return 0.0
    return alpha * (1.0 - min(step / merge_steps, 1.0))


def merge_due(previous_step: int, step: int, interval: int) -> bool:
    """Returns True if a multiple of `interval` (local steps; 0: never) lies in (previous_step, step]."""
    return interval > 0 and step // interval > previous_step // interval


def similarity(gate_EP: FloatArray) -> npt.NDArray[np.float64]:
    """Cosine similarity (E, E) of the rows; 0 where a row is zero. Accepts strided views."""
    E, P = gate_EP.shape
    gram_EE = np.zeros((E, E), dtype=np.float64)
    for start in range(0, P, CHUNK_ELEMENTS):
        chunk = gate_EP[:, start : start + CHUNK_ELEMENTS].astype(np.float64)
        gram_EE += chunk @ chunk.T
    norm_E = np.sqrt(np.diagonal(gram_EE))
    scale_EE = np.outer(norm_E, norm_E)
    cosine_EE = np.zeros_like(gram_EE)
    np.divide(gram_EE, scale_EE, out=cosine_EE, where=scale_EE > 0)
    return cosine_EE


def nearest_experts(similarity_EE: npt.NDArray[np.float64], num_neighbours: int) -> npt.NDArray[np.int64]:
    """Q_j (E, K): the K = min(num_neighbours, E - 1) experts most similar to each j, best first.

    Similarities that agree to 12 decimals are ties, which go to the lowest index.

    Raises:
        ValueError: `num_neighbours` is negative.
    """
    if num_neighbours < 0:
        raise ValueError(f"num_neighbours must not be negative, got {num_neighbours}")
    E = similarity_EE.shape[0]
    others_EE = similarity_EE.copy()
    np.fill_diagonal(others_EE, -np.inf)
    # Rounding makes ties of equal experts (fresh from upcycling) exact, whatever the order of summation; a stable sort
    # of the negated values then keeps them in index order.
    order_EE = np.argsort(-np.round(others_EE, 12), axis=1, kind="stable")
    return order_EE[:, : min(num_neighbours, E - 1)].astype(np.int64)


def _merged(stack_EP: FloatArray, expert: int, donors_K: npt.NDArray[np.int64], alpha: float) -> FloatArray:
    own_P: FloatArray = stack_EP[expert]
    if alpha == 0.0 or len(donors_K) == 0:
        return own_P.copy()
    # Donors are added in index order, so the result does not depend on their order of similarity.
    mean_P: FloatArray = np.zeros_like(own_P)
    for donor in np.sort(donors_K):
        mean_P += stack_EP[donor]
    mean_P /= np.float32(len(donors_K))
    mean_P -= own_P
    mean_P *= np.float32(alpha)
    mean_P += own_P
    return mean_P


def _layers(reference_N: FloatArray, layout: Layout) -> dict[str, dict[str, tuple[int, FloatArray]]]:
    """By experts module and tensor: position of its slot in an expert's block, and an (E, P) view into the reference.

    All expert blocks have the same slots at the same offsets, so the experts are rows of one matrix; nothing is copied.
    """
    first = layout.expert_block(0)
    block_EN = reference_N[first.start :].reshape(layout.num_experts, first.size)
    layers: dict[str, dict[str, tuple[int, FloatArray]]] = {}
    for position, slot in enumerate(first.slots):
        layer, _, tensor = slot.name.rpartition(".")
        offset = slot.start - first.start
        layers.setdefault(layer, {})[tensor] = (position, block_EN[:, offset : offset + slot.size])
    return layers


def layer_similarities(
    reference_N: FloatArray, layout: Layout, max_elements: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Returns the similarity (E, E) of the experts' gate projections in each layer, by name of the experts module.

    It is estimated from rows of the projection at equal distances, about `max_elements` elements of each expert. The
    reference is only read; extra memory is these elements of one layer.
    """
    found: dict[str, npt.NDArray[np.float64]] = {}
    for name, tensors in _layers(reference_N, layout).items():
        position, gate_up_EP = tensors[GATE_UP]
        E, D = len(gate_up_EP), layout.expert_block(0).slots[position].shape[-1]
        gate_EFD = gate_up_EP[:, : gate_up_EP.shape[1] // 2].reshape(E, -1, D)
        stride = max(1, gate_EFD.shape[1] * D // max_elements)
        found[name] = similarity(gate_EFD[:, ::stride].reshape(E, -1))
    return found


def merged_slots(
    reference_N: FloatArray, layout: Layout, alpha: float, num_neighbours: int
) -> Iterator[tuple[TensorSlot, FloatArray]]:
    """Yields (slot, merged values) for every tensor of every expert.

    The reference is only read. Extra memory is one tensor of one expert plus a few MiB, whatever the model size. The
    caller writes the values to live weights (`SparseModel.write_slot`), or adds `values - reference` to them.

    Raises:
        ValueError: `reference_N` does not fit the layout, or a layer has no `gate_up_proj`.
    """
    if reference_N.dtype != np.float32 or reference_N.shape != (layout.num_elements,):
        raise ValueError(f"the reference is {reference_N.dtype} {reference_N.shape}, which does not fit the layout")
    for tensors in _layers(reference_N, layout).values():
        if GATE_UP not in tensors:
            raise ValueError(f"a layer's experts have no {GATE_UP}, only {sorted(tensors)}")
        _, gate_up_EP = tensors[GATE_UP]
        neighbours_EK = nearest_experts(similarity(gate_up_EP[:, : gate_up_EP.shape[1] // 2]), num_neighbours)
        for position, stack_EP in tensors.values():
            for expert in range(layout.num_experts):
                slot = layout.expert_block(expert).slots[position]
                yield slot, _merged(stack_EP, expert, neighbours_EK[expert], alpha).reshape(slot.shape)
