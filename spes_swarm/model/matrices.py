"""Which shared weights of a model are matrices of its hidden layers; optimisers such as Muon treat only these as such.

They map one hidden vector to another: the projections of attention, of dense and shared MLPs and of state-space layers.
Embeddings and the output head have one row per token of the vocabulary, and a router has one per expert. Each row of
theirs has its own meaning, so they are not among them. Nor are vectors, convolutions, and gates of one row.
"""

from __future__ import annotations

from torch import Tensor, nn

_ROUTERS = frozenset({"gate", "router"})  # parts of module names


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that are such matrices, experts aside; the model may have sparse experts."""
    excluded: set[Tensor] = set()
    found: dict[str, Tensor] = {}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        weights = list(module.parameters(recurse=False))
        is_router = not _ROUTERS.isdisjoint(name.split("."))
        if module is head or is_router or not isinstance(module, nn.Linear):
            excluded.update(weights)
        else:
            found[f"{name}.weight"] = module.weight
    return frozenset(
        name for name, weight in found.items() if weight not in excluded and weight.dim() == 2 and min(weight.shape) > 1
    )
