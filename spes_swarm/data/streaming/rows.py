"""The rows of one file of a data set: a Parquet, JSON, CSV or text file, compressed or not.

A row that cannot be used is yielded as `Unusable` and has a number like any other, so it costs no other row, and all
peers number, divide and hold out the same rows. What follows damage that cannot be skipped is lost: one row stands for
the rest of a compressed file, and each row of a Parquet row group for itself. Rows that were damaged without a trace,
for instance by a quotation mark too many in CSV, are read as what they seem to be.
"""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import json
import lzma
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

from spes_swarm.data.files.contents import Block, compression_of, json_lines
from spes_swarm.data.files.tables import parsed_csv
from spes_swarm.data.readers import cut, json_records

_TABLE_ROWS = 256  # in memory at a time
_BLOCK_CHARS = 1 << 16  # of JSON; the first block decides about the layout
_JUDGED_RECORDS = 1000  # JSON records whose keys are a file's columns
_MAGIC_BYTES = 16  # tell how a file is compressed
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class Unusable:
    """A row that cannot be used."""

    kind: str  # see readers.py
    detail: str = ""  # where and why, if more than the row is damaged


@dataclass(frozen=True)
class RowReader:
    """Reads files of one format.

    Its methods raise whatever the file systems of `datasets` and the Hub's client raise while a file cannot be reached
    (`is_transient`).
    """

    format: str  # "parquet", "json", "csv" or "text"
    config: Any  # of the builder in `datasets`, with the options that a repository sets

    def columns(self, file: str) -> list[str]:
        """Returns the names of a file's columns; none if it is damaged or empty."""
        try:
            with ExitStack() as stack:
                if self.format == "parquet":
                    return list(_table(file, stack).schema_arrow.names)
                if self.format == "text":
                    return ["text"]
                text = self._text(file, stack)
                if self.format == "csv":
                    return next(_csv_header(text, self.config), None) or []
                records = itertools.islice(_json_rows(text, self.config.field), _JUDGED_RECORDS)
                return list(dict.fromkeys(key for record in records if isinstance(record, Mapping) for key in record))
        except Exception as exc:  # each library that decodes has its own types
            if is_transient(exc):
                raise
            return []

    def num_parts(self, file: str) -> int:
        """Returns the number of parts that can be read by themselves: row groups, or 1."""
        if self.format != "parquet":
            return 1
        try:
            with ExitStack() as stack:
                return int(_table(file, stack).num_row_groups)
        except Exception as exc:
            if is_transient(exc):
                raise
            return 1  # `rows` says what is wrong

    def rows(self, file: str, part: int, column: str) -> Iterator[Any]:
        """Yields the value of a column, or `Unusable`, for each row of a part; null where a row lacks it."""
        try:
            with ExitStack() as stack:
                if self.format == "parquet":
                    yield from _table_rows(_table(file, stack), part, column, file)
                    return
                text = self._text(file, stack)
                if self.format == "text":
                    yield from _texts(text, self.config.sample_by)
                elif self.format == "csv":
                    yield from _csv_values(text, column, self.config)
                else:
                    for record in _json_rows(text, self.config.field):
                        is_record = isinstance(record, Mapping)
                        yield record.get(column) if is_record else _or_unusable(record)
        except Exception as exc:
            if is_transient(exc):
                raise
            yield Unusable("truncated" if isinstance(exc, EOFError) else "corrupt", _what(file, exc))

    def _text(self, file: str, stack: ExitStack) -> io.TextIOWrapper:
        """Opens a file as text; bytes that are not of its encoding become lone surrogates, which no text has."""
        content = io.BufferedReader(cast(io.RawIOBase, _decompressed(_opened(file, stack))))
        encoding = getattr(self.config, "encoding", None) or "utf-8"
        if encoding.lower().replace("_", "-") in ("utf-8", "utf8"):
            encoding = "utf-16" if content.peek(2)[:2] in _UTF16_MARKS else "utf-8-sig"
        errors = "surrogateescape" if encoding == "utf-8-sig" else "replace"
        newline = "" if self.format == "csv" else None
        return stack.enter_context(io.TextIOWrapper(content, encoding=encoding, errors=errors, newline=newline))


def is_transient(error: BaseException) -> bool:
    """Returns True if a read may succeed later: an error of the network or the disk, not of the content.

    `datasets` wraps errors in its own types. An OSError from a decoder has no errno.
    """
    from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported lazily

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ConnectionError | TimeoutError | httpx.HTTPError):
            return True
        if isinstance(seen, OSError) and seen.errno is not None:
            return True
        if type(seen).__module__.partition(".")[0] in ("aiohttp", "fsspec"):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def one_line(error: BaseException) -> str:
    """Returns an error's message as one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def has_surrogates(value: Any) -> bool:
    """Returns True if a JSON value contains a lone surrogate: bytes that were not UTF-8, or an escape in JSON."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False


def _what(file: str, error: BaseException) -> str:
    return f"{file.rpartition('/')[2]}: {one_line(error)}"


def _opened(file: str, stack: ExitStack) -> Any:
    from datasets.utils.file_utils import xopen

    return stack.enter_context(xopen(file, "rb"))


