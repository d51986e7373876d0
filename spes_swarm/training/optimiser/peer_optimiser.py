"""What all optimisers of a peer have in common: moments on the device or in host memory, which others read and write.

Tensor suffixes: N elements of a parameter, flat.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class PeerOptimiser(torch.optim.Optimizer):
    """An optimiser whose state is saved, and is stored in one of `moment_storage.FORMS`.

    Moments are in fp32 and have the shape of their parameter: a stack of experts has a row for each.

    A parameter group may have a `peak_ratio`: its peak learning rate, divided by the run's.

    Attributes:
        expert_moments: the names of the moments of experts.
    """

    expert_moments: ClassVar[tuple[str, ...]]

    def __init__(self, params: Any, defaults: dict[str, Any], form: str) -> None:
        super().__init__(params, defaults)
        self._on_host = form == "host"

    def moments_of(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Returns the names of the moments that parameters of a group have."""
        raise NotImplementedError

    def set_learning_rate(self, rate: float) -> None:
        """Sets the learning rate of the schedule; groups with a peak of their own get their share of it."""
        for group in self.param_groups:
            group["lr"] = rate * group.get("peak_ratio", 1.0)

    def num_steps(self, parameter: nn.Parameter) -> int:
        """Returns how many steps the parameter has taken; 0 if it has no moments."""
        state = self.state.get(parameter)
        return int(state["step"]) if state else 0

    def moment_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Returns the names of the moments that a parameter has, or will have after its first step."""
        for group in self.param_groups:
            if any(parameter is each for each in group["params"]):
                return self.moments_of(group)
        raise ValueError("the parameter is not one of this optimiser's")

    def read_moment(self, parameter: nn.Parameter, moment: str, out_N: Tensor) -> None:
        """Copies a moment of a parameter, one of its `moment_names`, to `out_N`; zeros if it has none."""
        state = self.state.get(parameter)
        if state:
            out_N.copy_(state[moment].view(-1))
        else:
            out_N.zero_()

    def write_moment(self, parameter: nn.Parameter, moment: str, values_N: Tensor) -> None:
        """Overwrites a moment of a parameter; if it has no moments yet, the others become zero."""
        self._state_of(parameter)[moment].view(-1).copy_(values_N)

    def set_num_steps(self, parameter: nn.Parameter, num_steps: int) -> None:
        """Sets how many steps the parameter has taken, for AdamW's bias correction."""
        self._state_of(parameter)["step"].fill_(float(num_steps))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not self.state.get(parameter):
            zeros = {moment: self._zeros(parameter) for moment in self.moment_names(parameter)}
            # torch's fused step wants the count where the parameter is. In pieces it is read in every step, which must
            # not wait for a GPU.
            device = torch.device("cpu") if self._on_host else parameter.device
            self.state[parameter] = {"step": torch.zeros((), device=device), **zeros}
        state: dict[str, Any] = self.state[parameter]
        return state

    def _zeros(self, parameter: nn.Parameter) -> Tensor:
        if self._on_host:  # pinned, so that a GPU copies while it computes
            return torch.zeros(parameter.shape, dtype=torch.float32, pin_memory=torch.cuda.is_available())
        return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
