"""Finds data files: a directory is read completely or refused, and what is left out is counted.

Documentation (`README.md`, `LICENSE`, a tokenizer's files, the sidecars of token files, ...) and hidden files are not
data. Beside records or tokens, nor are prose and programs (`.md`, `.rst`, `.py`) and notes (`notes.txt`, `urls.txt`,
`md5sum.txt`, ...). Files with other endings are left out, unless the ending is one of data that this package cannot
read: then the directory is refused. Links to folders are followed; a file that is reached twice counts once.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NoReturn

from spes_swarm.base.errors import DataError, os_errors_as
from spes_swarm.base.user_paths import user_path
from spes_swarm.base.wording import plural

Format = Literal["text", "json", "csv", "parquet", "tokens"]

_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".py"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    **dict.fromkeys((".csv", ".tsv"), "csv"),
}
_PROSE = (".md", ".rst", ".py")
_NOTES = re.compile(  # what a `.txt` next to records is called if it is about them
    r"(.*[ ._-])?(notes?|about|info|description|terms|disclaimer|sources?|urls?|links?|index|file_?list|stat(istic)?s"
    r"|(md5|sha1|sha256|sha512|check)_?sums?)([ ._-].*)?\.te?xt(\.\w+)?",
    re.IGNORECASE,
)
_MAX_LISTED = 12
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
KNOWN_SUFFIXES = f"{', '.join(_FORMATS)} (each also with {', '.join(COMPRESSED_SUFFIXES)}), .parquet and .npy"

# Data in formats that are not read, and downloads that are not complete.
_UNREAD_SUFFIXES = frozenset(
    (
        *(".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar", ".lz4", ".lzma", ".br", ".z", ".zstd", ".sz"),
        *(".arrow", ".feather", ".ipc", ".avro", ".orc", ".pq", ".h5", ".hdf5", ".lance", ".xlsx", ".xls", ".xml"),
        *(".npz", ".bin", ".idx", ".mds", ".tfrecord", ".msgpack", ".pkl", ".pickle", ".warc", ".wet", ".jsonlines"),
        *(".sqlite", ".db", ".part", ".partial", ".incomplete", ".crdownload", ".tmp", ".aria2"),
    )
)
_DOCUMENTATION = re.compile(
    r"(readme|licen[cs]e)([ ._-].*)?"
    r"|(copying|copyright|notice|changelog|contributing|contributors|authors|citation|code_of_conduct|todo|requirements"
    r"|data_?card|dataset_?card|datasheet)(\.\w+)?"
    r"|(dataset_infos?|dataset_dict|state|config|generation_config|metadata|package)\.json",
    re.IGNORECASE,
)
_OF_TOKENIZER = re.compile(
    r"(vocab|added_tokens|special_tokens_map|tokenizer|tokenizer_config)\.json|(merges|vocab)\.txt|chat_template\.jinja",
    re.IGNORECASE,
)
_OUTPUT = re.compile(
    r"(manifest|data|peers|invitations|track_records)\.json|metrics\.jsonl|(log(\.\d)?|acts)\.txt|trace\.json\.gz|identity\.key"
    r"|port|initial_weights|invitation|tokenizer\.msgpack|reference\.partial|checkpoints|publication|proofs|tensorboard"
)
_OF_TOKEN_FILES = re.compile(r".*\.npy\.json|corpus\.json|file_list\.txt")  # read with them, not counted


@dataclass(frozen=True)
class Found:
    """The data files of some sources, sorted, and how many other files there are, by ending and reason."""

    files: tuple[Path, ...]
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def are_tokens(self) -> bool:
        """True if the files are token files, which are not mixed with text."""
        return any(format_of(file) == "tokens" for file in self.files)

    def __str__(self) -> str:
        left_out = f"; left out: {listed(self.left_out)}" if self.left_out else ""
        return f"{plural(len(self.files), 'file')} ({listed(Counter(map(ending, self.files)))}){left_out}"


def format_of(path: Path) -> Format | None:
    """Returns the format that a file's name promises."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]] or [""]
    if suffixes[-1] in (".parquet", ".npy"):
        return "parquet" if suffixes[-1] == ".parquet" else "tokens"
    if suffixes[-1] in COMPRESSED_SUFFIXES:
        suffixes.pop()
    return _FORMATS.get(suffixes[-1]) if suffixes else None


