"""Reads documents from text files, JSON Lines and Parquet, in pieces that bound memory and can be parsed in parallel.

Reading has two stages. `read_pieces` reads a file in order and yields *pieces* of about a megabyte: raw bytes that
end where a record ends, or a few rows of a table. `parse_piece` turns a piece into documents; it is pure, so any
process can run it. Broken records are counted by kind and skipped: one bad record must not cost the others.

Kinds: `bad_json`, `bad_utf8`, `missing_field`, `wrong_type`, `too_long` (a record above 64 MiB), `truncated` (a
compressed file ends early), `corrupt` (a compressed stream or table that cannot be decoded), `empty`.
"""

from __future__ import annotations

import glob
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import user_path

TextMode = Literal["file", "paragraph", "line"]

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
JSON_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
COMPRESSED_SUFFIXES = (".gz", ".zst")

_PIECE_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 26
_READ_BYTES = 1 << 18
_PARQUET_ROWS = 256
_PARAGRAPH_END = re.compile(r"\r?\n[ \t\r]*\n")

Broken = Counter[str]


@dataclass(slots=True)
class Piece:
    """Some consecutive records of one file."""

    kind: Literal["json", "file", "paragraph", "line", "values"]
    records: bytes | list[Any]  # raw text that ends where a record ends; for "values", those of a table's column
    source_bytes: int  # how much of the file this covers, for progress
    broken: Broken = field(default_factory=Counter)  # skipped by the reader itself


