"""The last layer and its losses, a few rows of logits at a time.

The logits of a batch are by far its largest tensor: 256 sequences of 2048 tokens with Qwen's vocabulary of 151,665
would take 318 GB in fp32. So the layer and the loss are one function here, and its gradients are computed along with
it, chunk by chunk; this takes no additional matrix product, and what is kept is the gradient of the weight.

Tensor suffixes: N rows (positions), C rows of one chunk, D model dim, V vocabulary, P vocabulary with padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spes_swarm.model.expert_mlp import compute_dtype
from spes_swarm.model.experts import kernel_of_any_dtype

IGNORED_TARGET = -100
# Logits in one chunk: 64 MiB in fp32. A GPU needs more rows for each read of the weight.
_CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**26}

# In bf16, rows of logits start at multiples of 128 bytes. Without that, cuBLAS multiplies by Qwen's 151,665 tokens with
# kernels for older tensor cores.
_ALIGNED_COLUMNS = 64

_heads: WeakKeyDictionary[nn.Module, nn.Linear | None] = WeakKeyDictionary()
_planned_device: str | None = None


def output_head(model: nn.Module) -> nn.Linear | None:
    """Returns the layer whose product with the last hidden states is the model's logits; None if they are not that.

    Some architectures scale, cap or shift their logits. This is not a question of names, so it is measured, once for
    every model: on two tokens, in evaluation mode, in fp32 with any kernel, and without compiling anything for it.
    """
    if model not in _heads:
        _heads[model] = _measured_head(model)
    return _heads[model]


def assume_output_head(model: nn.Module) -> None:
    """Assumes that a model's logits are the product with its output embeddings; for tensors without data."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    _heads[model] = head if isinstance(head, nn.Linear) else None


def aligned(vocabulary: int) -> int:
    """Returns the columns of logits with their padding, which they have in the products of 16-bit numbers."""
    return vocabulary + -vocabulary % _ALIGNED_COLUMNS


@contextmanager
def chunks_of(device_type: str) -> Iterator[None]:
    """Makes chunks as large as on this type of device, for plans for a GPU on a CPU. Not thread-safe."""
    global _planned_device
    before, _planned_device = _planned_device, device_type
    try:
        yield
    finally:
        _planned_device = before


@torch.no_grad()
def _measured_head(model: Any) -> nn.Linear | None:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or "bias" in dict(head.named_parameters()) or model.base_model is model:
        return None
    ids_BS = torch.tensor([[0, 1]], device=head.weight.device)
    was_training = model.training
    model.eval()
    try:
        with (
            torch.autocast(head.weight.device.type, enabled=False),
            torch.compiler.set_stance("force_eager"),
            kernel_of_any_dtype(model),
        ):
            logits_BSV = model(input_ids=ids_BS, use_cache=False).logits
            hidden_BSD = model.base_model(input_ids=ids_BS, use_cache=False).last_hidden_state
            same = torch.allclose(head(hidden_BSD), logits_BSV, rtol=1e-4, atol=1e-6)
    finally:
        model.train(was_training)
    return head if same else None


def linear_loss(rows_NX: Tensor, weight_VD: Tensor | None, targets_N: Tensor, z_weight: float) -> tuple[Tensor, ...]:
    """Returns (loss, cross-entropy, logit z-loss), fp32 scalars of which only the first has gradients.

    The loss is `cross_entropy + z_weight * logit_z`, each a mean over the targets that are not `IGNORED_TARGET`; 0 if
    all are.

    Args:
        rows_NX: hidden states (N, D), or the logits (N, V) if there is no weight.
        weight_VD: the logits are `hidden @ weight.T`.
        targets_N: int64.
        z_weight: factor of the mean squared log-sum-exp.
    """
    losses: tuple[Tensor, ...] = _LinearLoss.apply(rows_NX, weight_VD, targets_N, z_weight)  # type: ignore[no-untyped-call]
    return losses


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_NX: Tensor, weight_VD: Tensor | None, targets_N: Tensor, z_weight: float
    ) -> tuple[Tensor, ...]:
        head = _Head(rows_NX, weight_VD)
        valid_N = targets_N != IGNORED_TARGET
        share_N = valid_N / valid_N.sum().clamp_min(1)
        grad_NX = torch.empty_like(rows_NX) if ctx.needs_input_grad[0] else None
        grad_VD = torch.zeros_like(weight_VD) if weight_VD is not None and ctx.needs_input_grad[1] else None
        nats = torch.zeros((), device=rows_NX.device)
        squares = nats.clone()
        for rows in head.chunks():
            logits_CV = head.logits(rows)
            targets_C1 = targets_N[rows].clamp_min(0).unsqueeze(1)
            target_logits_C1, largest_C1 = logits_CV.gather(1, targets_C1), logits_CV.amax(dim=-1, keepdim=True)
            # In place: torch.logsumexp makes another tensor of this size.
            exp_CV = logits_CV.sub_(largest_C1).exp_()
            sum_C1 = exp_CV.sum(dim=-1, keepdim=True)
            lse_C1, share_C1 = largest_C1 + sum_C1.log(), share_N[rows].unsqueeze(1)
            nats += ((lse_C1 - target_logits_C1) * share_C1).sum()
            squares += (lse_C1.square() * share_C1).sum()
            if grad_NX is not None or grad_VD is not None:
                # d lse / d logits = softmax; the cross-entropy also has - onehot(target).
                exp_CV.mul_(share_C1 * (1.0 + 2.0 * z_weight * lse_C1) / sum_C1)
                exp_CV.scatter_add_(1, targets_C1, -share_C1)
                head.differentiate(rows, exp_CV, grad_NX, grad_VD)
            del logits_CV, exp_CV  # before the next chunk is made
        ctx.gradients = grad_NX, grad_VD
        ctx.mark_non_differentiable(nats, squares)
        return nats + z_weight * squares, nats, squares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because these are the largest tensors of a step; a second backward finds none.
        gradients, ctx.gradients = ctx.gradients, None
        grad_NX, grad_VD = (None if each is None else each.mul_(grad) for each in gradients)
        return grad_NX, grad_VD, None, None


