"""Where publications go: what every target can do, and the rules that all of them keep.

A target is a repository: one revision for each published round, named `round-000120`, and `main`, which is the newest.
Whoever reads finds a whole publication or none; whatever breaks off leaves the one before.

Rounds only go forward. Of several peers that publish the same round, the first one does and the others find it done,
since they would write the same weights. A repository belongs to one run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from spes_swarm.base.errors import ConfigError, PublicationError, SupersededError
from spes_swarm.publishing.card import round_tag
from spes_swarm.publishing.location import TAG, parse_location
from spes_swarm.publishing.publication import Publication

MAIN = "main"
_ROUND_TAG = re.compile(r"round-(\d{6,18})")


@dataclass(frozen=True, kw_only=True)
class Published:
    """What publishing came to."""

    status: Literal["published", "unchanged"]  # unchanged: the target had this round already
    round: int
    digest: str  # hex, of the whole reference
    revision: str  # name by which it can be read for good: a commit, or the round's directory
    bytes_sent: int | None  # to the target, headers excluded; None: sent by a library that does not say


class Target(Protocol):
    """A repository that can be published to. Every call has deadlines, and raises HubError when it fails."""

    @property
    def label(self) -> str:
        """For messages: USER/REPO, or "the directory"; never a path."""

    def check_rights(self) -> None:
        """Finds out whether publishing will be allowed; leaves nothing behind.

        Raises:
            HubError: it will not; the message says what to do.
        """

    def rounds(self) -> list[int]:
        """Rounds that can be read, ascending; none where there is no repository yet."""

    def newest(self) -> Publication | None:
        """What `main` has, None where nothing is published yet.

        Raises:
            PublicationError: it cannot be used.
        """

    def publish(self, export: Path, publication: Publication, message: str, tag: str | None = None) -> Published:
        """Makes an export the newest revision, all at once.

        Args:
            export: directory that `pack` has written.
            publication: its manifest.
            message: one line for the history.
            tag: a further name, which `prune` never takes away, e.g. a milestone's.

        Raises:
            SupersededError: a newer round is there, or another state of this round.
            PublicationError: the repository is of another run.
            HubError: it could not be done; running it again goes on where it stopped.
        """

    def prune(self, keep: int) -> list[int]:
        """Takes away all rounds but the newest `keep` and those with a further tag; returns which."""


def open_target(text: str, *, private: bool = False) -> Target:
    """The target that `--to` names; nothing is contacted yet.

    Args:
        text: `USER/REPO` or `file:DIRECTORY`.
        private: make the repository private if it has to be created (on a Hub).

    Raises:
        ConfigError: it names none.
    """
    from spes_swarm.publishing.directory import DirectoryTarget
    from spes_swarm.publishing.repository import RepositoryTarget

    location = parse_location(text)
    if location.path is not None:
        return DirectoryTarget(location.path)
    assert location.repo_id is not None
    return RepositoryTarget(location.repo_id, private=private)


def check_tag(tag: str | None) -> None:
    """Checks the name of a further tag.

    Raises:
        ConfigError: it cannot be one.
    """
    if tag is not None and (not TAG.fullmatch(tag) or _ROUND_TAG.fullmatch(tag) or tag == MAIN):
        raise ConfigError(
            f"tag {tag!r:.80}: expected up to 64 of letters, digits, '.', '_' and '-', and no round's name"
        )


def round_of(revision: str) -> int | None:
    """The round that a revision's name says, None for other names."""
    match = _ROUND_TAG.fullmatch(revision)
    return int(match[1]) if match and round_tag(int(match[1])) == revision else None


def is_there(current: Publication | None, run_id: str, round_number: int, digest: str, label: str) -> bool:
    """Returns True if what is published is what is to be published; False: it is older.

    Args:
        current: the newest publication.
        run_id: of what is to be published.
        round_number: the same.
        digest: hex, of the whole reference.
        label: of the target.

    Raises:
        SupersededError: it is newer, or another state of the same round.
        PublicationError: it is of another run.
    """
    if current is None:
        return False
    if current.run_id != run_id:
        raise PublicationError(f"{label} belongs to run {current.run_id}, not {run_id}; choose another one")
    if current.round > round_number:
        raise SupersededError(f"{label} has round {current.round} already, which is newer than round {round_number}")
    if current.round == round_number and current.digest != digest:
        raise SupersededError(f"{label} has another state of round {round_number}; the next round can be published")
    return current.round == round_number