class _Decompressor(Protocol):
    """The common interface of zlib's and zstandard's decompression objects."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def find_documents(sources: Sequence[str | Path]) -> list[Path]:
    """Expands files, directories (recursively, known suffixes only) and globs into a sorted list without duplicates.

    Raises:
        DataError: a source matches nothing, or a named file has an unknown suffix.
    """
    found: set[Path] = set()
    for source in sources:
        path = user_path(str(source))
        if path.is_dir():
            matches = [p for p in path.rglob("*") if _format(p) is not None and p.is_file()]
        elif path.is_file():
            matches = [path]
        else:
            names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns
            matches = [p for p in map(Path, names) if p.is_file()]
        if not matches:
            what = "holds no file with a known suffix" if path.is_dir() else "matches no file"
            raise DataError(f"{source} {what}; known suffixes: {_known_suffixes()}")
        for match in matches:
            if _format(match) is None:
                raise DataError(f"{match} has an unknown suffix; known suffixes: {_known_suffixes()}")
        found.update(matches)
    return sorted(found)


def read_pieces(path: Path, *, text_field: str = "text", text_mode: TextMode = "file") -> Iterator[Piece]:
    """Reads one file in order; holds a few pieces in memory, unless single records are larger.

    `text_field` is the column of a Parquet file. A document in a text file is the whole file (above 64 MiB: parts of
    that size, cut at a line end), the text between blank lines, or a line.

    Raises:
        DataError: the file cannot be opened, or its format needs a library that is not installed.
    """
    kind = _format(path)
    if kind == "parquet":
        yield from _parquet_pieces(path, text_field)
        return
    piece_kind: Literal["json", "file", "paragraph", "line"] = "json" if kind == "json" else text_mode
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        yield from _cut(_blocks(file, path), piece_kind)


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
    """Returns True if a file is JSON Lines by its name."""
    return _format(path) == "json"


def read_lines(path: Path, broken: Broken) -> Iterator[Any]:
    """Yields the records of a JSON Lines file, none of a file of another format, and counts broken lines.

    Raises:
        DataError: the file cannot be opened.
    """
    if not is_json_lines(path):
        return
    for piece in read_pieces(path):
        broken.update(piece.broken)
        for line in cast(bytes, piece.records).split(b"\n"):
            if not line.strip():
                continue
            for text in _text(line, broken):
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    broken["bad_json"] += 1
                else:
                    yield record


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
                    yield text.removesuffix("\r")
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


def _json_text(line: str, text_field: str, broken: Broken) -> Iterator[str]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        broken["bad_json"] += 1
        return
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


def _format(path: Path) -> Literal["text", "json", "parquet"] | None:
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in PARQUET_SUFFIXES:
        return "parquet"
    if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in JSON_SUFFIXES:
        return "json"
    return "text" if suffixes and suffixes[-1] in TEXT_SUFFIXES else None


def _known_suffixes() -> str:
    plain = ", ".join(TEXT_SUFFIXES + JSON_SUFFIXES)
    return f"{plain} (each also with {' or '.join(COMPRESSED_SUFFIXES)}) and {', '.join(PARQUET_SUFFIXES)}"


def _blocks(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, int, str | None]]:
    """Yields blocks of (decompressed) content: bytes, file bytes consumed, and the fault that ended it, if any."""
    if path.suffix.lower() not in COMPRESSED_SUFFIXES:
        while block := file.read(_READ_BYTES):
            yield block, len(block), None
        return
    stream: _Decompressor | None = None  # None between members: both formats allow several, one after another
    while raw := file.read(_READ_BYTES >> 2):
        consumed = len(raw)
        while raw:
            if stream is None:
                if path.suffix.lower() == ".gz" and not (raw := raw.lstrip(b"\0")):
                    break  # zero padding after a member, which gzip itself skips too
                stream = _decompressor(path)
            try:
                block = stream.decompress(raw)
            except _decompression_errors(path):
                yield b"", consumed, "corrupt"
                return
            raw = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream = None
            yield block, consumed, None
            consumed = 0
    if stream is not None:
        yield b"", 0, "truncated"


def _decompressor(path: Path) -> _Decompressor:
    if path.suffix.lower() == ".gz":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # 16: expect a gzip header
    largest_window = 1 << 31  # as produced by `zstd --long=31`; the library's default limit is lower
    return cast(_Decompressor, _zstandard(path).ZstdDecompressor(max_window_size=largest_window).decompressobj())


def _decompression_errors(path: Path) -> type[Exception]:
    return zlib.error if path.suffix.lower() == ".gz" else cast("type[Exception]", _zstandard(path).ZstdError)


def _zstandard(path: Path) -> Any:
    try:
        import zstandard
    except ImportError as exc:
        raise DataError(f"{path} needs the package zstandard: pip install 'spes-swarm[corpora]'") from exc
    return zstandard


def _cut(
    blocks: Iterator[tuple[bytes, int, str | None]], kind: Literal["json", "file", "paragraph", "line"]
) -> Iterator[Piece]:
    """Joins blocks into pieces that end where a record ends."""
    separator = b"\n\n" if kind == "paragraph" else b"\n"
    wanted = _MAX_RECORD_BYTES if kind == "file" else _PIECE_BYTES
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
        elif len(pending) > _MAX_RECORD_BYTES:
            yield Piece(kind, b"", consumed, Counter(["too_long"]))
            pending.clear()
            consumed = 0
            skipping = True
    if consumed or pending:
        yield Piece(kind, b"" if skipping else bytes(pending), consumed)


def _parquet_pieces(path: Path, text_field: str) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as exc:
        raise DataError(f"{path} needs the package pyarrow: pip install 'spes-swarm[corpora]'") from exc
    size = path.stat().st_size
    try:
        table = pq.ParquetFile(path, memory_map=True)
    except (OSError, pa.ArrowException):
        yield Piece("values", [], size, Counter(["corrupt"]))
        return
    with table:
        num_rows = max(1, table.metadata.num_rows)
        if text_field not in table.schema_arrow.names:
            yield Piece("values", [], size, Counter({"missing_field": table.metadata.num_rows}))
            return
        for group in range(table.num_row_groups):
            try:
                for batch in table.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=[text_field]):
                    values = _column_values(batch.column(0), pa)
                    yield Piece("values", values, size * len(values) // num_rows)
            except (OSError, pa.ArrowException):
                yield Piece("values", [], 0, Counter(["corrupt"]))


def _column_values(column: Any, pa: Any) -> list[Any]:
    """Returns Python values, text as bytes: pyarrow would fail a whole batch for one string that is not UTF-8."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return cast("list[Any]", column.to_pylist())
