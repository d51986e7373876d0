"""Copies of layers on the device: the layer that computes, and the layer expected next.

The next layer is predicted from the order in which layers were used before. Nothing is assumed about the model, and a
change of that order costs only time. Forward and backward passes are learned separately, since a layer has a different
successor in each. With activation checkpointing, a backward pass uses each layer twice in a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

MOST_COPIES = 2  # layers


class UseOrder:
    """Predicts which layer is used next."""

    def __init__(self) -> None:
        self._next: dict[tuple[nn.Module, bool], nn.Module] = {}
        self._latest: tuple[nn.Module, bool] | None = None

    def use(self, layer: nn.Module, in_backward: bool) -> nn.Module | None:
        """Records a use; returns the layer used after it last time, or None if there was none or it was the same."""
        now = (layer, in_backward)
        if self._latest is not None and self._latest != now:
            self._next[self._latest] = layer
        self._latest = now
        return self.after(layer, in_backward)

    def after(self, layer: nn.Module, in_backward: bool) -> nn.Module | None:
        """Returns what `use` would return, without recording anything."""
        following = self._next.get((layer, in_backward))
        return None if following is layer else following


class LayerCopy(Protocol):
    """A copy of a layer's buffers, possibly still in progress."""

    def ready(self) -> list[Tensor]:
        """Returns the tensors; operations queued from now on see them complete."""

    def drop(self) -> None:
        """Releases the copy: operations queued from now on may reuse its memory."""

    def finish(self) -> None:
        """Waits until the copy no longer reads its source."""


class Prefetcher:
    """Keeps copies of at most two layers."""

    def __init__(self, start_copy: Callable[[nn.Module], LayerCopy]) -> None:
        """Takes a function that starts to copy the buffers of a layer."""
        self.order = UseOrder()
        self._start_copy = start_copy
        self._copies: dict[nn.Module, LayerCopy] = {}

    def fetch(self, layer: nn.Module, in_backward: bool) -> list[Tensor]:
        """Returns copies of a layer's buffers, valid until the next `fetch`, and starts to copy the next layer."""
        following = self.order.use(layer, in_backward)
        wanted = [each for each in (layer, following) if each is not None]
        # This layer first: its copy must not wait for that of the next layer.
        for each in wanted:
            if each not in self._copies:
                self._make_room(wanted)
                self._copies[each] = self._start_copy(each)
        return self._copies[layer].ready()

    def forget(self) -> None:
        """Drops all copies, because their sources are about to change."""
        for copy in self._copies.values():
            copy.finish()
            copy.drop()
        self._copies.clear()

    def _make_room(self, wanted: Collection[nn.Module]) -> None:
        for other in list(self._copies):
            if len(self._copies) >= MOST_COPIES and other not in wanted:
                self._copies.pop(other).drop()


class StreamCopy:
    """A copy that a CUDA device makes on a separate stream."""

    def __init__(self, sources: Sequence[Tensor], device: torch.device, stream: torch.cuda.Stream) -> None:
        # The tensors belong to the computing stream, on which earlier uses of their memory may still be pending.
        self._tensors = [torch.empty_like(source, device=device) for source in sources]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for target, source in zip(self._tensors, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._done = stream.record_event()
        self._device = device

    def ready(self) -> list[Tensor]:
        """See LayerCopy."""
        self.drop()
        return self._tensors

    def drop(self) -> None:
        """See LayerCopy."""
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        """See LayerCopy."""
        self._done.synchronize()
