"""Publications in a directory, e.g. on a shared disk or behind a web server.

    DIRECTORY/revisions/round-000120/   one complete publication, never changed
    DIRECTORY/main -> revisions/round-000120
    DIRECTORY/tags/NAME -> ../revisions/round-000120

A publication is written under a temporary name, synced to disk and renamed, and `main` is replaced last. So a crash at
any time leaves the previous publication. `from_pretrained("DIRECTORY/main")` works as it is. Files that the newest
revision already has are hard-linked, not written. A lock that ends with its process admits one publisher at a time.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from spes_swarm.base.errors import HubError, PublicationError, UserError, os_errors_as
from spes_swarm.base.user_paths import sync_to_disk
from spes_swarm.publishing.publication import (
    PUBLICATION_FILE,
    Publication,
    PublishedFile,
    check_files,
    describe_file,
    load_publication,
    read_export,
    read_part,
)
from spes_swarm.publishing.target import MAIN, Published, check_tag, is_there, round_of, round_tag
from spes_swarm.storage.run_directory import lock_file

_UNFINISHED, _DOOMED = ".incoming-", ".outgoing-"
_COPY_BYTES = 1 << 20


class DirectoryTarget:
    """A repository on disk; see `Target`."""

    label = "the directory"

    def __init__(self, path: Path) -> None:
        self._path = path
        self._revisions, self._tags = path / "revisions", path / "tags"

    def check_rights(self) -> None:
        """See `Target`."""
        existing = self._path.absolute()
        while not existing.exists():
            existing = existing.parent
        with os_errors_as(HubError, f"{self.label} to publish to cannot be written", "choose another one"):
            tempfile.TemporaryFile(dir=existing).close()  # os.access reports that root may write anywhere

    def newest(self) -> Publication | None:
        """See `Target`."""
        main = self._path / MAIN
        return load_publication(_revision_at(self._path, main), self.label) if main.exists() else None

    def publish(self, export: Path, publication: Publication, tag: str | None = None) -> Published:
        """See `Target`."""
        check_tag(tag)
        with self._writing():
            current = self.newest()
            there = is_there(current, publication.run_id, publication.round, publication.digest, self.label)
            name = round_tag(publication.round)
            self._check_free(tag, name)
            bytes_sent = 0
            if not there:
                bytes_sent = self._add(export, publication, name, current)
                self._point(self._path / MAIN, Path("revisions", name))
            if tag is not None:
                self._tags.mkdir(exist_ok=True)
                self._point(self._tags / tag, Path("..", "revisions", name))
        return Published.of(publication, name, was_there=there, bytes_sent=bytes_sent)

    def prune(self, keep: int) -> list[int]:
        """See `Target`."""
        with self._writing():
            tags = self._tags.iterdir() if self._tags.is_dir() else ()
            named = {link.resolve() for link in (self._path / MAIN, *tags)}
            paths = [path.parent for path in self._revisions.glob(f"*/{PUBLICATION_FILE}")]
            rounds = [(number, path) for path in paths if (number := round_of(path.name)) is not None]
            old = sorted(rounds, reverse=True)[max(1, keep) :]
            gone = [(number, path) for number, path in old if path.resolve() not in named]
            for number, path in gone:
                path.rename(self._revisions / f"{_DOOMED}{number}")
            self._sweep()
        return sorted(number for number, _ in gone)

    def _check_free(self, tag: str | None, name: str) -> None:
        link = self._tags / tag if tag else None
        if link is not None and link.is_symlink() and link.readlink().name != name:
            raise HubError(f"{self.label} has a tag {tag} already, of {link.readlink().name}; choose another name")

    def _add(self, export: Path, publication: Publication, name: str, current: Publication | None) -> int:
        """Writes a revision, unless a killed publisher has left it complete; returns the number of bytes written."""
        final = self._revisions / name
        with suppress(PublicationError):
            if final.exists() and read_export(final).digest == publication.digest:
                return 0
        incoming = self._revisions / f"{_UNFINISHED}{os.getpid()}"
        incoming.mkdir()
        known = {file.sha256: file for file in current.files} if current else {}
        written = 0
        for file in publication.files:
            earlier = known.get(file.sha256)
            if earlier is None or not self._link(self._path / MAIN / earlier.name, incoming / file.name, file):
                written += _copy(export / file.name, incoming / file.name, file)
        others = {path.name for path in export.iterdir()} - {file.name for file in publication.files}
        for other in sorted(others - {PUBLICATION_FILE}):
            written += _copy(export / other, incoming / other)
        written += _copy(export / PUBLICATION_FILE, incoming / PUBLICATION_FILE)
        sync_to_disk(incoming)
        if final.exists():  # it is damaged
            final.rename(self._revisions / f"{_DOOMED}{name}")
        incoming.rename(final)
        sync_to_disk(self._revisions)
        return written

    @staticmethod
    def _link(source: Path, destination: Path, expected: PublishedFile) -> bool:
        """Hard-links a file of the previous revision; returns False if it has changed or the disk has no links."""
        with suppress(OSError, PublicationError):
            if describe_file(source, expected.size).sha256 == expected.sha256:
                os.link(source.resolve(), destination)
                return True
        return False

    @staticmethod
    def _point(link: Path, target: Path) -> None:
        """Creates or replaces a symbolic link atomically."""
        temporary = link.with_name(f"{_UNFINISHED}{link.name}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)
        sync_to_disk(link.parent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Holds the lock, removes leftovers of killed publishers, and maps failures to HubError.

        Raises:
            HubError: the directory cannot be written, its disk is full, or another process is publishing to it.
        """
        lock: int | None = None
        try:
            self._revisions.mkdir(parents=True, exist_ok=True)
            (self._path / ".lock").touch()
            lock = lock_file(self._path / ".lock", self.label, "wait until the other publication has ended")
            self._sweep()
            try:
                yield
            except BaseException:
                with suppress(OSError):
                    self._sweep()  # frees space on a full disk
                raise
        except OSError as exc:
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise HubError(f"{self.label} to publish to is on a full disk; nothing was changed") from exc
            raise HubError(f"{self.label} to publish to cannot be written: {exc.strerror}") from exc
        except UserError as exc:
            raise exc if isinstance(exc, HubError | PublicationError) else HubError(str(exc)) from exc
        finally:
            if lock is not None:
                os.close(lock)

    def _sweep(self) -> None:
        for directory in (self._path, self._revisions, self._tags):
            for path in directory.glob(".*") if directory.is_dir() else ():
                if not path.name.startswith((_UNFINISHED, _DOOMED)):
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)


