"""A data set of the `datasets` library, as units of examples that can be read from any point.

Only formats that contain data are read: no code of a repository is run, and nothing is unpickled. A unit is a file or,
if there are few Parquet files, a row group. If the unit is a whole Parquet file, its row groups are its *parts*, so a
peer that resumes in the middle fetches only what it needs. Other files have one part and are read from the beginning.

`datasets` finds the files and their options; rows.py reads them. Each example has one value: the text of a document,
the record of a conversation in a form of chat.py, or `Unusable`.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.log import divert
from spes_swarm.base.user_paths import refuse_lfs_pointer
from spes_swarm.base.wording import plural
from spes_swarm.config.data_source import HfName
from spes_swarm.data.files.contents import PARQUET_MAGIC, refuse_stand_in
from spes_swarm.data.files.finding import ending, link_data, listed
from spes_swarm.data.files.tables import delimiter_hint
from spes_swarm.data.streaming.pieces import MANY_UNITS
from spes_swarm.data.streaming.rows import RowReader, Unusable, one_line

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
    value: Any  # text, a record with a conversation, or `Unusable`


def check_installed(source: HfName) -> None:
    """Checks that `datasets` is installed without importing it, which takes seconds.

    Raises:
        DataError: it is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DataError(f"{source} needs the package datasets: pip install 'spes-swarm[hf]'")


class StreamedDataset:
    """One split of a data set.

    Attributes:
        column: the column of the texts or conversations.
        is_chat: whether the examples are conversations.
        revision: commit of the repository on the Hub; None for a directory.
        digest: hex BLAKE3 that identifies the files and the column; of local files it covers the names, sizes, and the
            first and last MiB.
        summary: what is read, in one line.
    """

    def __init__(self, source: HfName, split: str = SPLIT) -> None:
        """Lists the files, and reads the columns of the first intact one and, if there are few files, their row groups.

        Raises:
            DataError: the data set, configuration, split or column does not exist, or cannot be read.
        """
        check_installed(source)
        import datasets  # takes seconds to import

        _silence(datasets)
        self.name = str(source)
        try:
            self.revision = None if source.is_local else _commit(source)
            builder, splits, left_out = _built(source, self.revision)
            if not (files := splits.get(split)):
                raise DataError(f"{source} has no split {split!r} (splits: {', '.join(splits) or 'none'})")
            root = Path(source.name)
            what = [_identity(file, root, _format(builder)) if source.is_local else file for file in files]
            self._rows = RowReader(_format(builder), builder.config)
            members = [member for file in files for member in _members(file)]
            self.column = _column(source, self._rows, members)
            self._units: list[tuple[str, int | None]] = [(member, None) for member in members]
            if len(members) < MANY_UNITS and self._rows.format == "parquet":
                self._units = [(member, group) for member in members for group in range(self._rows.num_parts(member))]
            if not self._units:
                raise DataError(f"{source} has no rows")
        except DataError:
            raise
        except Exception as exc:  # datasets, its file systems and the Hub's client each raise their own types
            raise DataError(f"{source} cannot be opened: {one_line(exc)}") from exc
        self.num_units = len(self._units)
        self.is_chat = self.column in _CHATS
        others = f"; left out: {listed(left_out)}" if left_out else ""
        self.summary = f"{source}: {plural(len(files), 'file')}, column {self.column}{others}"
        self.digest: str = blake3("\n".join([self.column, *what]).encode()).hexdigest()

    def read(self, unit: int, part: int = 0, number: int = 0) -> Iterator[Example]:
        """Yields the examples of a unit in order, from this part and number on.

        Raises:
            Exception: whatever `datasets`, its file systems and the Hub's client raise; see reader.py.
        """
        file, group = self._units[unit]
        parts = range(self._rows.num_parts(file)) if group is None else [group]
        for index in range(part, len(parts)):
            first = number if index == part else 0
            values = self._rows.rows(file, parts[index], self.column)
            for offset, value in enumerate(itertools.islice(values, first, None), first):
                is_record = self.is_chat and not isinstance(value, Unusable)
                yield Example(index, offset, {self.column: value} if is_record else value)