class _Head:
    """The product of hidden states and weight, in the dtype of autocast if it is on."""

    def __init__(self, rows_NX: Tensor, weight_VD: Tensor | None) -> None:
        self._dtype = compute_dtype(rows_NX)
        self._rows_NX = rows_NX.to(self._dtype)
        self._vocabulary = len(rows_NX.T if weight_VD is None else weight_VD)
        is_padded = weight_VD is not None and self._dtype.itemsize == 2
        self._padding = aligned(self._vocabulary) - self._vocabulary if is_padded else 0
        self._weight_PD = None if weight_VD is None else self._padded(weight_VD, 0)

    def _padded(self, values: Tensor, dim: int) -> Tensor:
        """Returns values in the dtype of the products, with padding at the end of the vocabulary, a dimension."""
        if not self._padding:
            return values.to(self._dtype)
        shape = [size + self._padding * (index == dim) for index, size in enumerate(values.shape)]
        padded = values.new_zeros(shape, dtype=self._dtype)
        padded.narrow(dim, 0, self._vocabulary).copy_(values)
        return padded

    def chunks(self) -> Iterator[slice]:
        """Yields the rows of each chunk."""
        elements = _CHUNK_ELEMENTS["cuda" if (_planned_device or self._rows_NX.device.type) == "cuda" else "cpu"]
        step = max(1, elements // self._vocabulary)
        for start in range(0, len(self._rows_NX), step):
            yield slice(start, min(start + step, len(self._rows_NX)))

    def logits(self, rows: slice) -> Tensor:
        """Returns new logits (C, V) in fp32, or in the dtype of the rows if that is wider."""
        rows_CX = self._rows_NX[rows]
        logits_CV = rows_CX.clone() if self._weight_PD is None else (rows_CX @ self._weight_PD.T)[:, : self._vocabulary]
        return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).contiguous()

    def differentiate(self, rows: slice, grad_CV: Tensor, grad_NX: Tensor | None, grad_VD: Tensor | None) -> None:
        """Writes the gradient of these rows, and adds their share of the weight's."""
        cast_CP = self._padded(grad_CV, 1)
        if grad_NX is not None:
            grad_NX[rows] = cast_CP if self._weight_PD is None else cast_CP @ self._weight_PD
        if grad_VD is None:
            return
        if grad_VD.dtype == cast_CP.dtype and not self._padding:
            grad_VD.addmm_(cast_CP.T, self._rows_NX[rows])
        else:
            grad_VD += (cast_CP.T @ self._rows_NX[rows])[: self._vocabulary]


@torch.no_grad()
def linear_nats(rows_NX: Tensor, weight_VD: Tensor | None, targets_N: Tensor) -> Tensor:
    """Returns the cross-entropy (N,) of every row in nats, 0 without a target; arguments as of `linear_loss`."""
    head = _Head(rows_NX, weight_VD)
    nats = [
        nn.functional.cross_entropy(head.logits(rows), targets_N[rows], ignore_index=IGNORED_TARGET, reduction="none")
        for rows in head.chunks()
    ]
    return torch.cat(nats)