class DirectoryFiles:
    """The files of one revision.

    Raises:
        HubError: there is no such revision.
        PublicationError: its name points outside the directory.
    """

    label = "the directory"

    def __init__(self, path: Path, revision: str | None) -> None:
        places = (
            (path / MAIN,)
            if revision in (None, MAIN)
            else (path / "revisions" / str(revision), path / "tags" / str(revision))
        )
        found = [_revision_at(path, place) for place in places if place.is_dir()]
        if not found:
            if not (path / "revisions").is_dir():
                raise HubError(f"nothing was published in {path}; check the path")
            raise HubError(f"{path} has no revision {revision or MAIN}")
        self._path = found[0]  # resolved: `main` may change meanwhile
        self.revision = self._path.name

    def publication(self) -> Publication:
        """The publication manifest, verified."""
        return load_publication(self._path, self.label)

    def fetch(self, file: PublishedFile) -> Path:
        """Returns the path of a file after checking its hash."""
        check_files(self._path, [file], self.label)
        return self._path / file.name

    def read(self, file: PublishedFile, begin: int, end: int) -> bytes:
        """Returns bytes of a file, not verified."""
        with os_errors_as(PublicationError, f"{self.label}: {file.name}"):
            return read_part(self._path / file.name, file, begin, end)


def _revision_at(path: Path, place: Path) -> Path:
    """Returns the revision that a name in the directory `path` currently points to, with all links resolved.

    Raises:
        PublicationError: the name points outside the directory.
    """
    found = place.resolve()
    if not found.is_relative_to((path / "revisions").resolve()):
        raise PublicationError(f"{place.name} points outside the directory")
    return found


def _copy(source: Path, destination: Path, expected: PublishedFile | None = None) -> int:
    """Copies a file and syncs it to disk; returns its size.

    Raises:
        PublicationError: the source does not match `expected`.
        OSError: the source cannot be read, or the destination written.
    """
    sha256, size = hashlib.sha256(), 0
    with source.open("rb") as reading, destination.open("wb") as writing:
        while data := reading.read(_COPY_BYTES):
            sha256.update(data)
            size += len(data)
            writing.write(data)
        writing.flush()
        os.fsync(writing.fileno())
    if expected is not None and (size, sha256.hexdigest()) != (expected.size, expected.sha256):
        raise PublicationError(f"{source.name} has changed since it was exported; export it again")
    return size
