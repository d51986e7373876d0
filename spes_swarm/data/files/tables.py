"""The values of one column of a CSV or Parquet file, a few rows at a time.

A value that cannot be read costs its row. Libraries raise errors of many types while they decode, so all are caught.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import DataError
from spes_swarm.data.files.contents import Block

Rows = tuple[list[Any], int, Counter[str]]  # values, the bytes of the file that they took, and broken rows by kind

NOT_UTF8 = b"\xff"  # stands for a value of which a part is not UTF-8

_TABLE_ROWS = 256
_ROWS_BYTES = 1 << 20
_MAX_FIELD_CHARS = 1 << 24  # a quotation mark too many hides at most so much


def csv_rows(blocks: Iterator[Block], delimiter: str, column: str) -> Iterator[Rows]:
    """Yields the values of a column, None where a row lacks it; the first row names the columns.

    Bytes that are not UTF-8 become lone surrogates.
    """
    consumed, held = 0, 0
    broken: Counter[str] = Counter()

    def lines() -> Iterator[str]:
        nonlocal consumed
        pending, end = b"", b""
        for block, block_consumed, fault in blocks:
            consumed += block_consumed
            end = end or (b"\r" if b"\r" in block and b"\n" not in block else b"\n")
            *whole, pending = (pending + block).split(end)
            yield from (line.decode("utf-8", "surrogateescape") + "\n" for line in whole)
            if fault is not None:
                broken[fault] += 1
                return  # the last line is cut short
        if pending:
            yield pending.decode("utf-8", "surrogateescape")

    rows = parsed_csv(lines(), delimiter=delimiter)
    names = next(rows, [])
    if names is None:
        broken["bad_csv"] += 1
    index = names.index(column) if names and column in names else sys.maxsize
    values: list[Any] = []
    for row in rows:
        if row is None:
            broken["bad_csv"] += 1
        else:
            values.append(row[index] if index < len(row) else None)
            held += len(values[-1] or "")
        if held > _ROWS_BYTES or len(values) > _ROWS_BYTES >> 8:
            yield values, consumed, broken
            values, consumed, held, broken = [], 0, 0, Counter()
    yield values, consumed, broken


def delimiter_hint(names: Sequence[str]) -> str:
    """Returns what to say of a header that looks like one with another delimiter; empty if it does not."""
    found = next((sign for sign in ";|\t," if len(names) == 1 and sign in names[0]), "")
    advice = {"\t": "name it .tsv", ",": "name it .csv"}.get(found, "convert it to commas")
    return f"; the delimiter seems to be {found!r}: {advice}" if found else ""


def parsed_csv(lines: Iterable[str], **dialect: Any) -> Iterator[list[str] | None]:
    """Yields rows, given the options of `csv.reader`; None for a row that cannot be read.

    The further lines of such a row are read again. A quotation mark that is never closed hides the lines that follow:
    the row then has too many fields, is too long, or reaches the end of the file.
    """
    waiting: deque[str] = deque()  # lines to be read again
    taken: list[str] = []  # lines of the current row
    num_columns = 0
    at_end = False
    more = iter(lines)

    def feed() -> Iterator[str]:
        nonlocal at_end
        while (line := waiting.popleft() if waiting else next(more, None)) is not None:
            taken.append(line)
            yield line
        at_end = True

    csv.field_size_limit(_MAX_FIELD_CHARS)
    reader = csv.reader(feed(), **dialect)
    while True:
        taken.clear()
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:
            row = None
        if row == []:
            continue  # a blank line
        if row is None or at_end or len(row) > (num_columns or len(row)):
            waiting.extendleft(reversed(taken[1:]))
            row, at_end = None, False
            reader = csv.reader(feed(), **dialect)
        num_columns = num_columns or len(row or ())
        yield row


def parquet_columns(path: Path) -> list[str]:
    """Returns the names of a table's columns; none if it is damaged or pyarrow is not installed."""
    try:
        import pyarrow.parquet as pq

        return list(pq.read_schema(path).names)
    except Exception:  # see above
        return []


def parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[dict[str, list[Any]], int, Counter[str]]]:
    """Yields the values of those of the columns that a table has, text as bytes.

    Raises:
        DataError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise DataError(f"{path} needs the package pyarrow: pip install 'spes-swarm[corpora]'") from exc
    size = path.stat().st_size
    with ExitStack() as stack:
        try:
            table = stack.enter_context(pq.ParquetFile(path, memory_map=True))
            num_rows, names = table.metadata.num_rows, table.schema_arrow.names
        except Exception:  # see above
            yield {}, size, Counter(["corrupt"])
            return
        present = [column for column in columns if column in names]
        if not present:
            yield {}, size, Counter(missing_field=num_rows)
            return
        for group in range(table.num_row_groups):
            try:
                for batch in table.iter_batches(_TABLE_ROWS, row_groups=[group], columns=present):
                    values = {column: _values(batch.column(i), pa) for i, column in enumerate(batch.schema.names)}
                    yield values, size * batch.num_rows // max(1, num_rows), Counter()
            except Exception:
                yield {}, 0, Counter(["corrupt"])


def _values(column: Any, pa: Any) -> list[Any]:
    """Returns Python values, text as bytes: pyarrow would fail a whole batch for one string that is not UTF-8.

    Strings inside lists and structs stay strings; a value with one that is not UTF-8 is `NOT_UTF8`.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    try:
        return list(column.to_pylist())
    except Exception:
        return [_value(item) for item in column]


def without_nulls(value: Any) -> Any:
    """Drops null fields: in a table, each record has the fields of all records. Bytes become text."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _value(item: Any) -> Any:
    try:
        return item.as_py()
    except UnicodeDecodeError:
        return NOT_UTF8
    except Exception:  # such as a date beyond the year 9999
        return ()
