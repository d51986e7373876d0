"""Token files of others, which have no sidecar.

OLMo and the authors of SPES write a numpy memmap, although named `.npy`: little-endian uint32 or uint16 ids and nothing
else. `numpy.save` writes a header before integers of any width and byte order, in one or more dimensions; they are read
row by row. Nothing in such a file describes its content, so it is read once. What a sidecar would say then goes to the
cache, under a name that covers the file's path, size and modification time and the tokenizer. Nothing in the file names
its tokenizer: it counts as the run's, and ids beyond the run's vocabulary are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import refuse_lfs_pointer, replace_file
from spes_swarm.data.content_check import WORTH_SAYING_BYTES, file_state
from spes_swarm.data.files.contents import PARQUET_MAGIC, compression_of
from spes_swarm.data.token_file import (
    MAGIC,
    Sidecar,
    TokenArray,
    TokenFile,
    read_npy_header,
    read_sidecar,
    sidecar_path,
    token_dtype,
)
from spes_swarm.data.tokenizer import Tokenizer

_VERSION = 2  # increment it when the same file would be described differently
_SCAN_TOKENS = 1 << 22
_JUDGED_BYTES = 1 << 22
_MIN_JUDGED = 4  # ids; fewer say nothing
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")
_INTEGERS = re.compile(r"[<>|=]?[iu][1248]")
# What ids without a header may be, but are not read as: the wrong width or order gives wrong ids, not an error.
_OTHER_FORMS = {"<u8": "64-bit", ">u8": "big-endian 64-bit", ">u4": "big-endian 32-bit", ">u2": "big-endian 16-bit"}
_LARGEST_VOCABULARY = 1 << 19


def is_headerless(path: Path) -> bool:
    """Returns True if a file was not made by this package: it has no sidecar.

    Raises:
        DataError: it cannot be read.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb"):
        return not sidecar_path(path).exists()


def check_size(path: Path) -> int:
    """Returns the size in bytes of a file without a sidecar.

    Raises:
        DataError: it cannot hold token ids: it is empty, cut, text, an archive, or an array of something else.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        size = path.stat().st_size
        start = file.read(4096)
        file.seek(0)
        if start.startswith(MAGIC):
            _header(path)
            return size
    refuse_lfs_pointer(path, start, DataError)
    kind = None
    if start.startswith(b"PK\x03\x04") or compression_of(start) is not None:
        kind = "an archive: unpack it"
    elif start.startswith(PARQUET_MAGIC):
        kind = "a Parquet file: give it a name that ends in .parquet"
    elif len(start) >= 64 and _is_text(start):
        kind = "text: give it a name that ends in .txt"
    if kind is not None:
        raise DataError(f"{path} is not a token file, but {kind}")
    if size == 0 or size % 2:
        state = "is empty" if size == 0 else f"has {size} bytes, which is not a whole number of token ids"
        raise DataError(f"{path} has no .npy header and {state}: copy it again")
    return size


def open_headerless(
    path: Path, tokenizer: Tokenizer, cache_dir: Path, say: Callable[[str], None] = lambda text: None
) -> TokenFile:
    """Opens a file of others as one of the run's tokenizer; reads all of it unless that was done before.

    Without a header, the ids are uint32 if all of them then lie in the vocabulary. Otherwise they are uint16, unless
    the vocabulary is too large for that. `say` gets a message before a long file is read.

    Raises:
        DataError: the file cannot be read, is empty or damaged, or its ids are not of this vocabulary.
    """
    size = check_size(path)
    name = blake3(f"{_VERSION} {tokenizer.digest} ".encode() + file_state(path)).hexdigest()[:40]
    description = cache_dir / "headerless" / f"{name}.json"
    with suppress(DataError):  # not read before, or the cache is damaged
        sidecar = read_sidecar(path, description)
        tokens = _mapped(path, sidecar.dtype)
        if sidecar.num_tokens == len(tokens):
            return TokenFile(path, sidecar, tokens, has_header=False)
    if size >= WORTH_SAYING_BYTES:
        say(f"reading {path} ({size / 1e9:.1f} GB), once, because it has no sidecar")
    sidecar = _described(path, size, tokenizer)
    with suppress(OSError):  # the next start reads it again
        description.parent.mkdir(parents=True, exist_ok=True)
        replace_file(description, json.dumps(asdict(sidecar), indent=2) + "\n")
    return TokenFile(path, sidecar, _mapped(path, sidecar.dtype), has_header=False)


def _header(path: Path) -> tuple[np.dtype[Any], int, int] | None:
    """Returns dtype, number of ids and offset of the first one from a `.npy` header; None if there is none.

    Raises:
        DataError: it is not an array of integers, or the file is shorter or longer than the header says.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        file.seek(0)
        size = path.stat().st_size
        advice = "save a 1-D array of token ids in uint16 or uint32 instead"
        try:
            descr, shape, start = read_npy_header(file)
        except ValueError as exc:
            raise DataError(f"{path} is not a token file: {exc}; {advice}") from exc
    if not _INTEGERS.fullmatch(descr):
        raise DataError(f"{path} is not a token file: its dtype is {descr!r}, and ids are integers; {advice}")
    dtype, count = np.dtype(descr), math.prod(shape)
    expected = start + count * dtype.itemsize
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise DataError(f"{path} is {state}: {size} bytes instead of {expected}; copy it again")
    return dtype, count, start


