"""Token files: a `.npy` array of token ids and a JSON sidecar that describes them.

`X.npy` holds one 1-D little-endian uint16 or uint32 array, or an int32 array in which tokens that are not targets are
stored as their complement `~id` (chat.py); `X.npy.json` names the tokenizer (with its digest), counts
tokens and documents and carries the BLAKE3 digest of the token bytes. Both are written under temporary names and appear
only when complete, the sidecar first: an `X.npy` that exists is complete. Readers map the file and never unpickle.
Files of others, which have no sidecar: headerless.py.
"""

from __future__ import annotations

import ast
import json
import math
import os
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import sync_to_disk
from spes_swarm.data.tokenizer import Tokenizer

FORMAT = "spes-swarm-tokens"
FORMAT_VERSION = 1

TokenArray = NDArray[Any]

MAGIC = b"\x93NUMPY"  # how every .npy file starts
_HEADER_BYTES = 128  # fixed, so that the final length can be filled in after streaming
_DTYPES = {"<u2": "uint16", "<u4": "uint32", "<i4": "int32"}
_REMAKE = "recreate it with python -m spes_swarm.tokenize"
_SCAN_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """The content of `<file>.json`."""

    format: str = FORMAT
    version: int = FORMAT_VERSION
    tokenizer: str  # display name
    tokenizer_digest: str  # hex BLAKE3, see Tokenizer.digest
    vocab_size: int
    end_of_text: int
    dtype: str  # "uint16" or "uint32"; "int32" if some tokens are not targets
    num_tokens: int
    num_documents: int
    max_token: int
    blake3: str  # hex, of the token bytes (without the npy header)


def sidecar_path(path: Path) -> Path:
    """Returns the path of a token file's sidecar."""
    return path.with_name(path.name + ".json")


