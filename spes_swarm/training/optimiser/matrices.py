"""Which shared weights are hidden matrices, which optimisers such as Muon orthogonalise.

They map one hidden vector to another: the projections of attention, of dense and shared MLPs and of state-space layers.
Excluded are embeddings, the output head and routers, each of whose rows stands for a token or an expert; and vectors,
convolutions and single-row gates.
"""

from __future__ import annotations

from torch import Tensor, nn

_ROUTERS = frozenset({"gate", "router"})  # parts of module names


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Returns the names of the hidden matrices, experts aside; the model may have sparse experts."""
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