def _mapped(path: Path, dtype: str) -> TokenArray:
    """Maps the ids, of this dtype unless a header names another one."""
    header = _header(path)
    with os_errors_as(DataError, f"{path} cannot be read"):
        if header is None:
            return np.memmap(path, dtype=_UINT16 if dtype == "uint16" else _UINT32, mode="r")
        return np.memmap(path, dtype=header[0], mode="r", offset=header[2], shape=(header[1],))


def _described(path: Path, size: int, tokenizer: Tokenizer) -> Sidecar:
    if _header(path) is not None:
        found = _scan(_mapped(path, ""), tokenizer)
        if isinstance(found, Sidecar):
            return found
        advice = f"tokenise the text with {tokenizer.name!r}"
        if found < 0:
            advice = "remove padding and other marks that are not ids; a file that spes_swarm wrote needs its sidecar"
        raise DataError(
            f"{path} holds the id {found}, which is not in the run's vocabulary of {tokenizer.vocab_size} tokens: "
            + advice
        )
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        start = file.read(_JUDGED_BYTES)
    if not any(start):
        raise DataError(f"{path} has no .npy header and holds only zeros: copy it again")
    refused: list[str] = []
    # Ids of a larger vocabulary are never stored as uint16. Read as such, any file would be of that vocabulary.
    may_be_uint16 = token_dtype(tokenizer.vocab_size) == _UINT16
    for dtype in (_UINT32, _UINT16) if may_be_uint16 else (_UINT32,):
        if size % dtype.itemsize:
            refused.append(f"it has {size} bytes, which is not a whole number of {dtype.name} ids")
            continue
        wider = ("<u8", ">u8") if dtype == _UINT32 else ("<u4", ">u4", "<u8", ">u8")
        if _fitting(start, wider, _LARGEST_VOCABULARY):
            refused.append(f"as {dtype.name}, every second id is 0 or nearly so, as if the ids were wider")
            continue
        found = _scan(_mapped(path, dtype.name), tokenizer)
        if isinstance(found, Sidecar):
            return found
        refused.append(f"as {dtype.name}, it holds the id {found}")
    advice = f"tokenise the text with {tokenizer.name!r}, or copy the file again"
    forms = list(_OTHER_FORMS)[: None if may_be_uint16 else -1]
    if form := _fitting(start, forms, tokenizer.vocab_size):
        target = token_dtype(tokenizer.vocab_size).str
        advice = (
            f"its ids seem to be {_OTHER_FORMS[form]}, so convert it with "
            f"numpy.save(NEW, numpy.fromfile({path.name!r}, {form!r}).astype({target!r}))"
        )
    raise DataError(
        f"{path} has no .npy header and does not hold ids of the run's vocabulary of {tokenizer.vocab_size} tokens "
        f"({'; '.join(refused)}): {advice}"
    )


def _fitting(content: bytes, forms: Sequence[str], vocab_size: int) -> str | None:
    """Returns the first form in which all ids of a file's first bytes lie in a vocabulary.

    In a form that is too wide, ids of text join to numbers beyond any vocabulary at once.
    """
    for form in forms:
        count = len(content) // np.dtype(form).itemsize
        if count >= _MIN_JUDGED and int(np.frombuffer(content, form, count).max()) < vocab_size:
            return form
    return None


def _is_text(content: bytes) -> bool:
    """Returns True if bytes are UTF-8, whose last character may be cut, without NUL, which narrow ids contain."""
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as exc:
        return exc.end >= len(content) and exc.reason == "unexpected end of data" and b"\0" not in content
    return b"\0" not in content


def _scan(tokens: TokenArray, tokenizer: Tokenizer) -> Sidecar | int:
    """Reads all ids; returns their description, or an id that is not in the vocabulary."""
    hasher, highest, num_documents = blake3(), 0, 0
    as_stored = tokens.dtype in (_UINT16, _UINT32)
    for start in range(0, len(tokens), _SCAN_TOKENS):
        piece = np.ascontiguousarray(tokens[start : start + _SCAN_TOKENS])
        lowest, highest = int(piece.min()), max(highest, int(piece.max()))
        if lowest < 0 or highest >= tokenizer.vocab_size:
            return lowest if lowest < 0 else highest
        num_documents += int(np.count_nonzero(piece == tokenizer.end_of_text))
        # Other forms have the digest of the same ids in a file of this package.
        hasher.update((piece if as_stored else piece.astype(token_dtype(tokenizer.vocab_size))).tobytes())
    return Sidecar(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=tokens.dtype.name,
        num_tokens=len(tokens),
        num_documents=num_documents,
        max_token=highest,
        blake3=hasher.hexdigest(),
    )
