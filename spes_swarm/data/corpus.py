"""Data sources by name: the Python standard library, which every peer has, token files, or the user's own text.

Text is tokenised on first use into a cache directory whose name contains a digest of everything that matters: the
files, their sizes and modification times, the tokenizer and the document format. A cache entry appears in one rename,
so it is always complete. If several peers start at the same time on one machine, one tokenises and the others wait.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blake3 import blake3

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import user_path
from spes_swarm.base.wording import plural
from spes_swarm.config.data_source import STDLIB, parse_hf, parse_mixture
from spes_swarm.data.chat import ChatTemplate, check_same_kind, is_chat, write_chat_shard
from spes_swarm.data.corpus_index import membership
from spes_swarm.data.file_list import FILE_LIST, listed_token_files
from spes_swarm.data.files.contents import refuse_stand_in
from spes_swarm.data.files.finding import Found, find_files, listed, others_in
from spes_swarm.data.headerless import check_size, is_headerless, open_headerless
from spes_swarm.data.sharding import DocumentFormat, write_shards
from spes_swarm.data.streaming.dataset import check_installed
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import Tokenizer

_CACHE_VERSION = 4  # increment it when the same files would give different tokens
_LOCK_TIMEOUT_S = 600.0
_EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
_MAX_OPENED = 100  # files of text at the start; all are checked when they are read


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/spes_swarm, by default ~/.cache/spes_swarm (XDG Base Directory Specification)."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The specification requires relative paths to be ignored.
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".cache"
    return base / "spes_swarm"


def open_corpus(
    source: str,
    tokenizer: Tokenizer,
    cache_dir: Path | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    say_found: Callable[[str], None] = lambda text: None,
    pause: Callable[[], None] = lambda: None,
) -> list[TokenFile]:
    """Opens the token files of a data source, checked against the tokenizer; tokenises text that is not cached yet.

    A source is "stdlib"; a `.npy` token file; a `file_list.txt` that names some; a directory that holds either; or
    text: a file, directory or glob that `find_files` accepts. Conversations are recognised by the records
    of the files (chat.py); files of both kinds are refused. Tokenised text is kept in `cache_dir`, by default
    `default_cache_dir()`, and so are descriptions of token files without a header. `say` gets messages: before
    a long file without a header is read, if such a file never ends a document, and about conversations and records that
    are skipped. `say_found` gets one line: how many documents, tokens and files there are, and which files are left
    out. `pause` is called before each file without a header, and may raise to abort.

    Raises:
        DataError: the source does not exist, holds no text, or was tokenised with another tokenizer.
    """
    cache = cache_dir or default_cache_dir()
    found = Found(tuple(stdlib_files())) if source == STDLIB else _found(source, cache)
    if found.are_tokens:
        opened = _opened(found.files, tokenizer, cache, say, pause)
        say_found(_summary(found, opened))
        return opened
    files = found.files
    path = user_path(source)
    name = path.name if path.exists() else STDLIB if source == STDLIB else "glob"
    chats = source != STDLIB and next((kind for kind in map(is_chat, files) if kind is not None), False)
    template = ChatTemplate(tokenizer) if chats else None
    how = str(DocumentFormat()) if template is None else f"chat {template.digest}"

    def write(output: Path) -> None:
        if source != STDLIB:
            check_same_kind(files, chats=chats)
        if template is not None:
            write_chat_shard(files, output, tokenizer, template, say)
        else:
            summary = write_shards(files, output, tokenizer)
            if summary.broken:
                damaged = f"; damaged files: {summary.damaged}" if summary.damaged else ""
                say(f"skipped records: {listed(summary.broken)}{damaged}")

    tokenised = _tokenised(cache / f"{name}-{_fingerprint(files, tokenizer, how)[:24]}", tokenizer, write)
    say_found(_summary(found, tokenised))
    return tokenised


def check_source(source: str) -> None:
    """Checks --data (see config/data_source.py) as far as possible without the run's tokenizer and the network.

    Raises:
        DataError: it is malformed, a source does not exist, holds neither text nor token files, or needs a package that
            is not installed; or a token file is damaged.
    """
    terms = parse_mixture(source)
    if len(terms) > 1:
        for term in terms:
            check_source(term.source)
        return
    if (hf := parse_hf(source)) is not None:
        check_installed(hf)
        return
    if source == STDLIB:
        return
    found = _found(source, default_cache_dir())
    if not found.are_tokens:
        for file in found.files[:_MAX_OPENED]:
            refuse_stand_in(file)
        return
    described: list[TokenFile] = []
    for file in found.files:
        if is_headerless(file):
            check_size(file)
        else:
            described.append(TokenFile.open(file))
    if len(described) == len(found.files):
        membership(described)


def stdlib_files() -> list[Path]:
    """Returns the standard library's source files on this machine, in the order of their relative paths.

    Excludes installed packages, tests, and the files that describe the machine on which Python was built, so two
    machines with the same Python have the same text.

    Raises:
        DataError: this Python comes without its source.
    """
    root = sysconfig.get_path("stdlib")
    names: list[str] = []
    for folder, subfolders, files in os.walk(root):
        # Pruned before they are listed: installed packages may have twenty times as many files.
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        below_root = folder.removeprefix(root).lstrip("/")
        names += [f"{below_root}/{name}".lstrip("/") for name in files if name.endswith(".py")]
    paths = (Path(root, name) for name in sorted(names) if not name.startswith("config-"))
    chosen = [path for path in paths if not path.name.startswith("_sysconfigdata") and path.is_file()]
    if not chosen:
        raise DataError(f"this Python has no source files under {root}: name a data source instead of 'stdlib'")
    return chosen


def _found(source: str, cache: Path) -> Found:
    """Finds the files of a path or glob, outside the cache.

    Raises:
        DataError: there is no such file or directory, or see `find_files` and `listed_token_files`.
    """
    path = user_path(source)
    if named := listed_token_files(path / FILE_LIST if path.is_dir() else path):
        return Found(tuple(named), others_in(path, named) if path.is_dir() else Counter())
    if path.suffix == ".npy" and not path.is_file():
        raise DataError(f"token file {path} does not exist")
    if not path.exists() and not glob.has_magic(source):
        raise DataError(
            f"data source {source!r} does not exist: give 'stdlib', a .npy token file, a directory, a text "
            "file or a glob"
        )
    return find_files([path], without=cache)


def _summary(found: Found, files: Sequence[TokenFile]) -> str:
    documents = plural(sum(file.sidecar.num_documents for file in files), "document")
    tokens = plural(sum(file.sidecar.num_tokens for file in files), "token")
    return f"found {documents} and {tokens} in {found}"


def _opened(
    paths: Sequence[Path],
    tokenizer: Tokenizer,
    cache_dir: Path,
    say: Callable[[str], None],
    pause: Callable[[], None],
) -> list[TokenFile]:
    files: list[TokenFile] = []
    for path in paths:
        if is_headerless(path):
            pause()
            files.append(open_headerless(path, tokenizer, cache_dir, say))
        else:
            files.append(TokenFile.open(path, tokenizer))
    # The only sign of another tokenizer, if its ids are small enough.
    endless = [file.path for file in files if not file.has_header and file.sidecar.num_documents == 0]
    if endless:
        say(
            f"no document ends (id {tokenizer.end_of_text} of {tokenizer.name!r}) in "
            f"{plural(len(endless), 'token file')} without a header, such as {endless[0]}: check that this tokenizer "
            "made the ids"
        )
    return files


def _tokenised(entry: Path, tokenizer: Tokenizer, write: Callable[[Path], object]) -> list[TokenFile]:
    """Opens a cache entry; if it does not exist, `write` fills a directory that becomes it."""
    cache = entry.parent
    if cached := _cached(entry, tokenizer):
        return cached
    with os_errors_as(DataError, f"cache directory {cache} cannot be used", "set XDG_CACHE_HOME"):
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{entry.name}.lock", _LOCK_TIMEOUT_S) as is_locked:
            if cached := _cached(entry, tokenizer):  # another process was faster
                return cached
            # Without the lock, another process is slow or stopped: then both do the work, side by side.
            partial = cache / (f"{entry.name}.partial" if is_locked else f"{entry.name}.{os.getpid()}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
            try:
                write(partial)
                shutil.rmtree(entry, ignore_errors=True)  # a damaged entry
                with contextlib.suppress(FileExistsError):
                    partial.rename(entry)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return [TokenFile.open(path, tokenizer) for path in sorted(entry.glob("*.npy"))]


def _cached(entry: Path, tokenizer: Tokenizer) -> list[TokenFile]:
    """Returns the files of a usable entry, or nothing; a damaged entry is rebuilt."""
    try:
        return [TokenFile.open(path, tokenizer) for path in sorted(entry.glob("*.npy"))]
    except DataError:
        return []


def _fingerprint(files: Sequence[Path], tokenizer: Tokenizer, how: str) -> str:
    hasher = blake3(f"{_CACHE_VERSION} {tokenizer.digest} {how}\n".encode())
    for path in files:
        with os_errors_as(DataError, f"{path} cannot be read"):
            status = path.stat()
        hasher.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return hasher.hexdigest()


@contextlib.contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[bool]:
    """Holds an advisory lock, which the kernel releases when this process ends; yields False after a timeout."""
    deadline = time.monotonic() + timeout_s
    with path.open("wb") as file:
        is_locked = False
        while not is_locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_locked = True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
        yield is_locked
