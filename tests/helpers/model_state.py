"""What a model or a flat vector holds, in forms that tests compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spes_swarm.base.arrays import FloatArray
from spes_swarm.model.experts import PROJECTIONS, SparseExperts
from spes_swarm.model.merge import merged_slots
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.protocol.consensus.layout import Layout


def plain_state_dict(
    model: nn.Module, layout: Layout, flat_N: FloatArray, include_tied: bool = False
) -> dict[str, Tensor]:
    """A plain transformers state dict (fp32, CPU, stacked experts) with the values of a flat vector (N,).

    The model provides the buffers; its own parameters are not read. Tied weights appear once, as safetensors expect;
    with `include_tied` also under their other names, as a strict `load_state_dict` expects.
    """
    assert flat_N.shape == (layout.num_elements,)
    tied = tied_names(model)
    state: dict[str, Tensor] = {}
    for slot in (slot for block in layout.blocks for slot in block.slots):
        values = torch.tensor(flat_N[slot.start : slot.start + slot.size]).view(slot.shape)
        if slot.expert is None:
            state[slot.name] = values
        else:
            stack = state.setdefault(slot.name, torch.empty((layout.num_experts, *slot.shape)))
            stack[slot.expert] = values
    state.update({n: t.cpu().clone() for n, t in model.state_dict().items() if n not in state and n not in tied})
    if include_tied:
        state.update({alias: state[name] for alias, name in tied.items()})
    return state


def tied_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a tied parameter, with its first name."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(parameter, name)
    return {n: first[p] for n, p in model.named_parameters(remove_duplicate=False) if first[p] != n}


def bytes_per_class(sparse: SparseModel, optimizer: torch.optim.Optimizer | None = None) -> dict[str, int]:
    """The bytes of live tensors: `{shared,held,foreign}_{parameters,gradients}`, with an optimiser `_optimizer`, too.

    Foreign gradients and optimiser state are measured, not assumed to be 0: anything that is neither shared nor held
    counts as foreign.
    """
    experts = [module for module in sparse.module.modules() if isinstance(module, SparseExperts)]
    held = {getattr(module, name) for module in experts for name in PROJECTIONS}
    shared = set(sparse.module.parameters()) - held
    foreign = [buffer for module in experts for buffer in module.foreign.buffers()]

    def class_of(tensor: Tensor) -> str:
        return "shared" if tensor in shared else "held" if tensor in held else "foreign"

    kinds = ("parameters", "gradients", *(("optimizer",) if optimizer is not None else ()))
    sizes = {f"{c}_{kind}": 0 for kind in kinds for c in ("shared", "held", "foreign")}
    for tensor in (*shared, *held, *foreign):
        sizes[f"{class_of(tensor)}_parameters"] += tensor.nbytes
        if tensor.grad is not None:
            sizes[f"{class_of(tensor)}_gradients"] += tensor.grad.nbytes
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        sizes[f"{class_of(parameter)}_optimizer"] += sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
    return sizes


def merge_flat(reference_N: FloatArray, layout: Layout, alpha: float, num_neighbours: int) -> FloatArray:
    """The whole merged vector (N,), shared block included."""
    merged_N = reference_N.copy()
    for slot, values in merged_slots(reference_N, layout, alpha, num_neighbours):
        merged_N[slot.start : slot.start + slot.size] = values.reshape(-1)
    return merged_N
