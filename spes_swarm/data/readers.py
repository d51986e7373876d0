"""Reads documents from text, JSON, CSV and Parquet files, in pieces that bound memory and can be parsed in parallel.

Reading has two stages. `read_pieces` reads a file in order and yields *pieces* of about a megabyte: raw bytes that
end where a record ends, or a few rows of a table. `parse_piece` turns a piece into documents; it is pure, so any
process can run it. Broken records are counted by kind and skipped: one bad record must not cost the others.

Kinds: `bad_json`, `bad_csv`, `bad_utf8`, `missing_field`, `wrong_type`, `too_long` (a record above 64 MiB),
`truncated` (a compressed file ends early), `corrupt` (a compressed stream or table that cannot be decoded), `empty`.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.data.files.contents import (
    MAX_RECORD_BYTES,
    PARQUET_MAGIC,
    Block,
    json_lines,
    refuse_stand_in,
    text_blocks,
)
from spes_swarm.data.files.finding import format_of
from spes_swarm.data.files.tables import NOT_UTF8, csv_rows, parquet_columns, parquet_rows, parsed_csv, without_nulls

TextMode = Literal["file", "paragraph", "line"]

_PIECE_BYTES = 1 << 20
_CHATS = ("messages", "conversations")  # the columns of conversations, see chat.py
_JSON = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_PARAGRAPH_END = re.compile(r"\r?\n[ \t\r]*\n")

Broken = Counter[str]


@dataclass(slots=True)
class Piece:
    """Some consecutive records of one file."""

    kind: Literal["json", "file", "paragraph", "line", "values"]
    records: bytes | list[Any]  # raw text that ends where a record ends; for "values", those of a table's column
    source_bytes: int  # how much of the file this covers, for progress
    broken: Broken = field(default_factory=Counter)  # skipped by the reader itself


def read_pieces(path: Path, *, text_field: str = "text", text_mode: TextMode = "file") -> Iterator[Piece]:
    """Reads one file in order; holds a few pieces in memory, unless single records are larger.

    `text_field` is the column of a CSV or Parquet file. A document in a text file is the whole file (above 64 MiB:
    parts of that size, cut at a line end), the text between blank lines, or a line.

    Raises:
        DataError: the file cannot be opened, is not what its name says, or its format needs a library that is not
            installed.
    """
    kind = format_of(path)
    if _is_parquet(path):
        for values, source_bytes, broken in parquet_rows(path, [text_field]):
            yield Piece("values", values.get(text_field, []), source_bytes, broken)
        return
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        blocks = text_blocks(file, path)
        if kind == "csv":
            for rows in csv_rows(blocks, _delimiter(path), text_field):
                yield Piece("values", *rows)
        elif kind == "json":
            yield from cut(json_lines(blocks), "json")
        else:
            yield from cut(blocks, text_mode)


def parse_piece(piece: Piece, text_field: str = "text") -> tuple[list[str], Broken]:
    """Returns the non-empty documents of a piece, in order, and the broken records by kind (the reader's included).

    In a JSON object, the text is under `text_field`.
    """
    broken = Counter(piece.broken)
    documents: list[str] = []
    for document in _documents(piece, text_field, broken):
        if not document.strip():
            broken["empty"] += 1
        elif not _is_encodable(document):
            broken["bad_utf8"] += 1  # JSON can express a lone surrogate, UTF-8 cannot
        else:
            documents.append(document)
    return documents, broken


def is_json_lines(path: Path) -> bool:
    """Returns True if a file may hold conversations by its name: JSON or Parquet."""
    return format_of(path) in ("json", "parquet")


def read_lines(path: Path, broken: Broken) -> Iterator[Any]:
    """Yields the records of a JSON file or the conversations and texts of a Parquet file, and counts broken ones.

    Raises:
        DataError: the file cannot be opened.
    """
    if not is_json_lines(path):
        return
    if _is_parquet(path):
        for columns, _, faults in parquet_rows(path, (*_CHATS, "text")):
            broken.update(faults)
            for row in zip(*columns.values(), strict=True):
                if NOT_UTF8 in row:
                    broken["bad_utf8"] += 1
                else:
                    yield without_nulls(dict(zip(columns, row, strict=True)))
        return
    for piece in read_pieces(path):
        broken.update(piece.broken)
        for line in cast(bytes, piece.records).split(b"\n"):
            for text in _text(line, broken):
                yield from json_records(text, broken)


def field_names(path: Path) -> list[str]:
    """Returns the columns of a table, or the fields of the first JSON object; none if there are none.

    Raises:
        DataError: the file cannot be opened.
    """
    if _is_parquet(path):
        return parquet_columns(path)
    if format_of(path) != "csv":
        return list(next((record for record in read_lines(path, Counter()) if isinstance(record, dict)), {}))
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        head = next(text_blocks(file, path))[0].decode("utf-8", "surrogateescape")
    return next(parsed_csv(io.StringIO(head, newline=None), delimiter=_delimiter(path)), None) or []


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in path.name.lower() else ","


def _is_parquet(path: Path) -> bool:
    return refuse_stand_in(path).startswith(PARQUET_MAGIC) or format_of(path) == "parquet"


def _documents(piece: Piece, text_field: str, broken: Broken) -> Iterator[str]:
    if piece.kind == "values":
        for value in piece.records:
            yield from _text(value, broken)
        return
    content = cast(bytes, piece.records)
    if piece.kind == "file":
        yield from _text(content, broken)
    elif piece.kind == "paragraph":
        for text in _text(content, broken):
            yield from (part for part in _PARAGRAPH_END.split(text) if part.strip())
    else:
        for line in content.split(b"\n"):
            if not line.strip():
                continue  # blank lines between records are common
            for text in _text(line, broken):
                if piece.kind == "line":
                    yield text.removesuffix("\r").removeprefix("\ufeff")
                else:
                    yield from _json_text(text, text_field, broken)


def _text(value: Any, broken: Broken) -> Iterator[str]:
    if isinstance(value, bytes):
        try:
            yield value.decode("utf-8")
        except UnicodeDecodeError:
            broken["bad_utf8"] += 1
    elif isinstance(value, str):
        yield value
    else:
        broken["missing_field" if value is None else "wrong_type"] += 1


def json_records(text: str, broken: Broken) -> Iterator[Any]:
    """Yields the value or objects of a line, or, of a broken record that was several lines, its lines' objects."""
    if not (stripped := text.strip().removeprefix("\ufeff").removesuffix(",")):
        return  # blank lines between records are common
    values: list[Any] = []
    end = 0
    try:
        while end < len(stripped) and (not end or stripped[end] == "{"):  # objects may follow without a line end
            value, end = _JSON.raw_decode(stripped, end)
            values.append(value)
            end = cast(re.Match[str], _SPACE.match(stripped, end)).end()
    except (ValueError, RecursionError):
        pass  # `end` is where the broken record begins
    if end == len(stripped):
        yield from values
    elif "\r" not in stripped:
        yield from (value for value in values if isinstance(value, dict))  # not the year of a log's line
        broken["bad_json"] += 1
    else:
        of_parts: Broken = Counter()
        for part in stripped.split("\r"):
            for value in json_records(part, of_parts):
                if isinstance(value, dict):
                    yield value
                else:  # a scrap of the broken record
                    of_parts["bad_json"] += 1
        if of_parts:
            broken["bad_json"] += 1


def _json_text(line: str, text_field: str, broken: Broken) -> Iterator[str]:
    for record in json_records(line, broken):
        if not isinstance(record, dict):
            broken["wrong_type"] += 1
        elif text_field not in record:
            broken["missing_field"] += 1
        else:
            yield from _text(record[text_field], broken)


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def cut(blocks: Iterator[Block], kind: Literal["json", "file", "paragraph", "line"]) -> Iterator[Piece]:
    """Joins blocks into pieces that end where a record ends."""
    separator = b"\n\n" if kind == "paragraph" else b"\n"
    wanted = MAX_RECORD_BYTES if kind == "file" else _PIECE_BYTES
    pending = bytearray()
    consumed = 0
    skipping = False  # inside a record that is too long
    for block, block_consumed, fault in blocks:
        consumed += block_consumed
        pending += block
        if fault is not None:
            # Complete records are kept. The last one is cut short; it is part of this fault and is not counted twice.
            if skipping or separator not in pending:
                pending.clear()
            else:
                del pending[pending.rfind(separator) + len(separator) :]
            yield Piece(kind, bytes(pending), consumed, Counter([fault]))
            return
        if skipping:
            end = pending.find(separator)
            if end < 0:
                del pending[: -len(separator)]
                continue
            del pending[: end + len(separator)]
            skipping = False
        if len(pending) < wanted:
            continue
        end = pending.rfind(separator)
        if end >= 0:
            end += len(separator)
            yield Piece(kind, bytes(pending[:end]), consumed)
            del pending[:end]
            consumed = 0
        elif len(pending) > MAX_RECORD_BYTES:
            yield Piece(kind, b"", consumed, Counter(["too_long"]))
            pending.clear()
            consumed = 0
            skipping = True
    if consumed or pending:
        yield Piece(kind, b"" if skipping else bytes(pending), consumed)
