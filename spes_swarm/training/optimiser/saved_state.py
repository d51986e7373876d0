"""The state of an optimiser as arrays for a checkpoint: `PARAMETER/step`, and `PARAMETER/MOMENT` for each moment.

They do not depend on where the moments are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from spes_swarm.base.errors import CheckpointError
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser

Array = np.ndarray[Any, np.dtype[Any]]


def optimiser_arrays(optimiser: PeerOptimiser, parameters: Mapping[str, nn.Parameter]) -> dict[str, Array]:
    """Returns copies of the state of these parameters, in host memory.

    A parameter that has not been stepped yet has no state, and no arrays.
    """
    arrays: dict[str, Array] = {}
    for name, parameter in parameters.items():
        if not optimiser.state.get(parameter):
            continue
        arrays[f"{name}/step"] = np.array(optimiser.num_steps(parameter), dtype=np.float32)
        for moment in optimiser.moment_names(parameter):
            values = np.empty(parameter.shape, dtype=np.float32)
            optimiser.read_moment(parameter, moment, torch.from_numpy(values.reshape(-1)))
            arrays[f"{name}/{moment}"] = values
    return arrays


def load_optimiser_arrays(
    optimiser: PeerOptimiser, parameters: Mapping[str, nn.Parameter], arrays: Mapping[str, Array]
) -> None:
    """Restores copies of the arrays of `optimiser_arrays`; a parameter without arrays keeps its state.

    Raises:
        CheckpointError: they are those of another optimiser; nothing has changed then.
    """
    saved = [name for name in parameters if f"{name}/step" in arrays]
    for name in saved:
        expected = {"step", *optimiser.moment_names(parameters[name])}
        found = {key.removeprefix(f"{name}/") for key in arrays if key.rpartition("/")[0] == name}
        if found != expected:
            raise CheckpointError(
                f"the checkpoint is that of another optimiser: for {name} it has {', '.join(sorted(found))}, but the "
                f"run's training.optimiser keeps {', '.join(sorted(expected))}; use another --output-dir"
            )
    for name in saved:
        parameter = parameters[name]
        optimiser.set_num_steps(parameter, int(arrays[f"{name}/step"]))
        for moment in optimiser.moment_names(parameter):
            values_N = arrays[f"{name}/{moment}"].reshape(-1)
            # torch has no read-only tensors and warns about such arrays.
            writable_N = values_N if values_N.flags.writeable else values_N.copy()
            optimiser.write_moment(parameter, moment, torch.from_numpy(writable_N))
