"""The experts of one layer as a single function: what its backward needs, and no more, is kept.

Tensor suffixes: T tokens, K experts per token (top-k), S = T * K routed copies of tokens, D model dim, F expert ffn
dim, E experts, G groups (experts) of one pass.

Composed from library functions, a layer of experts keeps the copies of its tokens, both halves of the first product,
the activation, their product, the second product and, under autocast, a copy of every weight. Here the first product
(S, 2F) is kept and the rest is computed again in backward: that costs no matrix product, because the gradient of the
routing weights follows from the gradient before the second product (`g . (W a) = (W^T g) . a`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_swarm.model.kernels import ExpertKernel, Groups


@dataclass(frozen=True)
class Routing:
    """Where each routed copy of a token goes; computed once per layer."""

    token_S: Tensor  # the token of each row, rows sorted by slot
    row_TK: Tensor  # the row of each choice of each token
    ends_E: Tensor  # int32: one past the last row of each slot
    num_held_rows: int  # the held experts' rows come first

    @classmethod
    def of(cls, slots_TK: Tensor, num_slots: int, num_held: int) -> Routing:
        """Sorts the choices by slot. Waits for the device once: where the held rows end decides shapes."""
        T, K = slots_TK.shape
        slots_S, order_S = torch.sort(slots_TK.reshape(-1), stable=True)
        every_slot_E = torch.arange(num_slots, device=slots_S.device)
        ends_E = torch.searchsorted(slots_S, every_slot_E, right=True, out_int32=True)
        row_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(T * K, device=order_S.device))
        num_held_rows = int(ends_E[num_held - 1]) if num_held > 0 else 0
        return cls(order_S // K, row_S.view(T, K), ends_E, num_held_rows)


class ExpertWeights(Protocol):
    """The matrices of consecutive slots."""

    def matrices(self, projection: str, dtype: torch.dtype) -> Tensor:
        """Returns those of `gate_up_proj` (G, 2F, D), gate rows first, or of `down_proj` (G, D, F)."""


@dataclass(frozen=True)
class _HeldWeights:
    gate_up_HFD: Tensor
    down_HDF: Tensor

    def matrices(self, projection: str, dtype: torch.dtype) -> Tensor:
        return (self.gate_up_HFD if projection == "gate_up_proj" else self.down_HDF).to(dtype)


@dataclass(frozen=True)
class _Pass:
    """Consecutive rows, and the matrices that they meet."""

    weights: ExpertWeights
    groups: Groups
    rows: slice


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matmul of `x` runs: autocast's if enabled for x's device, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def expert_mlp(
    x_TD: Tensor,
    weights_TK: Tensor,
    held: tuple[Tensor, Tensor],
    foreign: ExpertWeights,
    routing: Routing,
    kernel: ExpertKernel,
    act_fn: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns the sum over a token's choices of `weight * down(act(gate(x)) * up(x))`: (T, D), in the dtype of `x_TD`.

    Gradients flow to the tokens and the routing weights through all experts, and to the matrices of the held ones.

    Args:
        x_TD: tokens.
        weights_TK: routing weights of their choices.
        held: the stacked matrices of the held experts: (H, 2F, D) and (H, D, F).
        foreign: those of the others.
        routing: where each choice goes.
        kernel: grouped matrix products.
        act_fn: the activation, elementwise.
    """
    output: Tensor = _ExpertMlp.apply(x_TD, weights_TK, *held, foreign, routing, kernel, act_fn)  # type: ignore[no-untyped-call]
    return output


