"""The header of a safetensors file: where each tensor lies, so that parts of a file can be read without the rest.

Format: 8 bytes with the header's length (little-endian), the header as JSON, then the tensors' bytes
(https://github.com/huggingface/safetensors#format). Files are untrusted: everything in the header is checked.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.decoding import load_json
from spes_swarm.base.errors import ProtocolError, PublicationError

MAX_HEADER_BYTES = 64 << 20
# 12 elements per tensor allow 80,000 tensors; the largest models have some 10,000 in a file.
_MAX_ELEMENTS = 1_000_000
MAX_DIMENSIONS = 8
_LENGTH_BYTES = 8

Read = Callable[[int, int], bytes]  # (begin, end) in bytes -> exactly these bytes


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One fp32 tensor of a file."""

    shape: tuple[int, ...]
    begin: int  # first byte in the file
    end: int


def read_header(read: Read, file_bytes: int, name: str) -> dict[str, StoredTensor]:
    """Reads the header of a file of fp32 tensors; `name` is for messages.

    Raises:
        PublicationError: it is not a safetensors file, or has tensors other than fp32.
    """
    if file_bytes < _LENGTH_BYTES:
        raise PublicationError(f"{name} is not a safetensors file")
    data_begin = _LENGTH_BYTES + int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if data_begin > min(file_bytes, MAX_HEADER_BYTES):
        raise PublicationError(f"{name} is not a safetensors file")
    try:
        header = load_json(read(_LENGTH_BYTES, data_begin), max_elements=_MAX_ELEMENTS)
        entries = {key: value for key, value in header.items() if key != "__metadata__"}
        return {key: _stored(value, data_begin, file_bytes) for key, value in entries.items()}
    except (ProtocolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise PublicationError(f"{name} is not a safetensors file of fp32 tensors") from exc


def _stored(entry: dict[str, Any], data_begin: int, file_bytes: int) -> StoredTensor:
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    numbers = (*shape, begin, end)
    if any(type(number) is not int or not 0 <= number <= file_bytes for number in numbers):
        raise ValueError("a number is out of range")
    if entry["dtype"] != "F32" or len(shape) > MAX_DIMENSIONS or end - begin != 4 * math.prod(shape):
        raise ValueError("not fp32, or of another size")
    if data_begin + end > file_bytes:
        raise ValueError("beyond the end of the file")
    return StoredTensor(shape, data_begin + begin, data_begin + end)


def map_tensors(path: Path, name: str | None = None) -> dict[str, FloatArray]:
    """Maps all tensors of a regular local file, read-only: only what is accessed is read from disk.

    Raises:
        PublicationError: as in `read_header`, or the path is not a regular file.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size

        def read(begin: int, end: int) -> bytes:
            file.seek(begin)
            return file.read(end - begin)

        tensors = read_header(read, size, name or path.name)
        mapped = np.memmap(file, dtype=np.uint8, mode="r")
    # A header need not align the data; a view would be misaligned then, which numpy allows.
    return {name: mapped[t.begin : t.end].view("<f4").reshape(t.shape) for name, t in tensors.items()}


def open_regular(path: Path, *, size: int | None = None, max_size: int | None = None) -> BinaryIO:
    """Opens a regular file, of `size` or at most `max_size` bytes; never blocks, and never follows a symbolic link at
    the end of the path.

    Raises:
        PublicationError: it is not a regular file, or has another size.
        OSError: the file cannot be opened.
    """
    if path.is_symlink():  # only for the message; O_NOFOLLOW is the protection
        raise PublicationError(f"{path.name} is a link, not a regular file")
    # Opening a pipe blocks until it has a writer; O_NONBLOCK prevents that, and has no effect on regular files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PublicationError(f"{path.name} is not a regular file")
        if size is not None and found.st_size != size:
            raise PublicationError(f"{path.name} has {found.st_size:,} bytes, but {size:,} were published")
        if max_size is not None and found.st_size > max_size:
            raise PublicationError(f"{path.name} has {found.st_size:,} bytes, expected at most {max_size:,}")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
