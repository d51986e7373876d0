"""Token files without a header, as OLMo and the authors of SPES write them: a numpy memmap, although named `.npy`.

Such a file holds little-endian uint32 or uint16 ids and nothing else, so it is read once. What a sidecar would say then
goes to the cache, under a name that covers the file's path, size and modification time and the tokenizer. Nothing in
the file names its tokenizer: it counts as the run's, and ids beyond the run's vocabulary are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import replace_file
from spes_swarm.data.content_check import WORTH_SAYING_BYTES, file_state
from spes_swarm.data.token_file import MAGIC, Sidecar, TokenFile, read_sidecar, sidecar_path, token_dtype
from spes_swarm.data.tokenizer import Tokenizer

_VERSION = 1  # increment it when the same file would be described differently
_SCAN_TOKENS = 1 << 22
_UINT16, _UINT32 = np.dtype("<u2"), np.dtype("<u4")


def is_headerless(path: Path) -> bool:
    """Returns True if a file does not start like a `.npy` file. (One with a sidecar had a header and is damaged.)

    Raises:
        DataError: it cannot be read.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        return file.read(len(MAGIC)) != MAGIC and not sidecar_path(path).exists()


def check_size(path: Path) -> int:
    """Returns the size of a headerless file in bytes.

    Raises:
        DataError: it is empty, or its size is odd.
    """
    with os_errors_as(DataError, f"{path} cannot be read"):
        size = path.stat().st_size
    if size == 0 or size % 2:
        state = "is empty" if size == 0 else f"has {size} bytes, which is not a whole number of token ids"
        raise DataError(f"{path} has no .npy header and {state}: copy it again")
    return size


def open_headerless(
    path: Path, tokenizer: Tokenizer, cache_dir: Path, say: Callable[[str], None] = lambda text: None
) -> TokenFile:
    """Opens a headerless file of the run's tokenizer; reads all of it unless that was done before.

    The ids are uint32 if all of them then lie in the vocabulary. Otherwise they are uint16, unless the vocabulary is
    too large for that. `say` gets a message before a long file is read.

    Raises:
        DataError: the file cannot be read, is empty, or its ids are not of this vocabulary.
    """
    size = check_size(path)
    name = blake3(f"{_VERSION} {tokenizer.digest} ".encode() + file_state(path)).hexdigest()[:40]
    description = cache_dir / "headerless" / f"{name}.json"
    with suppress(DataError):  # not read before, or the cache is damaged
        sidecar = read_sidecar(path, description)
        if sidecar.num_tokens * np.dtype(sidecar.dtype).itemsize == size:
            return _mapped(path, sidecar)
    if size >= WORTH_SAYING_BYTES:
        say(f"reading {path} ({size / 1e9:.1f} GB), once, because it has no header")
    sidecar = _described(path, size, tokenizer)
    with suppress(OSError):  # the next start reads it again
        description.parent.mkdir(parents=True, exist_ok=True)
        replace_file(description, json.dumps(asdict(sidecar), indent=2) + "\n")
    return _mapped(path, sidecar)


def _mapped(path: Path, sidecar: Sidecar) -> TokenFile:
    dtype = _UINT16 if sidecar.dtype == "uint16" else _UINT32
    tokens = np.memmap(path, dtype=dtype, mode="r", shape=(sidecar.num_tokens,))
    return TokenFile(path, sidecar, tokens, has_header=False)


def _described(path: Path, size: int, tokenizer: Tokenizer) -> Sidecar:
    refused: list[str] = []
    # Ids of a larger vocabulary are never stored as uint16. Read as such, any file would be of that vocabulary.
    may_be_uint16 = token_dtype(tokenizer.vocab_size) == _UINT16
    for dtype in (_UINT32, _UINT16) if may_be_uint16 else (_UINT32,):
        if size % dtype.itemsize:
            refused.append(f"it has {size} bytes, which is not a whole number of {dtype.name} ids")
            continue
        found = _scan(path, tokenizer, dtype)
        if isinstance(found, Sidecar):
            return found
        refused.append(f"as {dtype.name}, it holds the id {found}")
    raise DataError(
        f"{path} has no .npy header, and its content is not of the run's vocabulary of {tokenizer.vocab_size} tokens "
        f"({'; '.join(refused)}): tokenise the text with {tokenizer.name!r}, or copy the file again"
    )


def _scan(path: Path, tokenizer: Tokenizer, dtype: np.dtype[Any]) -> Sidecar | int:
    """Reads the whole file; returns its description, or an id that is beyond the vocabulary."""
    hasher, highest, num_documents = blake3(), 0, 0
    with os_errors_as(DataError, f"{path} cannot be read"):
        tokens = np.memmap(path, dtype=dtype, mode="r")
    for start in range(0, len(tokens), _SCAN_TOKENS):
        piece = np.ascontiguousarray(tokens[start : start + _SCAN_TOKENS])
        highest = max(highest, int(piece.max()))
        if highest >= tokenizer.vocab_size:
            return highest
        num_documents += int(np.count_nonzero(piece == tokenizer.end_of_text))
        hasher.update(piece.tobytes())
    return Sidecar(
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        dtype=dtype.name,
        num_tokens=len(tokens),
        num_documents=num_documents,
        max_token=highest,
        blake3=hasher.hexdigest(),
    )