def _silence(datasets: Any) -> None:
    """Keeps the libraries from printing: failures are reported in one line."""
    datasets.disable_progress_bars()
    divert("datasets", "huggingface_hub")


def _format(builder: Any) -> str:
    return type(builder).__module__.rpartition(".")[2]


def _built(source: HfName, revision: str | None) -> tuple[Any, dict[str, list[str]], Counter[str]]:
    """Returns the builder of a data set, its files by split, and how many files of a directory are not data.

    `datasets` is shown only the data files of a directory, and decides about their format and splits.

    Raises:
        DataError: there are no data files, or they are not all of one format that is read.
    """
    import datasets

    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch).resolve() / "view"
        is_directory = source.is_local and not source.config
        linked, left_out = link_data(Path(source.name), view) if is_directory else ({}, Counter[str]())
        place = str(view) if linked else source.name
        cache = f"{scratch}/cache" if linked else None  # the user's would keep a lock for each view
        try:
            builder = datasets.load_dataset_builder(place, source.config, revision=revision, cache_dir=cache)
        except datasets.exceptions.DataFilesNotFoundError as exc:
            if not linked:
                raise
            endings = listed(Counter(map(ending, linked.values())))
            advice = "leave out 'hf:', or convert them"
            raise DataError(f"{source} holds no files that can be streamed ({endings}): {advice}") from exc
    if _format(builder) not in _FORMATS:
        raise DataError(f"{source} has the format {_format(builder)}, expected one of {', '.join(_FORMATS)}")
    found = {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
    if missing := linked.keys() - set(itertools.chain(*found.values())):
        endings = listed(Counter(ending(linked[file]) for file in missing))
        raise DataError(
            f"{source} would leave out data files ({endings}): a stream has one format; keep formats in different "
            "directories, or leave out 'hf:'"
        )
    splits = {split: [str(linked.get(file, file)) for file in files] for split, files in found.items()}
    return builder, splits, left_out


def _members(file: str) -> list[str]:
    """Returns the files in an archive, or the file itself."""
    if not file.endswith(".zip"):
        return [file]
    from datasets import StreamingDownloadManager

    manager = StreamingDownloadManager()
    return list(manager.iter_files(manager.extract(file)))


def _column(source: HfName, rows: RowReader, files: Sequence[str]) -> str:
    """Returns the column of the texts or conversations, which the first intact file decides."""
    columns = next(filter(None, map(rows.columns, files)), [])
    for column in (*_CHATS, *_TEXTS):
        if column in columns:
            return column
    if not columns:
        found = (value for file in files for value in rows.rows(file, 0, _TEXTS[0]) if isinstance(value, Unusable))
        faults = next((f" ({fault.detail or fault.kind})" for fault in found), "")
        raise DataError(f"{source} has no row that can be read in {plural(len(files), 'file')}{faults}")
    raise DataError(
        f"{source} has the columns {', '.join(columns)[:200]}, expected one named {', '.join(_TEXTS)}, "
        f"or {' or '.join(_CHATS)} with conversations{delimiter_hint(columns)}"
    )


def _commit(source: HfName) -> str:
    from huggingface_hub import HfApi

    commit = HfApi().dataset_info(source.name, revision=source.revision, timeout=30.0).sha
    if commit is None:
        raise DataError(f"{source}: the Hub does not report its commit")
    return str(commit)


def _identity(file: str, root: Path, format_: str) -> str:
    """Returns what identifies a local file, independent of where its directory is.

    Raises:
        DataError: it cannot be read, or is not of the format.
    """
    path = Path(file)
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as content:
        size = path.stat().st_size
        hasher = blake3(start := content.read(_COMPARED_BYTES))
        content.seek(max(0, size - _COMPARED_BYTES))
        hasher.update(content.read(_COMPARED_BYTES))
    refuse_lfs_pointer(path, start, DataError)
    if path.suffix != ".zip":  # `datasets` unpacks it
        refuse_stand_in(path)
    if start.startswith(PARQUET_MAGIC) and format_ != "parquet":
        raise DataError(f"{path} is a Parquet file: give it a name that ends in .parquet")
    name = path.relative_to(root) if path.is_relative_to(root) else path.name
    return f"{name} {size} {hasher.hexdigest()}"
