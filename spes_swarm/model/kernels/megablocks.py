"""The dropless operations of megablocks, whose own kernels sort choices, move rows and multiply.

They come from the installed package megablocks, which compiles its extensions when it is installed, or else prebuilt
from the Hub, through the package kernels. Tensor suffixes as in `products`. Both have the same operations:

- `ops.sort`, `ops.histogram`, `ops.inclusive_cumsum` (compiled): the order of the choices and the ends of the groups;
- `backend.kernels.gather` and `scatter` (triton): rows to the experts, and weighted sums of rows by token;
- `backend.gmm` of grouped_gemm (compiled; the prebuilt one contains it): grouped products, in bf16 only.

`megablocks.ops.gather` and `scatter` wrap the triton kernels for autograd, and under autocast they would round the
routing weights to bf16. Since `expert_mlp` computes the gradients itself, the kernels are called directly.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spes_swarm.base.errors import ConfigError
from spes_swarm.model.kernels.products import Groups, SortedChoices

HUB_REPOSITORY, HUB_VERSION = "kernels-community/megablocks", 1
_HOW_TO_INSTALL = "see docs/how-to/memory-and-gpus.md, or use the kernel torch"
_MOST_ELEMENTS = 2**31  # its triton kernels count elements in int32


@dataclass(frozen=True, kw_only=True)
class Megablocks:
    """The operations, wherever they come from."""

    source: str  # for messages
    ops: Any  # sort, histogram, inclusive_cumsum
    rows: Any  # gather, scatter
    gmm: Callable[..., Tensor]  # (a, b, rows of each group, trans_a, trans_b)


class MegablocksDispatch:
    """Its radix sort, and its gather and scatter."""

    def __init__(self, megablocks: Megablocks) -> None:
        self._ops, self._rows = megablocks.ops, megablocks.rows

    def sort(self, slots_TK: Tensor, num_slots: int) -> SortedChoices:
        """Returns the sorted choices, without waiting for the device."""
        slots_S = slots_TK.reshape(-1).to(torch.int32)
        sorted_S, order_S = self._ops.sort(slots_S, max(1, (num_slots - 1).bit_length()))
        ends_E = self._ops.inclusive_cumsum(self._ops.histogram(slots_S, num_slots), 0).reshape(-1)
        return SortedChoices(sorted_S, order_S, ends_E.to(torch.int32), slots_TK.shape[1])

    def fits(self, num_rows: int, features: int) -> bool:
        """Returns True if an int32 can address the elements."""
        return num_rows * features < _MOST_ELEMENTS

    def gather(self, x_TD: Tensor, choices: SortedChoices) -> Tensor:
        """Returns x_SD."""
        ends_E = choices.ends_E
        rows: Tensor = self._rows.gather(
            x_TD.contiguous(), choices.order_S, choices.slots_S, None, ends_E, choices.top_k
        )
        return rows

    def combine(self, y_SD: Tensor, choices: SortedChoices, weights_TK: Tensor | None) -> Tensor:
        """Returns y_TD; each weighted row is rounded to the dtype of y before they are added."""
        weights_S = None if weights_TK is None else weights_TK.reshape(-1)
        sums: Tensor = self._rows.scatter(
            y_SD, choices.order_S, choices.slots_S, weights_S, choices.ends_E, choices.top_k
        )
        return sums


class MegablocksKernel:
    """Its grouped products, which compute in bf16 only, and its dispatch."""

    def __init__(self, megablocks: Megablocks) -> None:
        self.source = megablocks.source
        self.dispatch = MegablocksDispatch(megablocks)
        self._gmm = megablocks.gmm

    def product(self, x_TD: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns y_TF."""
        return self._multiply(x_TD, w_GFD, groups, trans_b=True)

    def input_gradient(self, grad_y_TF: Tensor, w_GFD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_x_TD."""
        return self._multiply(grad_y_TF, w_GFD, groups)

    def weight_gradient(self, grad_y_TF: Tensor, x_TD: Tensor, groups: Groups) -> Tensor:
        """Returns grad_w_GFD."""
        return self._multiply(grad_y_TF, x_TD, groups, trans_a=True)

    def _multiply(
        self, a: Tensor, b: Tensor, groups: Groups, *, trans_a: bool = False, trans_b: bool = False
    ) -> Tensor:
        if a.dtype != torch.bfloat16:
            raise ConfigError(
                f"kernel 'megablocks' multiplies in bf16 only, not in {str(a.dtype).removeprefix('torch.')}: "
                "use precision bf16, or the kernel torch"
            )
        # Without CUTLASS, the default build, grouped_gemm expects the row counts in host memory.
        counts_G = torch.tensor(groups.counts, dtype=torch.int64)
        return self._gmm(a, b, counts_G, trans_a, trans_b)


def load_megablocks() -> MegablocksKernel:
    """Returns the kernel with the operations of the installed package, or else with the prebuilt ones.

    Raises:
        ConfigError: a package is missing or does not load, or there is no CUDA device; the message names it.
    """
    installed = importlib.util.find_spec("megablocks") is not None
    if not installed and importlib.util.find_spec("kernels") is None:
        raise ConfigError(
            "kernel 'megablocks' needs the package megablocks, or kernels for the prebuilt one, and neither is "
            f"installed: {_HOW_TO_INSTALL}"
        )
    if installed:
        megablocks = _installed()
    if not torch.cuda.is_available():
        raise ConfigError("kernel 'megablocks' needs a CUDA device, and this machine has none; use the kernel torch")
    return MegablocksKernel(megablocks if installed else _prebuilt())


def _installed() -> Megablocks:
    ops = _load("megablocks.ops", "megablocks_ops")
    rows = _load("megablocks.backend.kernels")
    gmm = _load("grouped_gemm.backend", "grouped_gemm_backend").gmm
    source = f"megablocks {_version('megablocks')} with grouped_gemm {_version('grouped_gemm')}"
    return Megablocks(source=source, ops=ops, rows=rows, gmm=gmm)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _load(module: str, extension: str | None = None) -> Any:
    """Imports a module of the installed package; `extension` is what it compiles."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they use names that torch has deprecated
            return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        missing = exc.name or module
        # megablocks raises an error of its own, without a name, for its extension.
        if extension is not None and (missing == extension or extension in str(exc)):
            raise ConfigError(
                f"kernel 'megablocks' needs {extension}, the compiled part of {module.split('.')[0]}, which was not "
                f"built when it was installed: {_HOW_TO_INSTALL}"
            ) from exc
        raise ConfigError(
            f"kernel 'megablocks' needs the module {missing}, which is not installed: {_HOW_TO_INSTALL}"
        ) from exc
    except Exception as exc:  # extensions fail to load in many ways: libraries, symbols, devices
        raise _does_not_load(module, "it must be built for this torch", exc) from exc


@functools.cache  # a request to the Hub takes time
def _prebuilt() -> Megablocks:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hub: Any = importlib.import_module("kernels").get_kernel(HUB_REPOSITORY, version=HUB_VERSION)
            return Megablocks(
                source=f"{HUB_REPOSITORY}, version {HUB_VERSION}, prebuilt",
                ops=hub.ops,
                rows=hub.backend.kernels,
                gmm=hub.gg_backend.gmm,
            )
    except Exception as exc:  # network, cache, no build for this torch, or a changed interface
        raise _does_not_load(HUB_REPOSITORY, "prebuilt, from the Hub", exc) from exc


def _does_not_load(part: str, remark: str, exc: Exception) -> ConfigError:
    reason = " ".join(str(exc).split())[:300] or type(exc).__name__
    return ConfigError(f"kernel 'megablocks': {part} ({remark}) does not load: {reason}; {_HOW_TO_INSTALL}")
