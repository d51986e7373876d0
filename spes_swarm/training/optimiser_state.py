"""The state of AdamW as arrays for a checkpoint: `PARAMETER/step`, `PARAMETER/exp_avg` and `PARAMETER/exp_avg_sq`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[Any]]


def optimiser_arrays(optimiser: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Array]:
    """Returns copies of the state of these parameters, in host memory.

    A parameter that has not been stepped yet has no state, and no arrays.
    """
    return {
        f"{name}/{key}": value.detach().to("cpu", copy=True).numpy()
        for name, parameter in parameters.items()
        for key, value in optimiser.state.get(parameter, {}).items()
    }


def load_optimiser_arrays(
    optimiser: torch.optim.AdamW, parameters: Mapping[str, nn.Parameter], arrays: Mapping[str, Array]
) -> None:
    """Restores copies of the arrays of `optimiser_arrays`; a parameter without arrays keeps its state."""
    for name, parameter in parameters.items():
        state = {
            key: torch.from_numpy(arrays[f"{name}/{key}"].copy()).to(parameter.device)
            for key in ("step", "exp_avg", "exp_avg_sq")
            if f"{name}/{key}" in arrays
        }
        if state:
            optimiser.state[parameter] = state
