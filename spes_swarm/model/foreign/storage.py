"""The places where others' experts can be: the device, or host memory next to a GPU.

A layer is a module whose buffers are the stored experts of one decoder layer. Each of its passes, forward or backward,
first fetches them to the device that computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from spes_swarm.model.foreign.prefetch import MOST_COPIES, LayerCopy, Prefetcher, StreamCopy


def in_backward_pass() -> bool:
    """Returns True while autograd computes gradients in this thread, including forward passes repeated for it."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, kw_only=True)
class ForeignBytes:
    """The memory that other peers' experts take."""

    on_device: int
    on_host: int  # page-locked


def foreign_bytes(kind: str, stored: int, num_layers: int) -> ForeignBytes:
    """Returns where the `stored` bytes of `num_layers` equal layers are; for `kind` see `new_storage`."""
    if kind == "device":
        return ForeignBytes(on_device=stored, on_host=0)
    return ForeignBytes(on_device=min(stored, MOST_COPIES * -(-stored // num_layers)), on_host=stored)


def new_storage(kind: str, device: torch.device) -> ForeignStorage:
    """Returns the storage of a peer: `kind` is "device" or, next to a GPU, "host"."""
    if kind == "device":
        return ForeignStorage()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return HostStorage(partial(StreamCopy, device=device, stream=stream))


class ForeignStorage:
    """The device of the model: buffers move with the model and are used in place."""

    is_fixed = False  # True: buffers stay where they are when the model moves

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros in this storage; the model is currently on `device`."""
        return torch.zeros(shape, dtype=dtype, device=device)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """Returns the buffers of a layer where a pass can use them, until the next `fetch` of another layer."""
        return list(layer.buffers())

    def before_write(self) -> None:
        """Prepares for a change of the buffers; called before each one."""


class HostStorage(ForeignStorage):
    """Host memory, with copies of two layers on a GPU: the second is copied while the first computes."""

    is_fixed = True

    def __init__(self, start_copy: Callable[[list[Tensor]], LayerCopy]) -> None:
        """Takes a function that starts to copy tensors to the device."""
        self._prefetcher = Prefetcher(lambda layer: start_copy(list(layer.buffers())))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ForeignStorage. A GPU copies from page-locked memory while it computes."""
        return torch.zeros(shape, dtype=dtype, pin_memory=torch.cuda.is_available())

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """See ForeignStorage."""
        return self._prefetcher.fetch(layer, in_backward_pass())

    def before_write(self) -> None:
        """See ForeignStorage."""
        self._prefetcher.forget()
