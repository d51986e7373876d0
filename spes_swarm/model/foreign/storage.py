"""The places where others' experts can be: the device, host memory, or a disk.

A layer is a module whose buffers are the stored experts of one decoder layer. Each of its passes, forward or backward,
first fetches them to the device that computes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from spes_swarm.base.errors import CapacityError, os_errors_as
from spes_swarm.model.foreign.prefetch import MOST_COPIES, LayerCopy, Prefetcher, StreamCopy, UseOrder

_LIBC = ctypes.CDLL(None)


def in_backward_pass() -> bool:
    """Returns True while autograd computes gradients in this thread, including forward passes repeated for it."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, kw_only=True)
class ForeignBytes:
    """The memory that other peers' experts take."""

    on_device: int
    on_host: int  # page-locked, beside a GPU
    on_disk: int


def foreign_bytes(kind: str, stored: int, num_layers: int, *, on_gpu: bool) -> ForeignBytes:
    """Returns where the `stored` bytes of `num_layers` equal layers are.

    Pages of files that the kernel keeps in memory do not count: it drops them when memory is short.
    """
    if kind == "device" or (kind == "host" and not on_gpu):
        return ForeignBytes(on_device=stored, on_host=0, on_disk=0)
    copies = min(stored, MOST_COPIES * -(-stored // num_layers)) if on_gpu else 0
    on_disk = stored if kind == "disk" else 0
    return ForeignBytes(on_device=copies, on_host=stored - on_disk, on_disk=on_disk)


def new_storage(kind: str, device: torch.device, directory: Path) -> ForeignStorage:
    """Returns the storage of a peer: `kind` is "device", "disk" (in files of `directory`) or, beside a GPU, "host"."""
    if kind == "device":
        return ForeignStorage()
    source: ForeignStorage = DiskStorage(directory) if kind == "disk" else PinnedStorage()
    if device.type == "cpu":
        return source
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
    return StagedStorage(source, partial(StreamCopy, device=device, stream=stream))


class ForeignStorage:
    """The device of the model: buffers move with the model and are used in place."""

    is_fixed = False  # True: buffers stay where they are when the model moves

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns zeros in this storage; the model is currently on `device`.

        Raises:
            CapacityError: a disk has too little space.
        """
        return torch.zeros(shape, dtype=dtype, device=device)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """Returns the buffers of a layer where a pass can use them, until the next `fetch` of another layer."""
        return list(layer.buffers())

    def before_write(self) -> None:
        """Prepares for a change of the buffers; called before each one."""


class PinnedStorage(ForeignStorage):
    """Page-locked host memory, from which a GPU copies while it computes."""

    is_fixed = True

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ForeignStorage."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)


class DiskStorage(ForeignStorage):
    """Files on a disk, mapped into memory: the kernel caches as many of their pages as fit.

    They have no names, so they disappear when this process ends, however it ends.
    """

    is_fixed = True

    def __init__(self, directory: Path) -> None:
        """Takes a directory on the disk."""
        self._directory = directory
        self._order = UseOrder()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ForeignStorage."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if num_bytes == 0:
            return torch.zeros(shape, dtype=dtype)
        with (
            os_errors_as(CapacityError, f"{self._directory}: {num_bytes / 1e9:.1f} GB for experts of other peers"),
            tempfile.TemporaryFile(dir=self._directory) as file,
        ):
            # Allocate the space now: writing to a mapped page without disk space kills the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            path = f"/proc/self/fd/{file.fileno()}"
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8).view(dtype).view(shape)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """See ForeignStorage. The kernel begins to read the next layer."""
        following = self._order.use(layer, in_backward_pass())
        for buffer in following.buffers() if following is not None else ():
            _read_ahead(buffer)
        return list(layer.buffers())


def _read_ahead(mapped: Tensor) -> None:
    """Asks the kernel to read a tensor of `DiskStorage` in the background; the kernel may ignore the hint."""
    if mapped.numel():
        _LIBC.madvise(ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes), mmap.MADV_WILLNEED)


class StagedStorage(ForeignStorage):
    """Another storage, with copies of two layers on a GPU: the second is copied while the first computes."""

    is_fixed = True

    def __init__(self, source: ForeignStorage, start_copy: Callable[[list[Tensor]], LayerCopy]) -> None:
        """Takes the storage of the experts, and a function that starts to copy tensors to the device."""
        self._source = source
        self._prefetcher = Prefetcher(lambda layer: start_copy(source.fetch(layer)))

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """See ForeignStorage."""
        return self._source.zeros(shape, dtype, device)

    def fetch(self, layer: nn.Module) -> list[Tensor]:
        """See ForeignStorage."""
        return self._prefetcher.fetch(layer, in_backward_pass())

    def before_write(self) -> None:
        """See ForeignStorage."""
        self._prefetcher.forget()
