"""Token files: written in one block, and opened with all of their content checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spes_swarm.data.token_file import TokenFile, TokenWriter
from spes_swarm.data.tokenizer import Tokenizer


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
