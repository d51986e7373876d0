"""Tokenises documents into shards, in one process or many, with bit-identical results.

The calling process reads pieces in order, workers parse and tokenise them, and the caller writes the results in the
same order. At most two pieces per worker are in flight, which bounds memory. A shard ends with the document that fills
it, so documents are never split between files.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError
from spes_swarm.base.lifetime import die_with_parent
from spes_swarm.base.wording import plural
from spes_swarm.data.chat import is_chat
from spes_swarm.data.corpus_index import INDEX_FILE, write_index
from spes_swarm.data.files.finding import listed
from spes_swarm.data.files.tables import delimiter_hint
from spes_swarm.data.readers import Broken, Piece, TextMode, field_names, parse_piece, read_pieces
from spes_swarm.data.token_file import TokenArray, TokenFile, TokenWriter, sidecar_path, token_dtype
from spes_swarm.data.tokenizer import Tokenizer

DEFAULT_SHARD_TOKENS = 1 << 27

_MAX_ENCODE_CHARS = 1 << 20  # a BPE needs hundreds of bytes of memory per character while encoding
_SHARD_PATTERN = "tokens-*.npy"


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentFormat:
    """How documents are found inside files; see `readers.read_pieces`."""

    text_field: str = "text"
    text_mode: TextMode = "file"


@dataclass(slots=True)
class ShardSummary:
    """What `write_shards` wrote."""

    shards: list[Path] = field(default_factory=list)
    num_tokens: int = 0  # end-of-text tokens included
    num_documents: int = 0
    broken: Broken = field(default_factory=Counter)  # skipped records, by kind
    damaged_files: list[Path] = field(default_factory=list)  # of which more than records was lost
    seconds: float = 0.0

    @property
    def damaged(self) -> str:
        """How many files are damaged, with the first; empty if none is."""
        return f"{len(self.damaged_files):,}, such as {self.damaged_files[0]}" if self.damaged_files else ""


@dataclass(frozen=True, slots=True)
class _Tokenized:
    """A tokenised piece."""

    tokens: TokenArray  # all documents, each with its end-of-text token
    lengths: NDArray[np.int64]  # of the documents
    broken: Broken
    source_bytes: int


def write_shards(
    files: Sequence[Path],
    output: Path,
    tokenizer: Tokenizer,
    *,
    document_format: DocumentFormat | None = None,
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    processes: int = 1,
    overwrite: bool = False,
    on_progress: Callable[[int], object] | None = None,
) -> ShardSummary:
    """Tokenises files, in the given order, into `output`/tokens-00000.npy and so on, and writes their index.

    The shards depend only on the files, the tokenizer (which must be picklable for several processes), the format and
    `shard_tokens`: a shard is closed by the document that makes it at least that long. `on_progress` gets the number of
    input bytes since its last call. After an exception, including Ctrl-C, the completed shards remain and the partial
    one is removed.

    Raises:
        DataError: no usable document; `output` has shards already or cannot be written; a file cannot be opened.
    """
    if processes < 1 or shard_tokens < 1:
        raise DataError(f"processes ({processes}) and shard tokens ({shard_tokens}) must be at least 1")
    prepare_output(output, overwrite)
    chosen = document_format or DocumentFormat()
    began = time.monotonic()
    summary = ShardSummary()
    series = _ShardSeries(output, tokenizer, shard_tokens, summary)
    try:
        with contextlib.closing(_tokenize_in_order(files, tokenizer, chosen, processes, summary)) as results:
            for result in results:
                series.append(result)
                if on_progress is not None:
                    on_progress(result.source_bytes)
        series.commit()
    finally:
        series.abort()
    if not summary.shards:
        raise DataError(
            f"no usable document in {plural(len(files), 'file')}, such as {files[0]} "
            f"({listed(summary.broken) or 'no records'}); {_advice(files, summary.broken, chosen.text_field)}"
        )
    write_index(output, [TokenFile.open(path) for path in summary.shards])
    summary.seconds = time.monotonic() - began
    return summary


def _advice(files: Sequence[Path], broken: Broken, text_field: str) -> str:
    """Returns what to do about files without a usable document."""
    kind = max(broken, key=broken.__getitem__, default="empty")
    if kind != "missing_field":
        return {
            "wrong_type": f"the field {text_field!r} does not hold text",
            "bad_json": "a JSON file holds one object a line, or an array of objects: convert it",
            "bad_utf8": "it is not text in UTF-8: convert it (see iconv)",
            "empty": "there is no text in it: copy the data again",
        }.get(kind, "the data are damaged: copy them again")
    if any(map(is_chat, files)):
        return "it holds conversations: pass it to --data, which renders them with the chat template of the run"
    names = next(filter(None, map(field_names, files)), [])
    hint = f" The fields are {', '.join(map(repr, names))[:200]}{delimiter_hint(names)}" if names else ""
    return f"is the text in the field {text_field!r}?{hint}"


def prepare_output(output: Path, overwrite: bool) -> None:
    """Ensures that a directory holds no shards of an earlier run; idempotent.

    Raises:
        DataError: it holds some and may not be overwritten.
    """
    existing = sorted(output.glob(_SHARD_PATTERN)) if output.is_dir() else []
    if existing and not overwrite:
        raise DataError(
            f"{output} holds {plural(len(existing), 'shard')} already: choose an empty directory, or allow "
            "overwriting (--overwrite)"
        )
    if existing:
        (output / INDEX_FILE).unlink(missing_ok=True)
    for shard in existing:
        shard.unlink()
        sidecar_path(shard).unlink(missing_ok=True)


def sample_documents(files: Sequence[Path], max_chars: int, document_format: DocumentFormat) -> Iterator[str]:
    """Yields documents from the beginning of every file, about `max_chars` characters in total, to train a BPE on.

    Raises:
        DataError: a file cannot be opened.
    """
    share = max(1, max_chars // max(1, len(files)))
    for path in files:
        left = share
        for piece in _pieces([path], document_format, []):
            for text in parse_piece(piece, document_format.text_field)[0]:
                if left > 0:
                    yield text[:left]
                    left -= len(text)
            if left <= 0:
                break


def tokenize_piece(piece: Piece, tokenizer: Tokenizer, text_field: str) -> _Tokenized:
    """Parses and tokenises a piece; a pure function."""
    documents, broken = parse_piece(piece, text_field)
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    arrays: list[TokenArray] = []
    lengths = np.empty(len(documents), dtype=np.int64)
    for number, text in enumerate(documents):
        parts = encoded_parts(text, tokenizer)
        arrays += [*parts, end]
        lengths[number] = sum(map(len, parts)) + 1
    tokens = np.concatenate(arrays, dtype=dtype, casting="unsafe") if arrays else end[:0]
    return _Tokenized(tokens, lengths, broken, piece.source_bytes)


def encoded_parts(text: str, tokenizer: Tokenizer) -> list[TokenArray]:
    """Returns the tokens of a document as one or more arrays, without the end of text."""
    return [tokenizer.encode(part) for part in _bounded(text)]


def _bounded(text: str) -> Iterator[str]:
    """Splits a very long document at line ends, so that encoding it needs bounded memory."""
    start = 0
    while len(text) - start > _MAX_ENCODE_CHARS:
        stop = text.rfind("\n", start, start + _MAX_ENCODE_CHARS) + 1 or start + _MAX_ENCODE_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:] if start else text


@dataclass(eq=False)
class _ShardSeries:
    """Distributes appended documents over shards, without splitting any, and counts them."""

    output: Path
    tokenizer: Tokenizer
    shard_tokens: int
    summary: ShardSummary
    _writer: TokenWriter | None = field(default=None, init=False)

    def append(self, result: _Tokenized) -> None:
        """Appends documents to the current shard until it is full, then starts the next one."""
        self.summary.broken.update(result.broken)
        ends = np.cumsum(result.lengths)
        first, start = 0, 0
        while first < len(ends):
            if self._writer is None:
                path = self.output / f"tokens-{len(self.summary.shards):05d}.npy"
                self._writer = TokenWriter(path, self.tokenizer)
            room = self.shard_tokens - self._writer.num_tokens
            last = min(int(np.searchsorted(ends, start + room)), len(ends) - 1)
            stop = int(ends[last])
            self._writer.append(result.tokens[start:stop], last + 1 - first)
            if self._writer.num_tokens >= self.shard_tokens:
                self.commit()
            first, start = last + 1, stop
        self.summary.num_tokens += len(result.tokens)
        self.summary.num_documents += len(ends)

    def commit(self) -> None:
        """Completes the current shard, if any."""
        if self._writer is not None:
            self.summary.shards.append(self._writer.commit())
            self._writer = None

    def abort(self) -> None:
        """Removes the current shard, if any."""
        if self._writer is not None:
            self._writer.abort()
            self._writer = None


def _pieces(files: Sequence[Path], document_format: DocumentFormat, damaged: list[Path]) -> Iterator[Piece]:
    for path in files:
        for piece in read_pieces(path, text_field=document_format.text_field, text_mode=document_format.text_mode):
            if piece.broken.keys() & {"corrupt", "truncated"} and path not in damaged[-1:]:
                damaged.append(path)
            yield piece


def _tokenize_in_order(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    document_format: DocumentFormat,
    processes: int,
    summary: ShardSummary,
) -> Generator[_Tokenized, None, None]:
    text_field = document_format.text_field
    pieces = _pieces(files, document_format, summary.damaged_files)
    if processes == 1:
        for piece in pieces:
            yield tokenize_piece(piece, tokenizer, text_field)
        return
    # spawn: threads of tokenizers, pyarrow or torch may hold locks that a forked child would wait for forever
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer, text_field, os.getpid()),
    )
    waiting: deque[Future[_Tokenized]] = deque()
    try:
        for piece in pieces:
            with _interrupts_held():
                waiting.append(pool.submit(_work, piece))
            if len(waiting) >= 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as exc:
        raise DataError("a tokenising process died, possibly out of memory: try fewer processes") from exc
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Blocks a terminal's signals, permanently in workers started here: all get them, and the parent handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Tokenizer, str] | None = None  # set once per worker process, so that each task carries only a piece


def _start_worker(tokenizer: Tokenizer, text_field: str, parent_pid: int) -> None:
    global _worker
    die_with_parent(parent_pid)
    _worker = tokenizer, text_field


def _work(piece: Piece) -> _Tokenized:
    assert _worker is not None
    return tokenize_piece(piece, *_worker)