def ending(path: Path) -> str:
    """Returns a file's suffix in lower case, or the last two if it is compressed, as messages show it."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if not suffixes:
        return "without suffix"
    return "".join(suffixes) if suffixes[-1] in COMPRESSED_SUFFIXES else suffixes[-1]


def listed(counts: Counter[str]) -> str:
    """Formats the largest counts: "2 .jsonl, 1 .txt"."""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item))
    rest = [f"{sum(count for _, count in ranked[_MAX_LISTED:]):,} others"] if len(ranked) > _MAX_LISTED else []
    return ", ".join([*(f"{count:,} {what}" for what, count in ranked[:_MAX_LISTED]), *rest])


def find_files(sources: Sequence[str | Path], *, without: Path | None = None) -> Found:
    """Finds the data files of files, directories (recursively) and globs; `without` is a directory to pass over.

    A file that is named is data, whatever it is called, unless it is documentation among data, as `texts/*` in a shell
    may name it.

    Raises:
        DataError: a source does not exist, holds no data, or holds data that cannot be read; or text and token files
            are mixed.
    """
    search = _Search(without)
    for source in sources:
        path = user_path(str(source))
        if path.is_dir():
            search.add_directory(path)
        elif path.is_file():
            search.add_file(path, named=True)
        else:
            matches = sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - Path.glob refuses /
            if not matches:
                raise DataError(f"{source} matches no file; known suffixes: {KNOWN_SUFFIXES}")
            for match in matches:
                if match.is_dir() and _is_hidden(match.name):
                    search.left_out["hidden"] += 1
                elif match.is_dir():
                    search.add_directory(match)
                else:
                    search.add_file(match, named=False)
    return search.result(", ".join(map(str, sources)))


class _Search:
    """Collects files and sorts them into data and others."""

    def __init__(self, without: Path | None) -> None:
        self._seen: set[str | tuple[int, int]] = set()  # real paths of folders; device and inode of files
        self.data: list[Path] = []  # without documentation
        self._documentation: list[tuple[Path, bool]] = []  # with whether the user named it
        self.unread: list[Path] = []  # data in unknown formats
        self._unknown: list[Path] = []
        self.left_out: Counter[str] = Counter()  # of no such class
        self._without = None if without is None else os.path.realpath(without)

    def add_directory(self, root: Path) -> None:
        """Adds the files below a folder, in the order of their names."""
        real_root = Path(os.path.realpath(root))
        for folder, subfolders, names in os.walk(root, onerror=_refuse_folder, followlinks=True):
            real = os.path.realpath(folder)
            is_root = real == str(real_root)
            is_above = not is_root and real_root.is_relative_to(real)  # a link that leads back here
            if real in self._seen or is_above or (real == self._without and not is_root):
                subfolders.clear()
                continue
            self._seen.add(real)
            if "identity.key" in names and not is_root:
                self.left_out["output directory"] += 1
                subfolders.clear()
                continue
            if "identity.key" in names:  # data and output of a peer in one directory
                names = [name for name in names if not _OUTPUT.fullmatch(name)]
                subfolders[:] = [name for name in subfolders if not _OUTPUT.fullmatch(name)]
            hidden = list(filter(_is_hidden, subfolders))
            self.left_out["hidden"] += len(hidden)
            subfolders[:] = sorted(set(subfolders).difference(hidden))
            for name in sorted(names):
                if name.startswith(".") or name == "Thumbs.db":
                    self.left_out["hidden"] += 1
                else:
                    self.add_file(Path(folder, name), named=False)

    def add_file(self, path: Path, *, named: bool) -> None:
        """Adds one file.

        Raises:
            DataError: the user named it, and its format is unknown; or it is a link that leads nowhere.
        """
        known = format_of(path)
        if not named and (_OF_TOKEN_FILES.fullmatch(path.name) or _describes_tokens(path)):
            return
        if not path.is_file():
            if path.is_symlink() and not path.exists():
                raise DataError(f"{path} is a link to {path.readlink()}, which does not exist: copy that, too")
            self.left_out["not a file"] += 1
            return
        status = path.stat()
        file = status.st_dev, status.st_ino  # the same for all links
        if file in self._seen:
            self.left_out[f"{ending(path)} (a file found before)"] += not named
            return
        if known is not None:  # a data file may be a link to a file whose name has no suffix, as in the Hub's cache
            self._seen.add(file)
        if known in (None, "text", "json") and _kind_of_documentation(path):
            self._documentation.append((path, named))
        elif known is not None:
            self.data.append(path)
        elif named:
            raise DataError(f"{path} has an unknown suffix{_named_otherwise(path)}; known suffixes: {KNOWN_SUFFIXES}")
        elif {path.suffix.lower()} & (_UNREAD_SUFFIXES | set(COMPRESSED_SUFFIXES)):
            self.unread.append(path)
        else:
            self._unknown.append(path)

    def classify(self) -> None:
        """Decides what is documentation: prose, programs and notes are, next to records or tokens."""
        if any(format_of(path) != "text" for path in self.data):
            prose = [path for path in self.data if ending(path).startswith(_PROSE) or _NOTES.fullmatch(path.name)]
            self._documentation += [(path, False) for path in prose]
            self.data = sorted(set(self.data).difference(prose))
        elif not self.data:  # then a README that the user named is what they want
            self.data = [path for path, named in self._documentation if named and format_of(path) is not None]
            self._documentation = [(path, named) for path, named in self._documentation if path not in self.data]

    def counts(self) -> Counter[str]:
        """Returns how many files are not data, by ending and reason."""
        kinds = ((path, _kind_of_documentation(path) or "documentation") for path, _ in self._documentation)
        documentation = Counter(f"{ending(path)} ({kind})" for path, kind in kinds)
        return +(self.left_out + documentation + Counter(map(ending, self._unknown)))

    def result(self, what: str) -> Found:
        """Returns what was found; `what` names the sources.

        Raises:
            DataError: see `find_files`.
        """
        self.classify()
        left_out = self.counts()
        if self.unread:
            raise DataError(
                f"{what} holds data that cannot be read ({listed(Counter(map(ending, self.unread)))}, such as "
                f"{self.unread[0]}){_named_otherwise(self.unread[0])}: unpack or convert them, move them away, or name "
                f"the others, as in 'DIR/*.jsonl'; known suffixes: {KNOWN_SUFFIXES}"
            )
        if not self.data:
            others = f" (it has {listed(left_out)})" if left_out else ""
            raise DataError(f"{what} holds no file with a known suffix{others}; known suffixes: {KNOWN_SUFFIXES}")
        if len(tokens := [path for path in self.data if format_of(path) == "tokens"]) not in (0, len(self.data)):
            text = next(path for path in self.data if format_of(path) != "tokens")
            raise DataError(
                f"{what} holds token files, such as {tokens[0]}, and text, such as {text}: keep the two in different "
                "directories, and train on both as a mixture (--data '0.5*TOKENS + 0.5*TEXTS')"
            )
        return Found(tuple(sorted(self.data)), left_out)


def others_in(directory: Path, files: Iterable[Path]) -> Counter[str]:
    """Counts the data files in a directory that are not among `files`, by ending.

    Raises:
        DataError: a folder or link cannot be read.
    """
    search = _Search(None)
    search.add_directory(directory)
    search.classify()
    known = set(map(os.path.realpath, files))
    return Counter(ending(path) for path in search.data + search.unread if os.path.realpath(path) not in known)


def link_data(directory: Path, view: Path) -> tuple[dict[str, Path], Counter[str]]:
    """Links the data files of a directory into `view`, for a library that follows no links to folders.

    Returns the files by the paths of their links, and how many others there are; neither if README.md says which files
    are data.

    Raises:
        DataError: there is no data, or a folder or link cannot be read.
    """
    readme = directory / "README.md"
    if readme.is_file() and re.search(r"\bdata_(files|dir):", readme.read_text(encoding="utf-8", errors="replace")):
        return {}, Counter()
    search = _Search(None)
    search.add_directory(directory)
    search.classify()
    linked = {str(view / path.relative_to(directory)): path for path in search.data + search.unread}
    if not linked:
        search.result(f"hf:{directory}")  # raises
    options = {str(view / readme.name): readme} if readme.is_file() else {}
    for link, path in (linked | options).items():
        Path(link).parent.mkdir(parents=True, exist_ok=True)
        Path(link).symlink_to(os.path.realpath(path))
    return linked, search.counts()


def _kind_of_documentation(path: Path) -> str | None:
    """Returns what a file that is never data by its name is."""
    if _OF_TOKENIZER.fullmatch(path.name):
        return "of a tokenizer"
    return "documentation" if _DOCUMENTATION.fullmatch(path.name) else None


def _named_otherwise(path: Path) -> str:
    """Returns what to say of token ids under a name that usually holds something else."""
    if path.suffix.lower() != ".bin":
        return ""
    with os_errors_as(DataError, f"{path} cannot be read"), path.open("rb") as file:
        is_array = file.read(6) == b"\x93NUMPY"
    return f" (it is {'a NumPy array' if is_array else 'binary'}: if it holds token ids, name it .npy)"


def _is_hidden(folder: str) -> bool:
    return folder.startswith((".", "__")) or folder == "lost+found"  # such as __MACOSX and __pycache__


def _describes_tokens(path: Path) -> bool:
    """Returns True for OLMo's `X.csv.gz` next to `X.npy`, which lists the documents in it."""
    return path.name.endswith(".csv.gz") and path.with_name(path.name.removesuffix(".csv.gz") + ".npy").is_file()


def _refuse_folder(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}; allow it, or move the folder away")
