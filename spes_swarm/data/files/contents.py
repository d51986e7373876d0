"""The content of a data file, whatever its name says: decompressed, in UTF-8, and with a JSON record in each line.

A block is bytes of content, the bytes of the file that it took, and the fault that ended the content, if any.
"""

from __future__ import annotations

import bz2
import codecs
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import refuse_lfs_pointer
from spes_swarm.data.files.finding import COMPRESSED_SUFFIXES, format_of

Block = tuple[bytes, int, str | None]

PARQUET_MAGIC = b"PAR1"

_READ_BYTES = 1 << 18
_HEAD_BYTES = 1 << 16  # decide about encoding and layout
MAX_RECORD_BYTES = 1 << 26
# The first bytes of compressed files; skippable frames may precede those of Zstandard.
_COMPRESSED = re.compile(
    rb"(?P<gz>\x1f\x8b)|(?P<bz2>BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90))|(?P<xz>\xfd7zXZ\0)"
    rb"|(?P<zst>\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18)"
)
_STRANGE = {
    b"PK\x03\x04": "a zip archive or office document: unpack or convert it",
    b"%PDF-": "a PDF document: extract its text",
    b"\x93NUMPY": "a NumPy array: name it .npy if it holds token ids",
    b"ARROW1": "an Arrow file: convert it to Parquet",
    b"\x89HDF": "an HDF5 file: convert it to Parquet",
    b"SQLite format 3": "a database: export it as JSON Lines",
}
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html|\?xml)", re.IGNORECASE)
_JSON_TOKEN = re.compile(rb'\\.|["{}\[\]]|\n[ \t]*', re.DOTALL)


