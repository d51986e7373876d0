"""The names of publications, and the rules that all places of publications follow.

Users name a place `USER/REPO` or `file:DIRECTORY`, optionally with `@REVISION`. It has one revision per published
round, named `round-000120`, and `main`, which is the newest. Readers find a complete publication or none; an
interrupted publisher leaves the previous one.

Rounds only increase. If several peers publish the same round, the first one succeeds and the others find it published,
since they would write the same weights. A place belongs to one run.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

from spes_swarm.base.errors import CheckpointError, ConfigError, PublicationError, SupersededError
from spes_swarm.base.user_paths import user_path
from spes_swarm.publishing.publication import Publication

_FILE_SCHEME = "file:"
MAIN = "main"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ROUND_TAG = re.compile(r"round-(\d{6,18})")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True)
class Location:
    """A repository on a Hub or on disk, optionally with a revision."""

    repo_id: str | None  # USER/REPO; None: on disk
    path: Path | None
    revision: str | None


def parse_location(text: str, *, with_revision: bool = False) -> Location:
    """Parses `USER/REPO` or `file:DIRECTORY`; with `with_revision` an optional `@REVISION` may follow.

    Raises:
        ConfigError: it is neither.
    """
    rest, revision = text, None
    if with_revision and "@" in text and not Path(text.removeprefix(_FILE_SCHEME)).is_dir():
        rest, _, revision = text.rpartition("@")
        if not (_TAG.fullmatch(revision) or _COMMIT.fullmatch(revision)):
            raise ConfigError(f"revision {revision!r:.80}: expected a tag such as round-000120, or a commit")
    if rest.startswith(_FILE_SCHEME):
        path = rest.removeprefix(_FILE_SCHEME)
        if not path:
            raise ConfigError("file: must be followed by a directory")
        return Location(None, user_path(path), revision)
    with suppress(HFValidationError):
        validate_repo_id(rest)
        if rest.count("/") == 1:
            return Location(rest, None, revision)
    raise ConfigError(f"{text!r:.120} is neither USER/REPO nor file:DIRECTORY")


def parse_model(text: str) -> Location:
    """Parses the name of an existing model: a directory, or `USER/REPO[@REVISION]` on the Hub.

    Raises:
        CheckpointError: it is neither.
    """
    path = user_path(text)
    if path.is_dir():
        return Location(None, path, None)
    if not text.startswith((".", "/", "~", _FILE_SCHEME)):
        if "/" in text and "@" not in text and path.parent.is_dir():  # a stranger could own the name
            raise CheckpointError(
                f"{text}: no such directory in {path.parent}; if you mean the repository of this name on the Hub, "
                f"write {text}@main"
            )
        with suppress(ConfigError):
            return parse_location(text, with_revision=True)
    raise CheckpointError(f"{text}: no such directory")


def round_tag(round_number: int) -> str:
    """Returns the tag of a round."""
    return f"round-{round_number:06d}"


def round_of(revision: str) -> int | None:
    """Returns the round that a revision is named after, None for other names."""
    match = _ROUND_TAG.fullmatch(revision)
    return int(match[1]) if match and round_tag(int(match[1])) == revision else None


def check_tag(tag: str | None) -> None:
    """Checks the name of an additional tag.

    Raises:
        ConfigError: the name is not allowed.
    """
    if tag is not None and (not _TAG.fullmatch(tag) or _ROUND_TAG.fullmatch(tag) or tag == MAIN):
        raise ConfigError(
            f"tag {tag!r:.80}: expected up to 64 letters, digits, '.', '_' or '-', and not the name of a round"
        )


@dataclass(frozen=True, kw_only=True)
class Published:
    """The result of publishing."""

    status: Literal["published", "unchanged"]  # unchanged: the target had this round already
    round: int
    digest: str  # hex, of the whole reference
    revision: str  # permanent name to read it by: a commit, or the round's directory
    bytes_sent: int | None  # to the target, without headers; None: sent by a library that does not report it

    @classmethod
    def of(cls, publication: Publication, revision: str, *, was_there: bool, bytes_sent: int | None) -> Published:
        """Returns the result of publishing a publication, which the target may have had before."""
        return cls(
            status="unchanged" if was_there else "published",
            round=publication.round,
            digest=publication.digest,
            revision=revision,
            bytes_sent=bytes_sent,
        )


class Target(Protocol):
    """A repository that can be published to. Every call has deadlines, and raises HubError when it fails."""

    label: str  # for messages: USER/REPO, or "the directory"; never a path

    def check_rights(self) -> None:
        """Checks that publishing is allowed; leaves nothing behind.

        Raises:
            HubError: publishing is not allowed; the message says what to do.
        """

    def newest(self) -> Publication | None:
        """Returns the publication at `main`, None if nothing is published yet.

        Raises:
            PublicationError: it is invalid.
        """

    def publish(self, export: Path, publication: Publication, tag: str | None = None) -> Published:
        """Makes an export (written by `pack`) the newest revision, atomically.

        `tag` is an additional name, e.g. of a milestone, which `prune` never removes.

        Raises:
            SupersededError: the target has a newer round, or another state of this round.
            PublicationError: the repository belongs to another run.
            HubError: publishing failed; the next call resumes.
        """

    def prune(self, keep: int) -> list[int]:
        """Removes all rounds but the newest `keep` and those with an additional tag; returns the removed rounds."""


def is_there(current: Publication | None, run_id: str, round_number: int, digest: str, label: str) -> bool:
    """Returns True if a round with that digest (hex, of the whole reference) is published, False if the newest is
    older.

    Raises:
        SupersededError: the newest publication is newer, or another state of the same round.
        PublicationError: the newest publication is of another run.
    """
    if current is None:
        return False
    check_run(current, run_id, label)
    if current.round > round_number:
        raise SupersededError(f"{label} has round {current.round} already, which is newer than round {round_number}")
    if current.round == round_number and current.digest != digest:
        raise SupersededError(f"{label} has another state of round {round_number}; the next round can be published")
    return current.round == round_number


def check_run(current: Publication, run_id: str, label: str) -> None:
    """Refuses a place that belongs to another run.

    Raises:
        PublicationError: the place, of which `current` is the newest publication, is of another run.
    """
    if current.run_id != run_id:
        raise PublicationError(f"{label} belongs to run {current.run_id}, not {run_id}; choose another one")
