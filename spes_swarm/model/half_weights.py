"""Trained weights in two halves: the upper one, a bf16 number, is the parameter; the lower one is kept beside it.

The parameter is the fp32 master weight rounded to bf16, and the lower half (int16) is what the rounding left out, in
units of the master's last place. Together they are the master, bit for bit (of a NaN: a NaN) and in the same number of
bytes.
Forward and backward see the parameter. The optimiser, rounds and checkpoints see the master, through `read_master` and
`write_master`, which also serve ordinary parameters.

Splitting rounds to nearest, ties away from zero. bf16 autocast rounds ties to even and otherwise computes with the same
numbers, so a step equals that of fp32 weights under autocast, except at ties.

Tensor suffixes: N elements of a parameter, of one row of it, or of a piece of it, flat. V vocabulary, D features.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_ROUND = 1 << 15  # half of what the lower 16 bits can count
_QUIET_NAN = 1 << 6  # the highest bit of the mantissa of a bf16 number
_LOWER = "lower_half"  # the attribute of a parameter that holds its lower half
# Masters are assembled this many elements at a time: the largest parameters have hundreds of millions.
_PIECE_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class LowerHalves:
    """Where the lower halves are kept: `device`, or None if this process does not keep them.

    Ranks that take no optimiser steps do not need them.
    """

    device: torch.device | None


def split(master_N: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the upper halves of fp32 numbers (bfloat16) and the lower ones (int16).

    Of a NaN the upper half is one as well, and `join` makes some NaN of both.
    """
    bits_N = master_N.view(torch.int32)
    rounded_N = (bits_N + _ROUND) >> 16
    # Rounding could carry a NaN, such as that of CUDA (all bits set but the sign), into a zero of the other sign.
    upper_N = torch.where(master_N.isnan(), (bits_N >> 16) | _QUIET_NAN, rounded_N).to(torch.int16)
    lower_N = (bits_N - (upper_N.to(torch.int32) << 16)).to(torch.int16)
    return upper_N.view(torch.bfloat16), lower_N


def join(upper_N: Tensor, lower_N: Tensor) -> Tensor:
    """Inverse of `split`, on the device of the upper halves."""
    lower_N = lower_N.to(upper_N.device, non_blocking=True)
    return ((upper_N.view(torch.int16).to(torch.int32) << 16) + lower_N.to(torch.int32)).view(torch.float32)


def halve(parameter: nn.Parameter, lower: LowerHalves) -> None:
    """Makes an fp32 parameter bf16 in place, and keeps its lower half; its gradients stay fp32."""
    master = parameter.detach()
    parameter.data = torch.empty_like(master, dtype=torch.bfloat16)
    parameter.grad_dtype = torch.float32
    if lower.device is not None:
        pinned = lower.device.type == "cpu" and torch.cuda.is_available()
        lower_half = torch.empty(master.shape, dtype=torch.int16, device=lower.device, pin_memory=pinned)
        setattr(parameter, _LOWER, lower_half)
    write_master(parameter, master)


def is_halved(parameter: Tensor) -> bool:
    """Returns True if the parameter has been halved and its lower half is here."""
    return hasattr(parameter, _LOWER)


def read_piece(parameter: Tensor, piece: slice) -> Tensor:
    """Returns a range of the flat master (N,): a copy if the parameter is halved, else a view of it."""
    weights_N = parameter.detach().view(-1)[piece]
    return join(weights_N, getattr(parameter, _LOWER).view(-1)[piece]) if is_halved(parameter) else weights_N


def write_piece(parameter: Tensor, piece: slice, master_N: Tensor) -> None:
    """Overwrites a range of the flat master; it is rounded if another process keeps the lower halves."""
    weights_N = parameter.detach().view(-1)[piece]
    if weights_N.dtype != torch.bfloat16:
        if weights_N.data_ptr() != master_N.data_ptr():  # `read_piece` returned a view
            weights_N.copy_(master_N)
        return
    upper_N, lower_N = split(master_N.to(weights_N.device, torch.float32))
    weights_N.copy_(upper_N)
    if is_halved(parameter):
        getattr(parameter, _LOWER).view(-1)[piece].copy_(lower_N, non_blocking=True)


def _pieces(parameter: Tensor, row: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields ranges of a parameter, or of one of its rows, and their positions in that row."""
    size = parameter.numel() if row is None else parameter[0].numel()
    start = 0 if row is None else row * size
    for begin in range(0, size, _PIECE_ELEMENTS):
        end = min(begin + _PIECE_ELEMENTS, size)
        yield slice(start + begin, start + end), slice(begin, end)


def copy_master(parameter: Tensor, out: Tensor, row: int | None = None) -> None:
    """Copies the master of a parameter, or of one row of it, to `out`, of the same number of elements."""
    if not is_halved(parameter):
        weights = parameter.detach()
        out.copy_((weights if row is None else weights[row]).view(out.shape))
        return
    out_N = out.view(-1)
    for piece, inside in _pieces(parameter, row):
        out_N[inside].copy_(read_piece(parameter, piece))


def read_master(parameter: Tensor, row: int | None = None) -> Tensor:
    """Returns the master of a parameter, or of one row of it: a copy if it is halved, else a view."""
    weights = parameter.detach() if row is None else parameter.detach()[row]
    if not is_halved(parameter):
        return weights
    master = torch.empty_like(weights, dtype=torch.float32)
    copy_master(parameter, master, row)
    return master


def write_master(parameter: Tensor, values: Tensor, row: int | None = None) -> None:
    """Overwrites the master of a parameter, or of one row of it."""
    if parameter.dtype != torch.bfloat16:
        weights = parameter.detach()
        (weights if row is None else weights[row]).copy_(values)
        return
    values_N = values.reshape(-1)
    for piece, inside in _pieces(parameter, row):
        write_piece(parameter, piece, values_N[inside])


def halve_matrices(model: nn.Module, lower: LowerHalves) -> None:
    """Halves in place the weights of all `nn.Linear` and `nn.Embedding` modules that no other kind of module uses.

    The other parameters, such as norms and routers, are small, and may be used where autocast does not cast.
    """
    users: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[parameter].append(module)
    for parameter, modules in users.items():
        if parameter.dim() == 2 and all(type(module) in (nn.Linear, nn.Embedding) for module in modules):
            halve(parameter, lower)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Embedding and module.weight.dtype == torch.bfloat16:
            model.set_submodule(name, HalfEmbedding(module).train(module.training))


class HalfEmbedding(nn.Module):
    """An embedding whose weights are bf16. Its output and gradient are fp32, as for an fp32 embedding.

    In bf16, every layer would round the residual stream, and every addition the gradient of a frequent token.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        """Takes the parameter of the embedding that this one replaces."""
        super().__init__()
        self.weight = embedding.weight
        self.padding_idx = embedding.padding_idx

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the vectors (..., D) of ids (...)."""
        output: Tensor = _Embed.apply(ids, self.weight, self.padding_idx)  # type: ignore[no-untyped-call]
        return output


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VD: Tensor, padding_idx: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rest = len(weight_VD), -1 if padding_idx is None else padding_idx
        return nn.functional.embedding(ids, weight_VD).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (ids,) = ctx.saved_tensors
        num_ids, padding_idx = ctx.rest
        return None, torch.ops.aten.embedding_dense_backward(grad, ids, num_ids, padding_idx, False), None
