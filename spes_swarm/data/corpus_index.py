"""The index of a corpus: `corpus.json` next to the shards lists all of them, so any subset can prove its origin.

The digest of a corpus is the BLAKE3 of the tokenizer's digest and of the shards' content digests and lengths, in order.
It does not depend on where the shards are stored, and one shard with the index is enough to show that the shard belongs
to the corpus. The shards in a directory without an index form a whole corpus.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import Field, ValidationError

from spes_swarm.base.decoding import StrictModel, first_complaint
from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import replace_file
from spes_swarm.data.token_file import TokenFile

INDEX_FILE = "corpus.json"


class _Shard(StrictModel):
    name: str  # informational
    num_tokens: Annotated[int, Field(ge=1)]
    blake3: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # of the token bytes, as in the shard's sidecar


class _Index(StrictModel):
    format: Literal["spes-swarm-corpus"] = "spes-swarm-corpus"
    version: Literal[1] = 1
    tokenizer_digest: str
    shards: Annotated[list[_Shard], Field(min_length=1)]


def corpus_digest(tokenizer_digest: str, shards: Iterable[tuple[str, int]]) -> str:
    """Returns the hex BLAKE3 of a corpus, from the content digest and number of tokens of each shard, in order."""
    hasher = blake3()
    for content, num_tokens in shards:
        hasher.update(f"{tokenizer_digest} {content} {num_tokens}\n".encode())
    return hasher.hexdigest()


def write_index(directory: Path, files: Sequence[TokenFile]) -> Path:
    """Writes the index of all shards of a corpus, in their order; returns its path.

    Raises:
        DataError: the directory cannot be written.
    """
    index = _Index(
        tokenizer_digest=files[0].sidecar.tokenizer_digest,
        shards=[
            _Shard(name=file.path.name, num_tokens=file.sidecar.num_tokens, blake3=file.sidecar.blake3)
            for file in files
        ],
    )
    path = directory / INDEX_FILE
    with os_errors_as(DataError, f"{path} cannot be written", "free some space"):
        replace_file(path, index.model_dump_json(indent=1) + "\n")
    return path


@dataclass(frozen=True)
class Membership:
    """The corpus that token files belong to."""

    digest: str  # of the whole corpus
    num_shards: int  # of the whole corpus
    is_indexed: bool  # whether an index lists the files; otherwise they count as a whole corpus


def membership(files: Sequence[TokenFile]) -> Membership:
    """Returns the corpus that token files belong to, by the index in their common folder.

    A single file that the index next to it does not list counts as a whole corpus.

    Raises:
        DataError: the index is damaged, or lists only some of the files.
    """
    path = Path(os.path.commonpath([file.path.parent.absolute() for file in files])) / INDEX_FILE
    tokenizer_digest = files[0].sidecar.tokenizer_digest
    own = [(file.sidecar.blake3, file.sidecar.num_tokens) for file in files]
    index = _read(path)
    if index is not None:
        listed = [(shard.blake3, shard.num_tokens) for shard in index.shards]
        known = set(listed) if index.tokenizer_digest == tokenizer_digest else set()
        strangers = [file.path for file, shard in zip(files, own, strict=True) if shard not in known]
        if not strangers:
            return Membership(corpus_digest(tokenizer_digest, listed), len(listed), is_indexed=True)
        if len(files) > 1:
            raise DataError(
                f"{strangers[0]} is not a shard of the corpus that {path} lists: move it away, or remove {INDEX_FILE} "
                "to make all of them one corpus"
            )
    return Membership(corpus_digest(tokenizer_digest, own), len(own), is_indexed=False)


def _read(path: Path) -> _Index | None:
    try:
        return _Index.model_validate_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise DataError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        reason = first_complaint(exc, max_chars=80)
        raise DataError(f"{path} is damaged ({reason}): copy it again from where the corpus was made") from exc