class _Decompressor(Protocol):
    """The common interface of the decompression objects of zlib, bz2, lzma and zstandard."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def refuse_stand_in(path: Path) -> bytes:
    """Returns a file's first bytes.

    Raises:
        DataError: the file cannot be read, or is of a kind that no reader of this package reads; the message says what
            it is.
    """
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        head = file.read(512)
    refuse_lfs_pointer(path, head, DataError)
    _refuse_strange(path, head)
    if format_of(path) == "parquet" and (compression_of(head) or head.lstrip()[:1] in (b"{", b"[")):
        raise DataError(f"{path} is {'compressed: unpack it' if compression_of(head) else 'JSON: name it .jsonl'}")
    if compression_of(head) == ".zst":
        _decompression(".zst", path)
    if format_of(path) in ("json", "csv", "parquet") and _PAGE.match(head):
        raise DataError(f"{path} is a web page or XML, not data: download it again, or convert it")
    return head


def _refuse_strange(path: Path, head: bytes) -> None:
    if head[257:262] == b"ustar":
        raise DataError(f"{path} is a tar archive: unpack it")
    for magic, what in _STRANGE.items():
        if head.startswith(magic):
            raise DataError(f"{path} is {what}")


def marked_encoding(content: bytes) -> str:
    """Returns the encoding that a byte order mark names, by default UTF-8 with or without a mark."""
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    return "utf-16" if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"


def text_blocks(file: BinaryIO, path: Path) -> Iterator[Block]:
    """Yields the content of a file: decompressed, in UTF-8, without a byte order mark.

    Raises:
        DataError: the content is zeros, an archive, compressed again, or UTF-16 or UTF-32 without a mark, or needs a
            package that is not installed.
    """
    blocks = _with_head(_decompressed(file, path), min(_READ_BYTES, _HEAD_BYTES))
    head, consumed, fault = next(blocks, (b"", 0, None))
    _refuse_strange(path, head)
    if compression_of(head) or head.startswith(PARQUET_MAGIC):
        raise DataError(f"{path} is {'compressed twice' if compression_of(head) else 'Parquet inside'}: unpack it once")
    if (encoding := marked_encoding(head)) != "utf-8-sig":
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        yield decoder.decode(head).encode("utf-8", "replace"), consumed, fault
        for block, consumed, fault in blocks:
            yield decoder.decode(block).encode("utf-8", "replace"), consumed, fault
        return
    if head and not head.strip(b"\0"):
        raise DataError(f"{path} holds only zeros: copy it again")
    for half in (head[::2], head[1::2]):
        if half.count(0) > max(1, 0.7 * len(half)):
            raise DataError(
                f"{path} is UTF-16 or UTF-32 text without a byte order mark: convert it to UTF-8 (see iconv)"
            )
    while head.startswith(codecs.BOM_UTF8):
        head = head.removeprefix(codecs.BOM_UTF8)
    yield head, consumed, fault
    yield from blocks


def json_lines(blocks: Iterator[Block]) -> Iterator[Block]:
    r"""Puts each record of a JSON file on a line of its own; its own line ends become "\r", which JSON ignores.

    Records are lines, the elements of an array, or objects that span lines.
    """
    head, consumed, fault = next(blocks, (b"", 0, None))
    base = _depth_of_records(head)
    if base is None:
        yield head, consumed, fault
        yield from blocks
        return
    splitter = _RecordSplitter(base)
    yield splitter.split(head), consumed, None
    while fault is None and (following := next(blocks, None)) is not None:
        block, consumed, fault = following
        yield splitter.split(block), consumed, None
    yield splitter.rest(), 0, fault


class _RecordSplitter:
    """Finds the ends of records by counting brackets outside strings.

    In an indented file, a line that begins as the first record did begins another record, even if a bracket is missing.
    """

    def __init__(self, base: int) -> None:
        self._base = base  # depth at which records lie: 1 in an array
        self._depth = 0
        self._in_string = False
        self._line = b"\n"  # start of the current line, with its indentation
        self._first: bytes | None = None  # start of the line with the first record, if what follows is indented more
        self._held = b""  # backslashes and space at the end of a block, which what is still to come decides about
        self._record = bytearray()  # as far as it is known

    def split(self, block: bytes) -> bytes:
        """Returns the records that end in a block, each followed by a line end, and parts of one that is too long."""
        block = self._held + block
        self._held = block[len(block.rstrip(b"\\ \t\n")) :]
        block = block[: len(block) - len(self._held)]
        records = bytearray()
        start = 0  # of the part of the current record in this block
        for match in _JSON_TOKEN.finditer(block):
            token = match[0]
            if token.startswith(b"\n"):
                self._in_string = False  # a string that is never closed ends with its line
                if self._first is None and self._depth == self._base + 1:
                    self._first = self._line if len(token) > len(self._line) else b""
                self._line = token if self._depth <= self._base else self._line
                is_first = token == self._first and block.startswith(b"{", match.end())
                if is_first and self._depth > self._base:
                    self._record += block[start : match.start()]
                    records += self.rest() + b"\n"
                if is_first:
                    self._depth = self._base
            elif token == b'"':
                self._in_string = not self._in_string
            elif self._in_string or len(token) > 1:
                continue
            elif token in b"{[":
                if self._depth == self._base:
                    start = match.start()
                self._depth += 1
            elif self._depth > 0:
                self._depth -= 1
                if self._depth == self._base:
                    self._record += block[start : match.end()]
                    records += self.rest() + b"\n"
        if self._depth > self._base:
            self._record += block[start:]
        if len(self._record) > MAX_RECORD_BYTES:
            records += self.rest()
        return bytes(records)

    def rest(self) -> bytes:
        """Returns the current record, which may lack its end."""
        record = bytes(self._record).replace(b"\n", b"\r")
        self._record.clear()
        return record


def _depth_of_records(head: bytes) -> int | None:
    """Returns the depth of records that are not lines: 1 in an array, 0 for objects that span lines; otherwise None."""
    text = head.decode("utf-8", "replace").strip()
    first, newline, _ = text.partition("\n")
    is_array = re.match(r'\[\s*(\]|\{\s*(["}]|$))', text) is not None
    if not is_array and not first.startswith("{"):
        return None
    try:
        _, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):  # damaged, or longer than the head
        return 1 if is_array else 0 if re.match(r'\{\s*\n\s*(["}]|$)', text) else None
    if end <= len(first) and (newline or not (is_array or text[end:].lstrip().startswith("{"))):
        return None  # the first line is a record, even if it is a list
    return 1 if is_array else 0


def _with_head(blocks: Iterator[Block], num_bytes: int) -> Iterator[Block]:
    """Joins the first blocks until they have `num_bytes`."""
    head, consumed = bytearray(), 0
    for block, block_consumed, fault in blocks:
        head += block
        consumed += block_consumed
        if len(head) >= num_bytes or fault is not None:
            yield bytes(head), consumed, fault
            yield from blocks
            return
    yield bytes(head), consumed, None


def _decompressed(file: BinaryIO, path: Path) -> Iterator[Block]:
    compression = _compression(file.read(_HEAD_BYTES), path)
    file.seek(0)
    if compression is None:
        while block := file.read(_READ_BYTES):
            yield block, len(block), None
        return
    create, error = _decompression(compression, path)
    stream: _Decompressor | None = None  # None between members: all formats allow several, one after another
    while raw := file.read(_READ_BYTES >> 2):
        consumed = len(raw)
        while raw:
            if stream is None:
                if compression in (".gz", ".xz") and not (raw := raw.lstrip(b"\0")):
                    break  # zero padding after a member, which the programs skip, too
                stream = create()
            try:
                block = stream.decompress(raw)
            except error:
                yield b"", consumed, "corrupt"
                return
            raw = stream.unused_data if stream.eof else b""
            if stream.eof:
                stream = None
            yield block, consumed, None
            consumed = 0
    if stream is not None:
        yield b"", 0, "truncated"


def compression_of(start: bytes) -> str | None:
    """Returns the usual suffix of files that begin like this, if they are compressed; a file's own suffix may lie."""
    return f".{match.lastgroup}" if (match := _COMPRESSED.match(start)) else None


def _compression(head: bytes, path: Path) -> str | None:
    if named := compression_of(head):
        return named
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED_SUFFIXES:
        return None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return suffix  # damaged at its start
    return suffix if b"\0" in head else None


def _decompression(compression: str, path: Path) -> tuple[Callable[[], _Decompressor], type[Exception]]:
    if compression == ".gz":
        return lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS | 16), zlib.error  # 16: expect a gzip header
    if compression == ".bz2":
        return bz2.BZ2Decompressor, OSError
    if compression == ".xz":
        return lzma.LZMADecompressor, lzma.LZMAError
    try:
        import zstandard
    except ImportError as exc:
        raise DataError(f"{path} needs the package zstandard: pip install 'spes-swarm[corpora]'") from exc
    largest_window = 1 << 31  # as produced by `zstd --long=31`; the library's default limit is lower

    def create() -> _Decompressor:
        return cast(_Decompressor, zstandard.ZstdDecompressor(max_window_size=largest_window).decompressobj())

    return create, cast("type[Exception]", zstandard.ZstdError)
