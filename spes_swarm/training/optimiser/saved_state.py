"""The state of AdamW as arrays for a checkpoint: `PARAMETER/step`, `PARAMETER/exp_avg` and `PARAMETER/exp_avg_sq`.

They are in fp32, however the moments are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from spes_swarm.training.optimiser.adamw import PeerAdamW
from spes_swarm.training.optimiser.moment_storage import MOMENTS

Array = np.ndarray[Any, np.dtype[Any]]


def optimiser_arrays(optimiser: PeerAdamW, parameters: Mapping[str, nn.Parameter]) -> dict[str, Array]:
    """Returns copies of the state of these parameters, in host memory.

    A parameter that has not been stepped yet has no state, and no arrays.
    """
    arrays: dict[str, Array] = {}
    for name, parameter in parameters.items():
        if not optimiser.state.get(parameter):
            continue
        arrays[f"{name}/step"] = np.array(optimiser.num_steps(parameter), dtype=np.float32)
        for moment in MOMENTS:
            values = np.empty(parameter.shape, dtype=np.float32)
            optimiser.read_moment(parameter, moment, torch.from_numpy(values.reshape(-1)))
            arrays[f"{name}/{moment}"] = values
    return arrays


def load_optimiser_arrays(
    optimiser: PeerAdamW, parameters: Mapping[str, nn.Parameter], arrays: Mapping[str, Array]
) -> None:
    """Restores copies of the arrays of `optimiser_arrays`; a parameter without arrays keeps its state."""
    for name, parameter in parameters.items():
        if f"{name}/step" not in arrays:
            continue
        optimiser.set_num_steps(parameter, int(arrays[f"{name}/step"]))
        for moment in MOMENTS:
            values_N = arrays[f"{name}/{moment}"].reshape(-1)
            # torch has no read-only tensors and warns about such arrays.
            writable_N = values_N if values_N.flags.writeable else values_N.copy()
            optimiser.write_moment(parameter, moment, torch.from_numpy(writable_N))