def _decompressed(raw: Any) -> Any:
    compression = compression_of(raw.read(_MAGIC_BYTES))
    raw.seek(0)
    if compression == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if compression == ".bz2":
        return bz2.BZ2File(raw)
    if compression == ".xz":
        return lzma.LZMAFile(raw)
    if compression == ".zst":
        import zstandard

        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)  # as of `zstd --long=31`
        return decompressor.stream_reader(raw, read_across_frames=True)
    return raw


def _texts(text: io.TextIOWrapper, sample_by: str) -> Iterator[str]:
    if sample_by == "line":
        yield from (line.removesuffix("\n") for line in text)
    elif sample_by == "paragraph":
        yield from (part for part in text.read().split("\n\n") if part)
    else:
        yield text.read()


# JSON


def _json_rows(text: io.TextIOWrapper, field: str | None) -> Iterator[Any]:
    """Yields the records of JSON Lines, of an array, or of indented objects; `Unusable` for one that is damaged.

    The records are those of a file in a directory (see readers.py).
    """
    if field is not None:
        yield from json.load(text)[field]
        return
    damage: list[Exception] = []
    for piece in cut(json_lines(_blocks(text, damage)), "json"):
        if not damage:
            yield from map(Unusable, piece.broken.elements())
        for line in cast(bytes, piece.records).split(b"\n"):
            content, broken = line.decode("utf-8", "surrogateescape"), Counter[str]()
            yield from json_records(content, broken)
            if broken:
                # Otherwise a byte that is not UTF-8 would count as a fault of JSON.
                yield Unusable("bad_utf8" if has_surrogates(content) else "bad_json")
    if damage:
        raise damage[0]


def _blocks(text: io.TextIOWrapper, damage: list[Exception]) -> Iterator[Block]:
    """Yields a text as blocks of whole lines; an error that is not transient ends them as a fault."""
    fault, size = None, _BLOCK_CHARS
    while size >= _BLOCK_CHARS:
        lines: list[str] = []
        size = 0
        try:
            while size < _BLOCK_CHARS and (line := text.readline(_BLOCK_CHARS)):
                lines.append(line)
                size += len(line)
        except Exception as exc:
            if is_transient(exc):
                raise  # the layout of the file follows from the first block
            damage.append(exc)
            fault, size = "corrupt", 0
        yield "".join(lines).encode("utf-8", "surrogateescape"), 0, fault


def _or_unusable(record: Any) -> Unusable:
    return record if isinstance(record, Unusable) else Unusable("wrong_type")


# CSV


def _csv_header(text: Iterable[str], config: Any) -> Iterator[list[str] | None]:
    """Yields the names of the columns, then the rows that have values; None for one that cannot be read."""
    skipped = config.skiprows if isinstance(config.skiprows, int) else 0
    options = ("quotechar", "escapechar", "doublequote", "skipinitialspace", "quoting")
    dialect = {option: getattr(config, option) for option in options}
    rows = parsed_csv(itertools.islice(text, skipped, None), delimiter=config.sep, **dialect)
    if config.names:
        yield list(config.names)
        if config.header == 0:
            next(rows, None)
    yield from rows


def _csv_values(text: Iterable[str], column: str, config: Any) -> Iterator[Any]:
    rows = _csv_header(text, config)
    columns = next(rows, [])
    if columns is None:
        yield Unusable("bad_csv")
    index = columns.index(column) if columns and column in columns else sys.maxsize
    for row in rows:
        if row is None or (columns and len(row) > len(columns)):
            yield Unusable("bad_csv")
        else:
            yield row[index] if index < len(row) else None


# Parquet


def _table(file: str, stack: ExitStack) -> Any:
    import pyarrow.parquet as pq

    return stack.enter_context(pq.ParquetFile(_opened(file, stack)))


def _table_rows(table: Any, part: int, column: str, file: str) -> Iterator[Any]:
    left = table.metadata.row_group(part).num_rows
    if column not in table.schema_arrow.names:
        yield from itertools.repeat(None, left)
        return
    try:
        decode = _decoder(table.schema_arrow, column)
        for batch in table.iter_batches(_TABLE_ROWS, row_groups=[part], columns=[column]):
            for value in _values(batch.column(0)):
                left -= 1
                yield decode(value)
    except Exception as exc:
        if is_transient(exc):
            raise
        yield from itertools.repeat(Unusable("corrupt", _what(f"{file}, row group {part}", exc)), left)


def _values(array: Any) -> Iterator[Any]:
    """Yields Python values: all at once, or one by one if one of them cannot be one."""
    try:
        yield from array.to_pylist()
    except Exception:  # the array is in memory: no error is transient
        for item in array:
            try:
                yield item.as_py()
            except UnicodeDecodeError:
                yield Unusable("bad_utf8")
            except Exception:  # such as a date beyond the year 9999
                yield Unusable("wrong_type")


def _decoder(schema: Any, column: str) -> Callable[[Any], Any]:
    """Returns what turns a stored value into that of `datasets`, which stores some as JSON."""
    from datasets import Features
    from datasets.features.features import decode_nested_example, require_decoding

    feature = Features.from_arrow_schema(schema)[column]
    if not require_decoding(feature):
        return lambda value: value

    def decoded(value: Any) -> Any:
        try:
            return value if isinstance(value, Unusable) else decode_nested_example(feature, value)
        except Exception as exc:
            if is_transient(exc):
                raise
            return Unusable("bad_json" if isinstance(exc, ValueError) else "wrong_type")

    return decoded
