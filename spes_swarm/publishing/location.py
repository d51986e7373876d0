"""How users name a repository or a model: `USER/REPO`, `file:DIRECTORY` or a directory, optionally with a revision."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # exported lazily

from spes_swarm.base.errors import CheckpointError, ConfigError
from spes_swarm.base.user_paths import user_path

FILE_SCHEME = "file:"
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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
    if with_revision and "@" in text and not Path(text.removeprefix(FILE_SCHEME)).is_dir():
        rest, _, revision = text.rpartition("@")
        if not (TAG.fullmatch(revision) or _COMMIT.fullmatch(revision)):
            raise ConfigError(f"revision {revision!r:.80}: expected a tag such as round-000120, or a commit")
    if rest.startswith(FILE_SCHEME):
        path = rest.removeprefix(FILE_SCHEME)
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
    if not text.startswith((".", "/", "~", FILE_SCHEME)):
        if "/" in text and "@" not in text and path.parent.is_dir():  # a stranger could own the name
            raise CheckpointError(
                f"{text}: no such directory in {path.parent}; if you mean the repository of this name on the Hub, "
                f"write {text}@main"
            )
        with suppress(ConfigError):
            return parse_location(text, with_revision=True)
    raise CheckpointError(f"{text}: no such directory")
