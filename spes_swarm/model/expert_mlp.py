"""The experts of one layer as a single function: what its backward needs, and no more, is kept.

Tensor suffixes: T tokens, K experts per token (top-k), S = T * K routed copies of tokens, N copies of one pass, D model
dim, F expert ffn dim, E experts, H held experts, G groups (experts) of one pass, X and Y features.

Composed from library functions, a layer of experts keeps the copies of its tokens, both halves of the first product,
the activation, their product, the second product and, under autocast, a copy of every weight. Here the first product
(S, 2F) is kept and the rest is computed again in backward: that costs no matrix product, because the gradient of the
routing weights follows from the gradient before the second product (`g . (W a) = (W^T g) . a`).

A GPU computes all held experts in one pass and all others in a second one. A CPU has nothing to gain from that: it
takes one expert at a time, so that only one expert's copies of tokens, and one expanded matrix, exist at once.

A kernel that moves rows with its own operations moves the rows of both passes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_swarm.model.kernels import Dispatch, ExpertKernel, Groups, SortedChoices


@dataclass(frozen=True)
class Routing:
    """Where each routed copy of a token goes; computed once per layer."""

    token_S: Tensor  # the token of each row, rows sorted by slot
    row_TK: Tensor  # the row of each choice of each token
    ends_E: Tensor  # int32: one past the last row of each slot
    counts: tuple[int, ...]  # rows of each slot; reading them is the only wait for a GPU, because they decide shapes
    num_held_rows: int  # the held experts' rows come first
    one_by_one: bool  # one expert is computed at a time
    choices: SortedChoices | None = None  # for a kernel that moves rows itself

    @classmethod
    def of(cls, slots_TK: Tensor, num_slots: int, num_held: int, dispatch: Dispatch | None = None) -> Routing:
        """Sorts the choices by slot, with the operations of `dispatch` if there is one."""
        T, K = slots_TK.shape
        choices = None
        if dispatch is not None and T > 0:
            choices = dispatch.sort(slots_TK, num_slots)
            order_S, ends_E = choices.order_S.long(), choices.ends_E
        else:
            slots_S, order_S = torch.sort(slots_TK.reshape(-1), stable=True)
            every_slot_E = torch.arange(num_slots, device=slots_S.device)
            ends_E = torch.searchsorted(slots_S, every_slot_E, right=True, out_int32=True)
        row_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(T * K, device=order_S.device))
        counts = tuple(Groups(ends_E).counts)
        one_by_one = choices is None and slots_TK.device.type == "cpu"
        return cls(order_S // K, row_S.view(T, K), ends_E, counts, sum(counts[:num_held]), one_by_one, choices)

    def dispatch_of(self, kernel: ExpertKernel, features: int) -> Dispatch | None:
        """Returns the operations with which `kernel` moves rows of this many features; None: torch moves them."""
        if self.choices is None or kernel.dispatch is None or not kernel.dispatch.fits(len(self.token_S), features):
            return None
        return kernel.dispatch


class ExpertWeights(Protocol):
    """The matrices of consecutive slots."""

    def matrices(self, projection: str, dtype: torch.dtype, slots: slice) -> Tensor:
        """Returns those of `gate_up_proj` (G, 2F, D), gate rows first, or of `down_proj` (G, D, F).

        `slots` counts from the first of these slots.
        """


class ForeignExperts(Protocol):
    """The experts that are not held; `model/foreign` decides where they are stored."""

    def fetch(self) -> ExpertWeights:
        """Returns them where a pass can use them; called once in each forward and backward pass of the layer."""


@dataclass(frozen=True)
class _HeldWeights:
    gate_up_HFD: Tensor
    down_HDF: Tensor

    def matrices(self, projection: str, dtype: torch.dtype, slots: slice) -> Tensor:
        return (self.gate_up_HFD if projection == "gate_up_proj" else self.down_HDF)[slots].to(dtype)


@dataclass(frozen=True)
class _Pass:
    """Consecutive rows, and the experts that they meet."""

    weights: ExpertWeights
    slots: slice  # of these weights
    groups: Groups
    rows: slice
    is_held: bool


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which a matmul of `x` runs: autocast's if enabled for x's device, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def expert_mlp(
    x_TD: Tensor,
    weights_TK: Tensor,
    held: tuple[Tensor, Tensor],
    foreign: ForeignExperts,
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
        foreign: ForeignExperts,
        routing: Routing,
        kernel: ExpertKernel,
        act_fn: Callable[[Tensor], Tensor],
    ) -> Tensor:
        dtype = compute_dtype(x_TD)
        dispatch = routing.dispatch_of(kernel, x_TD.shape[1])
        tokens, sums = _TokenRows(routing, x_TD, dtype, dispatch), _TokenSums(routing, x_TD, dispatch, weights_TK)
        products = []
        for one in _passes(_HeldWeights(gate_up_HFD, down_HDF), foreign.fetch(), routing):
            x_ND = tokens.of(one.rows)
            gate_up_NF = kernel.product(x_ND, one.weights.matrices("gate_up_proj", dtype, one.slots), one.groups)
            gate_NF, up_NF = gate_up_NF.chunk(2, dim=-1)
            a_NF = act_fn(gate_NF) * up_NF
            sums.add(one.rows, kernel.product(a_NF, one.weights.matrices("down_proj", dtype, one.slots), one.groups))
            products.append(gate_up_NF)
        ctx.save_for_backward(x_TD, weights_TK, gate_up_HFD, down_HDF, *products)
        ctx.rest = foreign, routing, kernel, act_fn, dtype
        return sums.total().to(x_TD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, gate_up_HFD, down_HDF, *products = ctx.saved_tensors
        foreign, routing, kernel, act_fn, dtype = ctx.rest
        passes = _passes(_HeldWeights(gate_up_HFD, down_HDF), foreign.fetch(), routing)
        dispatch = routing.dispatch_of(kernel, x_TD.shape[1])
        tokens, gradients = (_TokenRows(routing, each_TD, dtype, dispatch) for each_TD in (x_TD, grad_TD))
        sums = _TokenSums(routing, x_TD, dispatch)
        held_gate_up = _HeldGradient(gate_up_HFD, kernel, ctx.needs_input_grad[2])
        held_down = _HeldGradient(down_HDF, kernel, ctx.needs_input_grad[3])
        weight_S = torch.empty(len(routing.token_S), dtype=dtype, device=x_TD.device)
        weight_S[routing.row_TK.reshape(-1)] = weights_TK.reshape(-1).to(dtype)
        grad_weight_S = torch.empty_like(weight_S)
        for one, gate_up_NF in zip(passes, products, strict=True):
            weight_N1 = weight_S[one.rows, None]
            grad_ND = gradients.of(one.rows)
            # The routing weight is a factor of the whole row, so it can be applied after the product.
            down_GDF = one.weights.matrices("down_proj", dtype, one.slots)
            grad_a_NF = kernel.input_gradient(grad_ND, down_GDF, one.groups)
            del down_GDF
            with torch.enable_grad():
                leaf_NF = gate_up_NF.detach().requires_grad_()
                gate_NF, up_NF = leaf_NF.chunk(2, dim=-1)
                a_NF = act_fn(gate_NF) * up_NF
            torch.sum(grad_a_NF * a_NF.detach(), dim=-1, out=grad_weight_S[one.rows])
            (grad_h_NF,) = torch.autograd.grad(a_NF, leaf_NF, grad_a_NF.mul_(weight_N1))
            del grad_a_NF, leaf_NF, gate_NF, up_NF
            if one.is_held:
                held_down.add(one, grad_ND, a_NF.detach().mul_(weight_N1))
            del grad_ND, a_NF
            if one.is_held:
                held_gate_up.add(one, grad_h_NF, tokens.of(one.rows))
            if ctx.needs_input_grad[0]:
                gate_up_GFD = one.weights.matrices("gate_up_proj", dtype, one.slots)
                sums.add(one.rows, kernel.input_gradient(grad_h_NF, gate_up_GFD, one.groups))
        grad_x_TD = sums.total().to(x_TD.dtype) if ctx.needs_input_grad[0] else None
        grad_weights_TK = grad_weight_S[routing.row_TK].to(weights_TK.dtype)
        return grad_x_TD, grad_weights_TK, held_gate_up.total(), held_down.total(), None, None, None, None


def _passes(held: _HeldWeights, foreign: ExpertWeights, routing: Routing) -> list[_Pass]:
    """Returns the passes that have rows, those of held experts first."""
    num_held, split, num_rows = len(held.down_HDF), routing.num_held_rows, len(routing.token_S)
    if not routing.one_by_one:
        ends_E, counts = routing.ends_E, routing.counts
        both = Groups(ends_E[:num_held], counts[:num_held]), Groups(ends_E[num_held:] - split, counts[num_held:])
        halves = [
            _Pass(held, slice(None), both[0], slice(0, split), True),
            _Pass(foreign, slice(None), both[1], slice(split, num_rows), False),
        ]
        return [half for half in halves if half.rows.stop > half.rows.start]
    found = []
    for slot, (count, end) in enumerate(zip(routing.counts, accumulate(routing.counts), strict=True)):
        if count:
            is_held = slot < num_held
            first = slot if is_held else slot - num_held
            weights: ExpertWeights = held if is_held else foreign
            found.append(
                _Pass(weights, slice(first, first + 1), Groups.single(count), slice(end - count, end), is_held)
            )
    return found


class _HeldGradient:
    """The gradient of the held experts' stacked matrices.

    An expert without rows has zeros, as in the untouched model. Without held experts there is no gradient, so that no
    optimiser makes state for them.
    """

    def __init__(self, parameter_HYX: Tensor, kernel: ExpertKernel, is_needed: bool) -> None:
        self._kernel = kernel
        self._total_HYX = torch.zeros_like(parameter_HYX) if is_needed and len(parameter_HYX) else None

    def add(self, one: _Pass, grad_y_NY: Tensor, x_NX: Tensor) -> None:
        """Writes the gradients of the experts of one pass."""
        if self._total_HYX is not None:
            self._total_HYX[one.slots] = self._kernel.weight_gradient(grad_y_NY, x_NX, one.groups)

    def total(self) -> Tensor | None:
        """Returns the gradient (H, ...)."""
        return self._total_HYX


class _TokenRows:
    """The rows of tokens, sorted by slot: (S, D). Without a dispatch, only the rows of one pass exist at a time."""

    def __init__(self, routing: Routing, tokens_TD: Tensor, dtype: torch.dtype, dispatch: Dispatch | None) -> None:
        self._routing = routing
        self._tokens_TD = tokens_TD
        self._dtype = dtype
        self._dispatch = dispatch
        self._rows_SD: Tensor | None = None

    def of(self, rows: slice) -> Tensor:
        """Returns the rows of one pass, (N, D), which must not be modified."""
        if self._dispatch is None:
            return self._tokens_TD[self._routing.token_S[rows]].to(self._dtype)
        if self._rows_SD is None:
            assert self._routing.choices is not None
            self._rows_SD = self._dispatch.gather(self._tokens_TD.to(self._dtype), self._routing.choices)
        return self._rows_SD[rows]


class _TokenSums:
    """Sums of rows, or of rows times their routing weights, by token: (T, D), in fp32 at least.

    bf16 would round each of the sums. The order of additions is fixed: on a CPU that of the passes, on a GPU, where an
    `index_add` would race, that of the choices. No (T, K, D) exists. None of this applies to a dispatch, which decides
    how it adds.
    """

    def __init__(
        self, routing: Routing, like_TD: Tensor, dispatch: Dispatch | None, weights_TK: Tensor | None = None
    ) -> None:
        self._routing = routing
        self._dispatch = dispatch
        self._like_TD = like_TD
        self._weights_TK = weights_TK
        self._dtype = torch.promote_types(like_TD.dtype, torch.float32)
        self._rows: list[Tensor] = []
        if routing.one_by_one:
            self._total_TD = torch.zeros_like(like_TD, dtype=self._dtype)
            if weights_TK is not None:
                self._weight_S = torch.empty(len(routing.token_S), dtype=weights_TK.dtype, device=like_TD.device)
                self._weight_S[routing.row_TK.reshape(-1)] = weights_TK.reshape(-1)

    def add(self, rows: slice, y_ND: Tensor) -> None:
        """Adds the rows of one pass; passes come in order."""
        if not self._routing.one_by_one:
            self._rows.append(y_ND)
            return
        if self._weights_TK is not None:
            y_ND = y_ND * self._weight_S[rows, None]  # not in place: activation checkpointing may have kept the product
        self._total_TD.index_add_(0, self._routing.token_S[rows], y_ND.to(self._dtype))

    def total(self) -> Tensor:
        """Returns the sums."""
        if self._routing.one_by_one:
            return self._total_TD
        y_SD = torch.cat(self._rows) if self._rows else self._like_TD[:0]
        if self._dispatch is not None:
            assert self._routing.choices is not None
            return self._dispatch.combine(y_SD, self._routing.choices, self._weights_TK)
        total_TD: Tensor | None = None
        for choice in range(self._routing.row_TK.shape[1]):
            y_TD = y_SD[self._routing.row_TK[:, choice]]
            if self._weights_TK is not None:
                y_TD = y_TD * self._weights_TK[:, choice, None]
            total_TD = y_TD.to(self._dtype) if total_TD is None else total_TD.add_(y_TD)
        assert total_TD is not None
        return total_TD
