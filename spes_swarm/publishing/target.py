"""Where publications go: the interface of all targets, and the rules that they follow.

A target is a repository with one revision per published round, named `round-000120`, and `main`, which is the newest.
Readers find a complete publication or none; an interrupted publisher leaves the previous one.

Rounds only increase. If several peers publish the same round, the first one succeeds and the others find it published,
since they would write the same weights. A repository belongs to one run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from spes_swarm.base.errors import ConfigError, HubError, PublicationError, SupersededError
from spes_swarm.publishing.card import round_tag
from spes_swarm.publishing.location import TAG, parse_location
from spes_swarm.publishing.publication import Publication

MAIN = "main"
_ROUND_TAG = re.compile(r"round-(\d{6,18})")


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

    def rounds(self) -> list[int]:
        """Returns the rounds that can be read, ascending; empty if there is no repository yet."""

    def newest(self) -> Publication | None:
        """Returns the publication at `main`, None if nothing is published yet.

        Raises:
            PublicationError: it is invalid.
        """

    def publish(self, export: Path, publication: Publication, message: str, tag: str | None = None) -> Published:
        """Makes an export (written by `pack`) the newest revision, atomically, with a line for the history.

        `tag` is an additional name, e.g. of a milestone, which `prune` never removes.

        Raises:
            SupersededError: the target has a newer round, or another state of this round.
            PublicationError: the repository belongs to another run.
            HubError: publishing failed; the next call resumes.
        """

    def prune(self, keep: int) -> list[int]:
        """Removes all rounds but the newest `keep` and those with an additional tag; returns the removed rounds."""


def open_target(text: str, *, private: bool = False, patient: bool = True) -> Target:
    """Returns the target that `--to` names (USER/REPO or file:DIRECTORY); contacts no server.

    A repository that has to be created is `private` if so wanted. Without `patient`, its calls fail soon.

    Raises:
        ConfigError: `text` is malformed.
    """
    from spes_swarm.publishing.directory import DirectoryTarget
    from spes_swarm.publishing.repository import RepositoryTarget

    location = parse_location(text)
    if location.path is not None:
        return DirectoryTarget(location.path)
    assert location.repo_id is not None
    return RepositoryTarget(location.repo_id, private=private, patient=patient)


def check_target(text: str, run_id: str) -> str | None:
    """Checks whether a run may be published there; returns why that is unknown if the Hub cannot be asked just now.

    Raises:
        HubError: publishing is not allowed.
        PublicationError: the target belongs to another run, or its publication is invalid.
    """
    from spes_swarm.publishing.client import is_passing, without_advice

    target = open_target(text, patient=False)
    try:
        target.check_rights()
        current = target.newest()
    except HubError as exc:
        if is_passing(exc.__cause__):
            return without_advice(str(exc))
        raise
    if current is not None:
        _check_run(current, run_id, text)
    return None


def check_tag(tag: str | None) -> None:
    """Checks the name of an additional tag.

    Raises:
        ConfigError: the name is not allowed.
    """
    if tag is not None and (not TAG.fullmatch(tag) or _ROUND_TAG.fullmatch(tag) or tag == MAIN):
        raise ConfigError(
            f"tag {tag!r:.80}: expected up to 64 letters, digits, '.', '_' or '-', and not the name of a round"
        )


def round_of(revision: str) -> int | None:
    """Returns the round that a revision is named after, None for other names."""
    match = _ROUND_TAG.fullmatch(revision)
    return int(match[1]) if match and round_tag(int(match[1])) == revision else None


def is_there(current: Publication | None, run_id: str, round_number: int, digest: str, label: str) -> bool:
    """Returns True if a round with that digest (hex, of the whole reference) is published, False if the newest is
    older.

    Raises:
        SupersededError: the newest publication is newer, or another state of the same round.
        PublicationError: the newest publication is of another run.
    """
    if current is None:
        return False
    _check_run(current, run_id, label)
    if current.round > round_number:
        raise SupersededError(f"{label} has round {current.round} already, which is newer than round {round_number}")
    if current.round == round_number and current.digest != digest:
        raise SupersededError(f"{label} has another state of round {round_number}; the next round can be published")
    return current.round == round_number


def _check_run(current: Publication, run_id: str, label: str) -> None:
    if current.run_id != run_id:
        raise PublicationError(f"{label} belongs to run {current.run_id}, not {run_id}; choose another one")
