"""What all optimisers of a peer have in common: moments in one of three forms, which others read and write in fp32.

Tensor suffixes: N elements of a parameter, of a row of it, or of a piece of it, flat.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spes_swarm.training.optimiser.moment_storage import (
    EightBitStorage,
    Fp32Storage,
    MomentStorage,
    piece_elements,
)


class PeerOptimiser(torch.optim.Optimizer):
    """An optimiser whose state changes hands, is saved, and is stored in one of `moment_storage.FORMS`.

    In 8 bits, vectors (norms, biases) stay in fp32.

    A parameter group may have a `peak_ratio`: its peak learning rate, divided by the run's.

    Attributes:
        form: how moments are stored.
        expert_moments: the names of the moments of experts, in the order in which peers exchange them.
    """

    expert_moments: ClassVar[tuple[str, ...]]

    def __init__(self, params: Any, defaults: dict[str, Any], form: str) -> None:
        super().__init__(params, defaults)
        self.form = form
        self._in_pieces = form != "device"

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

    def read_moment(self, parameter: nn.Parameter, moment: str, out_N: Tensor, row: int | None = None) -> None:
        """Copies a moment of a parameter, or of a row of it, to `out_N` in fp32; zeros if it has none.

        `moment` is one of `moment_names`. Takes memory for one piece.
        """
        state, storage = self.state.get(parameter), self._storage(parameter)
        if not state:
            out_N.zero_()
            return
        start = 0
        for piece in storage.pieces(parameter, row):
            values_N = storage.read(state, moment, piece)
            out_N[start : start + len(values_N)].copy_(values_N)
            start += len(values_N)

    def write_moment(self, parameter: nn.Parameter, moment: str, values_N: Tensor, row: int | None = None) -> None:
        """Overwrites a moment of a parameter, or of a row of it; what has no moments yet gets zeros first."""
        state, storage = self._state_of(parameter), self._storage(parameter)
        start = 0
        for piece in storage.pieces(parameter, row):
            size = piece.stop - piece.start
            storage.write(state, moment, piece, values_N[start : start + size].to(state[moment].device))
            start += size

    def set_num_steps(self, parameter: nn.Parameter, num_steps: int) -> None:
        """Sets how many steps the parameter has taken, for AdamW's bias correction and the noise of rounding."""
        self._state_of(parameter)["step"].fill_(float(num_steps))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not self.state.get(parameter):
            zeros = self._storage(parameter).zeros(parameter, self.moment_names(parameter))
            self.state[parameter] = {"step": torch.zeros((), device=self._step_device(parameter)), **zeros}
        state: dict[str, Any] = self.state[parameter]
        return state

    def _step_device(self, parameter: nn.Parameter) -> torch.device:
        """Returns where the step count is: what reads it in every step must not wait for a GPU."""
        return torch.device("cpu")

    def _storage(self, parameter: nn.Parameter) -> MomentStorage:
        if self.form == "int8" and parameter.dim() > 1:
            return EightBitStorage()
        return Fp32Storage(torch.device("cpu") if self.form == "host" else parameter.device)

    def _noise(self, device: torch.device, num_steps: int) -> Tensor:
        """Returns the random numbers of a step, which all pieces share; a peer that resumes draws the same ones."""
        if self.form != "int8":
            return torch.empty(0, device=device)
        generator = torch.Generator(device).manual_seed(num_steps)
        return torch.rand(piece_elements(device), device=device, generator=generator)