class TokenWriter:
    """Streams tokens into a file that appears only on `commit`.

    A killed process leaves at most a `.X.npy.PID.partial`, which readers ignore. The dtype is uint16 if all ids fit,
    otherwise uint32, and int32 with `has_context`: some tokens may not be targets.

    Raises:
        DataError: the directory cannot be written.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer, *, has_context: bool = False) -> None:
        self.path = path
        self.num_tokens = 0
        self.num_documents = 0
        self._tokenizer = tokenizer
        self._dtype = np.dtype("<i4") if has_context else token_dtype(tokenizer.vocab_size)
        self._hasher = blake3()
        self._max_token = -1
        self._partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with os_errors_as(DataError, f"{path.parent} cannot be written", "choose another directory"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self._partial.open("wb")
        self._file.write(b"\0" * _HEADER_BYTES)

    def append(self, tokens: TokenArray, num_documents: int) -> None:
        """Adds ids, 1-D of an integer dtype, that complete `num_documents` documents; complements with `has_context`.

        Raises:
            DataError: an id is negative or not below the vocabulary size, or the disk is full.
        """
        if len(tokens):
            ids = token_ids(tokens) if self._dtype.kind == "i" else tokens
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self._tokenizer.vocab_size:
                raise DataError(
                    f"tokenizer {self._tokenizer.name!r} produced the id {low if low < 0 else high}, outside its "
                    f"vocabulary of {self._tokenizer.vocab_size}: the tokenizer is broken"
                )
            self._max_token = max(self._max_token, high)
            content = tokens.astype(self._dtype).tobytes()
            self._hasher.update(content)
            with os_errors_as(DataError, f"{self.path} cannot be written", "free some space"):
                self._file.write(content)
        self.num_tokens += len(tokens)
        self.num_documents += num_documents

    def commit(self) -> Path:
        """Makes the file visible, durably, and returns its path.

        Raises:
            DataError: nothing was appended, or the disk is full; no file appears.
        """
        if self.num_tokens == 0:
            self.abort()
            raise DataError(f"{self.path}: there are no tokens to write")
        sidecar = Sidecar(
            tokenizer=self._tokenizer.name,
            tokenizer_digest=self._tokenizer.digest,
            vocab_size=self._tokenizer.vocab_size,
            end_of_text=self._tokenizer.end_of_text,
            dtype=_DTYPES[self._dtype.str],
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            max_token=self._max_token,
            blake3=self._hasher.hexdigest(),
        )
        partial_sidecar = sidecar_path(self._partial)
        try:
            self._file.seek(0)
            self._file.write(_npy_header(self._dtype, self.num_tokens))
            self._file.close()
            sync_to_disk(self._partial)
            partial_sidecar.write_text(json.dumps(asdict(sidecar), indent=2) + "\n", encoding="utf-8")
            sync_to_disk(partial_sidecar)
            self.path.unlink(missing_ok=True)  # an old array must never be paired with the new sidecar
            partial_sidecar.replace(sidecar_path(self.path))
            self._partial.replace(self.path)
            sync_to_disk(self.path.parent)
        except OSError as exc:
            self.abort()
            raise DataError(f"{self.path} cannot be written: {exc.strerror}; free some space") from exc
        return self.path

    def abort(self) -> None:
        """Removes what was written so far; harmless after `commit`."""
        with suppress(OSError):  # the disk may be too full for what is still in memory
            self._file.close()
        sidecar_path(self._partial).unlink(missing_ok=True)
        self._partial.unlink(missing_ok=True)


@dataclass(frozen=True)
class TokenFile:
    """A verified token file, mapped into memory read-only."""

    path: Path
    sidecar: Sidecar
    tokens: TokenArray  # (num_tokens,), uint16, uint32 or int32; integers of any kind in a file of others
    has_header: bool = True  # False: the sidecar was derived from the content, see headerless.py

    @classmethod
    def open(cls, path: Path, tokenizer: Tokenizer | None = None) -> TokenFile:
        """Opens and verifies a token file, which must have been made with `tokenizer`, unless that is None.

        Checks sidecar, header, dtype, dimensions and length, in microseconds; `check_content` reads the whole file.

        Raises:
            DataError: the file is missing, truncated, corrupt, not a token file, or made with another tokenizer.
        """
        try:
            with path.open("rb") as file:
                dtype, num_tokens, start = _read_npy_header(file)
                size = os.fstat(file.fileno()).st_size
        except OSError as exc:
            raise DataError(f"{path} cannot be read: {exc.strerror}") from exc
        except ValueError as exc:
            raise DataError(f"{path} is not a token file: {exc}; {_REMAKE}") from exc
        sidecar = read_sidecar(path, sidecar_path(path))
        if sidecar.dtype != _DTYPES[dtype.str] or sidecar.num_tokens != num_tokens:
            raise DataError(
                f"{path} holds {num_tokens} tokens of {_DTYPES[dtype.str]}, but its sidecar says {sidecar.num_tokens} "
                f"of {sidecar.dtype}: they do not belong together; {_REMAKE}"
            )
        expected = start + num_tokens * dtype.itemsize
        if size != expected:
            state = "truncated" if size < expected else "longer than its header says"
            raise DataError(f"{path} is {state}: {size} bytes instead of {expected}; copy it again or {_REMAKE}")
        if tokenizer is not None and sidecar.tokenizer_digest != tokenizer.digest:
            raise DataError(
                f"{path} was made with the tokenizer {sidecar.tokenizer!r} ({sidecar.tokenizer_digest[:12]}), "
                f"but this run uses {tokenizer.name!r} ({tokenizer.digest[:12]}); tokenise the text again "
                "with the run's tokenizer"
            )
        return cls(path, sidecar, np.memmap(path, dtype=dtype, mode="r", offset=start, shape=(num_tokens,)))

    def check_content(self) -> None:
        """Compares the digest and the range of all token ids with the sidecar.

        Raises:
            DataError: a token has changed, or is not below the vocabulary size.
        """
        hasher = blake3()
        for start in range(0, len(self.tokens), _SCAN_TOKENS):
            piece = np.ascontiguousarray(self.tokens[start : start + _SCAN_TOKENS])
            self.check_range(piece)
            hasher.update(piece.tobytes())
        if hasher.hexdigest() != self.sidecar.blake3:
            raise DataError(f"{self.path} is corrupt: its tokens do not match their digest; copy it again or {_REMAKE}")

    def check_range(self, tokens: TokenArray) -> None:
        """Checks ids that were read from this file.

        Raises:
            DataError: an id is not below the vocabulary size.
        """
        if len(tokens) and (largest := int(token_ids(tokens).max())) >= self.sidecar.vocab_size:
            raise DataError(
                f"{self.path} is corrupt: token id {largest} in a vocabulary of {self.sidecar.vocab_size}; "
                f"copy it again or {_REMAKE}"
            )


def token_ids(tokens: TokenArray) -> TokenArray:
    """Returns the ids of tokens, some of which may be stored as complements."""
    return np.where(tokens < 0, ~tokens, tokens) if tokens.dtype.kind == "i" else tokens


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Returns the little-endian dtype in which a vocabulary's ids are stored."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _npy_header(dtype: np.dtype[Any], num_tokens: int) -> bytes:
    """A version 1.0 `.npy` header of `_HEADER_BYTES` bytes (numpy.lib.format)."""
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({num_tokens},), }}"
    length = _HEADER_BYTES - len(MAGIC) - 4
    return MAGIC + b"\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1).encode("ascii") + b"\n"


def _read_npy_header(file: BinaryIO) -> tuple[np.dtype[Any], int, int]:
    """Reads dtype, number of tokens and the offset of the first token.

    Raises:
        ValueError: not a 1-D array of a dtype for tokens.
    """
    descr, shape, start = read_npy_header(file)
    if descr not in _DTYPES:
        raise ValueError(f"its dtype is {descr!r}, not uint16 or uint32")
    if len(shape) != 1:
        raise ValueError(f"its shape is {shape!r}, not one dimension")
    return np.dtype(descr), shape[0], start


def read_npy_header(file: BinaryIO) -> tuple[str, tuple[int, ...], int]:
    """Reads the dtype and shape of an array, and the offset of its first element.

    NumPy's own reader is not used: it warns about, converts or maps files that can never be token files.

    Raises:
        ValueError: not an array of a plain dtype that is stored row by row, or an empty one.
    """
    prefix = file.read(8)
    if len(prefix) < 8 or prefix[:6] != MAGIC:
        raise ValueError("it does not start like a .npy file")
    if prefix[6] not in (1, 2, 3):
        raise ValueError(f"unknown .npy version {prefix[6]}")
    width = 2 if prefix[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > 1 << 16:
        raise ValueError("its header is damaged")
    header = file.read(length)
    try:
        parsed = ast.literal_eval(header.decode("ascii"))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as exc:
        raise ValueError("its header is damaged") from exc
    if not isinstance(parsed, dict) or len(header) < length:
        raise ValueError("its header is damaged")
    descr, shape = parsed.get("descr"), parsed.get("shape")
    if not isinstance(descr, str):
        raise ValueError(f"its dtype is {descr!r}, not uint16 or uint32")
    if not isinstance(shape, tuple) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"its shape is {shape!r}, not one dimension")
    if len(shape) > 1 and parsed.get("fortran_order") is not False:
        raise ValueError("it is stored column by column (fortran_order)")
    if math.prod(shape) < 1:
        raise ValueError("it is empty")
    return descr, shape, len(prefix) + width + length


def read_sidecar(path: Path, location: Path) -> Sidecar:
    """Reads the description of the token file `path` at `location`.

    Raises:
        DataError: it is missing, not a description, or of another version.
    """
    try:
        content = json.loads(location.read_bytes())
    except FileNotFoundError as exc:
        raise DataError(f"{path} has no sidecar {location.name}: copy it too, or {_REMAKE}") from exc
    except OSError as exc:
        raise DataError(f"{location} cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{location} is not JSON: {exc}; {_REMAKE}") from exc
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{location} does not describe a token file; {_REMAKE}")
    if content.get("version") != FORMAT_VERSION:
        raise DataError(
            f"{location} has the format version {content.get('version')!r}, but this program reads "
            f"{FORMAT_VERSION}; {_REMAKE}"
        )
    kinds = {"str": str, "int": int}
    wanted = {field.name: kinds[str(field.type)] for field in fields(Sidecar)}
    wrong = sorted(name for name, kind in wanted.items() if type(content.get(name)) is not kind)
    if wrong:
        raise DataError(f"{location} has missing or invalid fields: {', '.join(wrong)}; {_REMAKE}")
    return Sidecar(**{name: content[name] for name in wanted})
