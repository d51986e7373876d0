"""AdamW whose moments are on the device or in host memory.

Tensor suffixes: N elements of a parameter, or of a piece of it, flat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spes_swarm.training.optimiser.moment_storage import MOMENTS, pieces
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser


class PeerAdamW(PeerOptimiser):
    """torch's fused AdamW; `form`, one of `moment_storage.FORMS`, says where the moments are.

    `device` is torch's own step. With `host` the same step is taken piece by piece: moments are fetched, updated, and
    written back. This takes 8 bytes per element of a piece, 8 MB on a GPU, whatever the size of the model.
    """

    expert_moments: ClassVar[tuple[str, ...]] = MOMENTS

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        form: str = "device",
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0}, form)

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """See PeerOptimiser."""
        return MOMENTS

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        """Updates every parameter that has a gradient."""
        self._step_adamw(self.param_groups)
        self._synchronise()

    def _step_adamw(self, groups: Iterable[dict[str, Any]]) -> None:
        for group in groups:
            with_gradient = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not self._on_host:
                self._update_whole(with_gradient, group)
                continue
            for parameter in with_gradient:
                self._update_in_pieces(parameter, group)

    def _synchronise(self) -> None:
        """Waits for copies to host memory: they are asynchronous, and others read it without knowing of them."""
        if not self._on_host:
            return
        devices = {parameter.device for group in self.param_groups for parameter in group["params"]}
        for device in devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()

    def _update_whole(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        if not parameters:  # torch's function wants at least one
            return
        states = [self._state_of(parameter) for parameter in parameters]
        first, second = ([state[moment] for state in states] for moment in MOMENTS)
        _adamw(
            [parameter.detach() for parameter in parameters],
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            first,
            second,
            [state["step"] for state in states],
            group,
        )

    def _update_in_pieces(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        assert parameter.grad is not None
        state, device = self._state_of(parameter), parameter.device
        weights_N, gradient_N = parameter.detach().view(-1), parameter.grad.reshape(-1)
        num_steps = self.num_steps(parameter)
        for piece in pieces(0, parameter.numel(), device):
            stored = [state[moment].view(-1)[piece] for moment in MOMENTS]
            first_N, second_N = (stored_N.to(device, non_blocking=True) for stored_N in stored)
            steps = torch.full((), float(num_steps), device=device)  # it is increased in place
            _adamw([weights_N[piece]], [gradient_N[piece]], [first_N], [second_N], [steps], group)
            for stored_N, moment_N in zip(stored, (first_N, second_N), strict=True):
                stored_N.copy_(moment_N, non_blocking=True)  # nothing on a CPU, where they are the same tensor
        state["step"] += 1


def _adamw(
    weights: list[Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    steps: list[Tensor],
    group: dict[str, Any],
) -> None:
    """Takes torch's step, in place."""
    adamw(
        weights,
        gradients,
        first,
        second,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