class _ExpertMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_TK: Tensor,
        gate_up_HFD: Tensor,
        down_HDF: Tensor,
        foreign: ExpertWeights,
        routing: Routing,
        kernel: ExpertKernel,
        act_fn: Callable[[Tensor], Tensor],
    ) -> Tensor:
        layer = _Layer(_HeldWeights(gate_up_HFD, down_HDF), foreign, routing, kernel)
        gate_up_SF = layer.product(x_TD.to(compute_dtype(x_TD))[routing.token_S], "gate_up_proj")
        gate_SF, up_SF = gate_up_SF.chunk(2, dim=-1)
        y_SD = layer.product(act_fn(gate_SF) * up_SF, "down_proj")
        ctx.save_for_backward(x_TD, weights_TK, gate_up_HFD, down_HDF, gate_up_SF)
        ctx.rest = foreign, routing, kernel, act_fn
        return _to_tokens(y_SD, routing, weights_TK).to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, gate_up_HFD, down_HDF, gate_up_SF = ctx.saved_tensors
        foreign, routing, kernel, act_fn = ctx.rest
        layer = _Layer(_HeldWeights(gate_up_HFD, down_HDF), foreign, routing, kernel)
        dtype = gate_up_SF.dtype
        grad_SD = grad_TD.to(dtype)[routing.token_S]
        # The routing weight is a factor of the whole row, so it can be applied after the product.
        grad_a_SF = layer.input_gradient(grad_SD, "down_proj")
        weight_S1 = torch.empty((len(grad_SD), 1), dtype=dtype, device=x_TD.device)
        weight_S1[routing.row_TK.reshape(-1), 0] = weights_TK.reshape(-1).to(dtype)
        with torch.enable_grad():
            leaf_SF = gate_up_SF.detach().requires_grad_()
            gate_SF, up_SF = leaf_SF.chunk(2, dim=-1)
            a_SF = act_fn(gate_SF) * up_SF
        grad_weights_TK = (grad_a_SF * a_SF.detach()).sum(dim=-1)[routing.row_TK].to(weights_TK.dtype)
        (grad_h_SF,) = torch.autograd.grad(a_SF, leaf_SF, grad_a_SF.mul_(weight_S1))
        weighted_a_SF = a_SF.detach().mul_(weight_S1)
        del grad_a_SF, a_SF, leaf_SF, gate_SF, up_SF
        grad_down_HDF = layer.held_gradient(grad_SD, weighted_a_SF, down_HDF) if ctx.needs_input_grad[3] else None
        del grad_SD, weighted_a_SF
        grad_gate_up_HFD = None
        if ctx.needs_input_grad[2]:
            grad_gate_up_HFD = layer.held_gradient(grad_h_SF, x_TD.to(dtype)[routing.token_S], gate_up_HFD)
        grad_x_TD = None
        if ctx.needs_input_grad[0]:
            grad_x_TD = _to_tokens(layer.input_gradient(grad_h_SF, "gate_up_proj"), routing).to(x_TD.dtype)
        return grad_x_TD, grad_weights_TK, grad_gate_up_HFD, grad_down_HDF, None, None, None, None


class _Layer:
    """Products of sorted rows with the matrices of all experts, in a pass for the held ones and one for the others."""

    def __init__(self, held: _HeldWeights, foreign: ExpertWeights, routing: Routing, kernel: ExpertKernel) -> None:
        self._kernel = kernel
        self._num_held_rows = split = routing.num_held_rows
        num_held, num_rows = len(held.down_HDF), len(routing.token_S)
        # Only passes that have rows.
        self._passes = []
        if split > 0:
            self._passes.append(_Pass(held, Groups(routing.ends_E[:num_held]), slice(0, split)))
        if split < num_rows:
            self._passes.append(_Pass(foreign, Groups(routing.ends_E[num_held:] - split), slice(split, num_rows)))
        self._feature_dims = {"gate_up_proj": held.gate_up_HFD.shape[1:], "down_proj": held.down_HDF.shape[1:]}

    def product(self, x_SX: Tensor, projection: str) -> Tensor:
        """Returns the rows' products with their expert's matrices."""
        outputs = [
            self._kernel.product(x_SX[p.rows], p.weights.matrices(projection, x_SX.dtype), p.groups)
            for p in self._passes
        ]
        return _joined(outputs, x_SX, self._feature_dims[projection][0])

    def input_gradient(self, grad_SX: Tensor, projection: str) -> Tensor:
        """Returns the gradient of the rows, given that of their products."""
        outputs = [
            self._kernel.input_gradient(grad_SX[p.rows], p.weights.matrices(projection, grad_SX.dtype), p.groups)
            for p in self._passes
        ]
        return _joined(outputs, grad_SX, self._feature_dims[projection][1])

    def held_gradient(self, grad_SY: Tensor, x_SX: Tensor, parameter_HYX: Tensor) -> Tensor | None:
        """Returns the gradient of the held experts' matrices.

        Without rows it is zeros, as in the untouched model; without held experts it is None, so that no optimiser makes
        state for them.
        """
        if self._num_held_rows == 0:
            return torch.zeros_like(parameter_HYX) if len(parameter_HYX) else None
        held = self._passes[0]
        gradient_HYX = self._kernel.weight_gradient(grad_SY[held.rows], x_SX[held.rows], held.groups)
        return gradient_HYX.to(parameter_HYX.dtype)


def _joined(outputs: Sequence[Tensor], like: Tensor, num_features: int) -> Tensor:
    if not outputs:
        return like.new_empty((0, num_features))
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs))


def _to_tokens(y_SD: Tensor, routing: Routing, weights_TK: Tensor | None = None) -> Tensor:
    """Returns the sum (T, D) over each token's choices, of the rows or of the rows times their weights.

    One choice at a time: the order of additions is fixed, where an index_add would race on CUDA, and no (T, K, D)
    exists.
    """
    total_TD: Tensor | None = None
    for choice in range(routing.row_TK.shape[1]):
        y_TD = y_SD[routing.row_TK[:, choice]]
        if weights_TK is not None:
            y_TD = y_TD * weights_TK[:, choice, None]
        # In fp32 at least: bf16 would round each of the sums.
        total_TD = y_TD.to(torch.promote_types(y_TD.dtype, torch.float32)) if total_TD is None else total_TD.add_(y_TD)
    assert total_TD is not None
    return total_TD
