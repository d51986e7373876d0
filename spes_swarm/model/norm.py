"""RMS norms that keep their input for backward, and nothing else of its size.

Composed from library functions, a norm of transformers keeps its input twice, in fp32 and normalised. In a small model
norms are most of the activations of a layer outside its experts.

Tensor suffixes: T tokens, in any number of dimensions; D features.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

_EPSILON_NAMES = ("variance_epsilon", "eps")
_PROBE_FEATURES = 8


class RmsNorm(nn.Module):
    """Returns `weight * x / rms(x)` (T, D), computed in fp32, the quotient rounded to the dtype of x (T, D)."""

    def __init__(self, weight_D: nn.Parameter, epsilon: float) -> None:
        """Takes the parameter of the norm that this one replaces."""
        super().__init__()
        self.weight = weight_D
        self.variance_epsilon = epsilon

    def forward(self, x_TD: Tensor) -> Tensor:
        """Returns the normalised input (T, D)."""
        if torch.compiler.is_compiling():  # the compiler itself decides what is kept
            return _normalised(x_TD, self.weight, self.variance_epsilon)[0]
        output: Tensor = _RmsNorm.apply(x_TD, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return output


def _normalised(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Returns the output (T, D) and the inverse RMS (T, 1)."""
    wide_TD = x_TD.float()
    inverse_T1 = torch.rsqrt(wide_TD.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight_D * (wide_TD * inverse_T1).to(x_TD.dtype), inverse_T1


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        output_TD, inverse_T1 = _normalised(x_TD, weight_D, epsilon)
        ctx.save_for_backward(x_TD, weight_D, inverse_T1)
        return output_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        x_TD, weight_D, inverse_T1 = ctx.saved_tensors
        normed_TD = x_TD.float() * inverse_T1
        grad_weight_D = (grad_TD * normed_TD.to(x_TD.dtype)).flatten(0, -2).sum(0).to(weight_D.dtype)
        grad_normed_TD = (grad_TD * weight_D).float()
        mean_T1 = (grad_normed_TD * normed_TD).mean(-1, keepdim=True)
        grad_x_TD = grad_normed_TD.addcmul_(normed_TD, mean_T1, value=-1).mul_(inverse_T1)
        return grad_x_TD.to(x_TD.dtype), grad_weight_D, None


def replace_norms(model: nn.Module) -> None:
    """Replaces in place every norm that computes what `RmsNorm` does; others stay as they are.

    That is measured, not assumed from names: some models add one to the weight, or round elsewhere.
    """
    for name, module in list(model.named_modules()):
        epsilon = next((value for key in _EPSILON_NAMES if (value := getattr(module, key, None)) is not None), None)
        if name and isinstance(epsilon, float) and _is_rms_norm(module, epsilon):
            weight_D = module.weight
            assert isinstance(weight_D, nn.Parameter)
            model.set_submodule(name, RmsNorm(weight_D, epsilon).train(module.training))


def _is_rms_norm(module: nn.Module, epsilon: float) -> bool:
    weight_D = getattr(module, "weight", None)
    if not isinstance(weight_D, nn.Parameter) or weight_D.dim() != 1 or isinstance(module, nn.LayerNorm | RmsNorm):
        return False
    if [key for key, _ in module.named_parameters()] != ["weight"] or next(module.children(), None) is not None:
        return False
    # A plan of memory runs in modes in which tensors have no data.
    with _disable_current_modes(), torch.no_grad():
        weight_D = nn.Parameter(torch.linspace(0.5, 1.5, _PROBE_FEATURES))
        probe = copy.copy(module)
        probe._parameters = {"weight": weight_D}
        x_TD = torch.linspace(-3.0, 2.0, 4 * _PROBE_FEATURES).view(4, _PROBE_FEATURES)
        try:
            return all(
                torch.equal(probe(x), RmsNorm(weight_D, epsilon)(x)) for x in (x_TD, x_TD.bfloat16(), 1e-4 * x_TD)
            )
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False  # it takes other arguments
