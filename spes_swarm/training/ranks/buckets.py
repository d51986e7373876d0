"""Tensors in buckets: a few large transfers instead of hundreds of small ones.

Shape: N elements of a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

_BUCKET_BYTES = 32 << 20


def transfer(tensors: Iterable[Tensor], send_or_receive: Callable[[Tensor], None], *, received: bool) -> None:
    """Passes the contents of the tensors, bucket by bucket, to a function that may change them.

    Args:
        tensors: of equal shapes and dtypes on all ranks, in the same order.
        send_or_receive: called with the elements of each bucket (N,) in turn; a bucket has one dtype.
        received: whether to copy the buckets back.
    """
    for bucket in buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            send_or_receive(bucket[0].view(-1))
            continue
        flat_N = torch.cat([tensor.reshape(-1) for tensor in bucket])
        send_or_receive(flat_N)
        if received:
            for tensor, piece_N in zip(bucket, torch.split(flat_N, [t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece_N.view(tensor.shape))


def buckets(tensors: Iterable[Tensor], max_bytes: int = _BUCKET_BYTES) -> Iterator[Sequence[Tensor]]:
    """Yields neighbours of the same dtype and device, up to `max_bytes` together.

    Larger tensors come alone, empty ones never.
    """
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        alike = bool(bucket) and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and not (alike and size + tensor.nbytes <= max_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket
