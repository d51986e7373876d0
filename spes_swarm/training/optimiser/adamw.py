"""AdamW whose moments are on the device, in 8 bits, or in host memory.

Tensor suffixes: N elements of a parameter, of a row of it, or of a piece of it, flat.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from spes_swarm.model.half_weights import is_halved, read_piece, write_piece
from spes_swarm.training.optimiser.moment_storage import (
    MOMENTS,
    EightBitStorage,
    Fp32Storage,
    MomentStorage,
    piece_elements,
)


class PeerAdamW(torch.optim.AdamW):
    """torch's fused AdamW; `form`, one of `moment_storage.FORMS`, says how the moments are stored.

    `device` is torch's own step, unless weights are halved. The other forms take the same step piece by piece: the
    moments and halved weights of a piece are expanded or fetched, updated, and written back. In 8 bits this takes 38
    bytes per element of a piece, 40 MB on a GPU, whatever the size of the model.

    In 8 bits, vectors (norms, biases) stay in fp32.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        form: str = "device",
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        self.form = form
        halved = any(is_halved(parameter) for group in self.param_groups for parameter in group["params"])
        self._in_pieces = form != "device" or halved

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no caller has a closure
        """Updates every parameter that has a gradient."""
        if not self._in_pieces:
            super().step()
            return
        noises_N: dict[tuple[torch.device, int], Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = parameter.device, self.num_steps(parameter)
                    if key not in noises_N:
                        noises_N[key] = self._noise(*key)
                    self._update(parameter, group, noises_N[key])
        for device in {device for device, _ in noises_N}:
            if device.type == "cuda":
                # Copies to host memory are asynchronous, and others read it without knowing of them.
                torch.cuda.current_stream(device).synchronize()

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], noise_N: Tensor) -> None:
        assert parameter.grad is not None
        state, storage = self._state_of(parameter), self._storage(parameter)
        gradient_N = parameter.grad.reshape(-1)
        num_steps = self.num_steps(parameter)
        for piece in storage.pieces(parameter):
            first_N, second_N = (
                storage.read(state, moment, piece).to(parameter.device, non_blocking=True) for moment in MOMENTS
            )
            weights_N = read_piece(parameter, piece)
            adamw(
                [weights_N],
                [gradient_N[piece]],
                [first_N],
                [second_N],
                [],
                [torch.full((), float(num_steps), device=parameter.device)],  # it is increased in place
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            write_piece(parameter, piece, weights_N)
            for moment, moment_N in zip(MOMENTS, (first_N, second_N), strict=True):
                storage.write(state, moment, piece, moment_N, noise_N[: len(moment_N)])
        state["step"] += 1

    def num_steps(self, parameter: nn.Parameter) -> int:
        """Returns how many steps the parameter has taken; 0 if it has no moments."""
        state = self.state.get(parameter)
        return int(state["step"]) if state else 0

    def read_moment(self, parameter: nn.Parameter, moment: str, out_N: Tensor, row: int | None = None) -> None:
        """Copies a moment of a parameter, or of a row of it, to `out_N` in fp32; zeros if it has none.

        `moment` is one of `MOMENTS`. Takes memory for one piece.
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
        """Sets how many steps the parameter has taken, for the bias correction."""
        self._state_of(parameter)["step"].fill_(float(num_steps))

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        if not self.state.get(parameter):
            # torch's step has it on the device; elsewhere it is read in every step, which must not wait for a GPU.
            step = torch.zeros((), device="cpu" if self._in_pieces else parameter.device)
            self.state[parameter] = {"step": step, **self._storage(parameter).zeros(parameter)}
        state: dict[str, Any] = self.state[parameter]
        return state

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
