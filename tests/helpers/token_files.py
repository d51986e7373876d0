"""Token files: written in one block or without a header, and opened with all of their content checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from spes_swarm.data.token_file import TokenArray, TokenFile, TokenWriter
from spes_swarm.data.tokenizer import Tokenizer


class Vocabulary:
    """A tokenizer of ids that stand for no text; its end of a document is 0."""

    end_of_text = 0
    date = "2024-07-26"

    def __init__(self, vocab_size: int) -> None:
        self.name = f"numbers below {vocab_size}"
        self.digest = f"{vocab_size:x}"
        self.vocab_size = vocab_size

    def produces(self, token_id: int) -> bool:
        return 0 <= token_id < self.vocab_size

    def encode(self, text: str) -> TokenArray:
        raise NotImplementedError

    def decode(self, ids: object) -> str:
        raise NotImplementedError

    def save(self, directory: Path) -> None:
        raise NotImplementedError


def save_headerless(path: Path, tokens: Sequence[int] | TokenArray, dtype: str) -> Path:
    """Writes ids as the authors of SPES and OLMo do: a memmap, whatever the file is called."""
    mapped = np.memmap(path, dtype=dtype, mode="w+", shape=(len(tokens),))
    mapped[:] = tokens
    mapped.flush()
    return path


@contextmanager
def token_writer(path: Path, tokenizer: Tokenizer) -> Iterator[TokenWriter]:
    """Commits the file at the end of the block, or removes everything if the block raises."""
    writer = TokenWriter(path, tokenizer)
    try:
        yield writer
    except BaseException:
        writer.abort()
        raise
    writer.commit()


def open_checked(path: Path, tokenizer: Tokenizer) -> TokenFile:
    """Opens a file and compares its tokens with their digest."""
    file = TokenFile.open(path, tokenizer)
    file.check_content()
    return file
