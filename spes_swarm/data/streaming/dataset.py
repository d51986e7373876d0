"""A data set of the `datasets` library as units of examples, which can be read from any place on.

Only formats whose content is data are read: no code of a repository is run, and nothing is unpickled. A unit is a file,
or a row group of one if there are few files and they are Parquet. A file that is a unit of its own still has its row
groups as *parts*, so a peer that resumes in the middle fetches only what it needs. Other files have one part and are
read from their beginning.

Each example gives one value: the text of a document, or the record of a conversation, which chat.py understands.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.config.data_source import HfName
from spes_swarm.data.streaming.pieces import MANY_UNITS

SPLIT = "train"

_FORMATS = ("parquet", "json", "csv", "text")
_CHATS = ("messages", "conversations")
_TEXTS = ("text", "content")
_COMPARED_BYTES = 1 << 20  # at either end of a local file


@dataclass(frozen=True, slots=True)
class Example:
    """One example and its place in its unit."""

    part: int
    number: int  # in the part
    value: Any  # text, or a record with a conversation


def check_installed(source: HfName) -> None:
    """Checks that `datasets` is installed, without the seconds that importing it takes.

    Raises:
        DataError: it is not.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{source} needs the package datasets: pip install 'spes-swarm[hf]'")


class StreamedDataset:
    """One split of a data set.

    Attributes:
        column: of the texts or conversations.
        is_chat: whether it has conversations.
        revision: commit of the Hub's repository; None for a directory.
        digest: hex BLAKE3 that identifies the files and the column; of local files, their names, sizes, and the first
            and last MiB.
    """

    def __init__(self, source: HfName, split: str = SPLIT) -> None:
        """Opens it: lists the files, reads the first one's schema and, if the files are few, their row groups.

        Raises:
            DataError: there is no such data set, configuration, split or column; or it cannot be read.
        """
        check_installed(source)
        import datasets  # takes seconds to import

        _silence(datasets)
        self.name = str(source)
        try:
            self.revision = None if source.is_local else _commit(source)
            builder = datasets.load_dataset_builder(source.name, source.config, revision=self.revision)
            if _format(builder) not in _FORMATS:
                raise DataError(f"{source} has the format {_format(builder)}, expected one of {', '.join(_FORMATS)}")
            files = list(map(str, (builder.config.data_files or {}).get(split, ())))
            if not files:
                known = ", ".join(map(str, builder.config.data_files or ())) or "none"
                raise DataError(f"{source} has no split {split!r} (splits: {known})")
            stream = builder.as_streaming_dataset(split=split)
            self.column = _column(source, list(stream.features or next(iter(stream))))
            if stream.num_shards < MANY_UNITS:
                stream = stream.reshard()
        except DataError:
            raise
        except Exception as exc:  # datasets, its file systems and the Hub's client each raise their own types
            raise DataError(f"{source} cannot be opened: {one_line(exc)}") from exc
        self._stream = stream
        self.num_units = int(stream.num_shards)
        self.is_chat = self.column in _CHATS
        what = [_identity(file, Path(source.name)) if source.is_local else file for file in files]
        self.digest: str = blake3("\n".join([self.column, *what]).encode()).hexdigest()

    def read(self, unit: int, part: int = 0, number: int = 0) -> Iterator[Example]:
        """Yields the examples of a unit in order, from a place on.

        Raises:
            Exception: whatever `datasets`, its file systems and the Hub's client raise; see reader.py.
        """
        parts = self._stream.shard(self.num_units, unit).reshard()
        for index in range(part, parts.num_shards):
            stream = parts.shard(parts.num_shards, index).select_columns([self.column])
            first = number if index == part else 0
            for offset, example in enumerate(stream.skip(first) if first else stream):
                value = example[self.column]
                yield Example(index, first + offset, {self.column: value} if self.is_chat else value)


def _silence(datasets: Any) -> None:
    """Makes the libraries print nothing: whatever fails is reported in one line."""
    from huggingface_hub.utils import logging as hub_logging

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)


def one_line(error: BaseException) -> str:
    """Returns the message of an error in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _format(builder: Any) -> str:
    return type(builder).__module__.rpartition(".")[2]


def _column(source: HfName, columns: Collection[str]) -> str:
    for column in (*_CHATS, *_TEXTS):
        if column in columns:
            return column
    raise DataError(
        f"{source} has the columns {', '.join(columns)[:200]}, expected one named {', '.join(_TEXTS)}, "
        f"or {' or '.join(_CHATS)} with conversations"
    )


def _commit(source: HfName) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(source.name, revision=source.revision, timeout=30.0).sha
    if commit is None:
        raise DataError(f"{source}: the Hub does not say which commit this is")
    return str(commit)


def _identity(file: str, root: Path) -> str:
    """Returns what identifies a local file, wherever its directory is."""
    path = Path(file)
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as content:
        size = path.stat().st_size
        hasher = blake3(content.read(_COMPARED_BYTES))
        content.seek(max(0, size - _COMPARED_BYTES))
        hasher.update(content.read(_COMPARED_BYTES))
    name = path.relative_to(root) if path.is_relative_to(root) else path.name
    return f"{name} {size} {hasher.hexdigest()}"
