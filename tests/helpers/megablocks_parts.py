"""Stand-ins for the parts of megablocks that need a GPU, so that the rest can be tested without one.

As a script, run with TRITON_INTERPRET=1, it prints how far a layer with megablocks' own gather and scatter, interpreted
on the CPU, is from the loop.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spes_swarm.model.kernel_trial import Layer, LayerShape
from spes_swarm.model.kernels import LoopKernel
from spes_swarm.model.kernels.megablocks import Megablocks, MegablocksKernel

SHAPE = LayerShape(tokens=24, top_k=3, dim=40, ffn=16, experts=6, held=2)


def sort(slots_S: Tensor, end_bit: int) -> tuple[Tensor, Tensor]:
    assert slots_S.dtype == torch.int32
    assert int(slots_S.max()) < 2**end_bit
    sorted_S, order_S = torch.sort(slots_S, stable=True)
    return sorted_S, order_S.int()


def histogram(slots_S: Tensor, num_bins: int) -> Tensor:
    return torch.bincount(slots_S, minlength=num_bins).int()


def gather(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    assert weights is None
    return x[indices.long() // top_k]


def scatter(x: Tensor, indices: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    out = torch.empty_like(x)
    out[indices.long()] = x if weights is None else (x.float() * weights[indices.long(), None]).to(x.dtype)
    return out.view(-1, top_k, x.shape[1]).sum(dim=1)


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool, trans_b: bool) -> Tensor:
    assert batch_sizes.dtype == torch.int64
    assert batch_sizes.device.type == "cpu"
    ends = batch_sizes.cumsum(0).tolist()
    groups = [slice(end - count, end) for end, count in zip(ends, batch_sizes.tolist(), strict=True)]
    if trans_a:
        return torch.stack([a[rows].T @ b[rows] for rows in groups])
    return torch.cat([a[rows] @ (m.T if trans_b else m) for rows, m in zip(groups, b, strict=True)])


def kernel(rows: Any) -> MegablocksKernel:
    """Returns the kernel with this gather and scatter, and stand-ins for all that is compiled."""
    ops = SimpleNamespace(
        sort=sort, histogram=histogram, inclusive_cumsum=lambda x, dim: x.cumsum(dim, dtype=torch.int32)
    )
    return MegablocksKernel(Megablocks(source="stand-ins", ops=ops, rows=rows, gmm=gmm))


def distance(rows: Any) -> float:
    """Returns the relative distance between the results of that kernel and those of the loop, in bf16."""
    return Layer(SHAPE, torch.device("cpu"), "bf16", leave_out=True).distance(kernel(rows), LoopKernel())


def _first_configuration(configs: list[Any], key: list[str]) -> Callable[[Any], Any]:
    """Stands in for triton.autotune, which measures on a GPU."""
    import triton  # type: ignore[import-not-found, unused-ignore]

    values = {name: lambda _, value=value: value for name, value in configs[0].kwargs.items()}
    return lambda function: triton.heuristics(values)(function)


def interpreted_rows() -> Any:
    """Loads megablocks' gather and scatter without its compiled parts."""
    import triton  # type: ignore[import-not-found, unused-ignore]

    triton.autotune = _first_configuration
    package = importlib.util.find_spec("megablocks")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "backend" / "kernels.py"
    spec = importlib.util.spec_from_file_location("interpreted_rows", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["interpreted_rows"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(distance(interpreted_rows()))
