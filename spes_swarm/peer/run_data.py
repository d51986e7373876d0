"""The data that a run trains on, and whether this peer has the same data.

The run's description (`DataConfig`) names one of three kinds:

- `stdlib`: the Python standard library. The text differs slightly between versions of Python. Only the kind is
  compared; the founder's version is recorded.
- `corpus`: token files or text, identified by the digest of the tokens (data/corpus_index.py). A peer with all shards,
  or with some of them and the corpus's index, has the same data.
- `own`: every peer brings its own data, and nothing is compared.

A peer whose data differ is rejected before it fetches any weights, unless the user passes --data-differs.
"""

from __future__ import annotations

import dataclasses
import glob
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spes_swarm.base.errors import DataError, LeftEarlyError
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.join_command import describe_data
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import DataConfig
from spes_swarm.data.content_check import check_contents_once
from spes_swarm.data.corpus import default_cache_dir, open_corpus
from spes_swarm.data.corpus_index import Membership, membership
from spes_swarm.data.file_list import FILE_LIST
from spes_swarm.data.source import STDLIB
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.storage.run_directory import RunDirectory


@dataclass(frozen=True)
class LocalData:
    """What this peer trains on."""

    source: str  # for open_corpus; a path is absolute
    files: tuple[TokenFile, ...]
    described: DataConfig  # as a founder would describe it
    num_shards: int  # of the whole corpus; at least as many as files
    differs: bool  # from the run's data

    def to_event(self) -> dict[str, Any]:
        """Returns the fields of the `data` event, without paths, since trackers get it too."""
        shards = {"shards": len(self.files), "shards_total": self.num_shards}
        return {**self.described.to_dict(), **shards, "differs": self.differs}


@dataclass(eq=False)
class PeerData:
    """The data of one peer, from the command line or its last session."""

    peer: PeerConfig
    directory: RunDirectory
    say: Callable[[str], None]
    stop: threading.Event  # set when the user wants to leave
    _founded: LocalData | None = field(default=None, init=False)

    def choose(self, run: DataConfig) -> tuple[str, bool]:
        """Returns where this peer's data are, and whether they may differ from the run's; opens nothing.

        Raises:
            DataError: the user has named no data although the run needs some, or obviously different data.
        """
        source, may_differ = self.peer.data, self.peer.data_differs
        if source is None and (last := self.directory.known_data()) is not None:
            source, may_differ = last.source, last.differs or may_differ
        if source is None:
            if run.kind == "corpus":
                raise DataError(f"the run trains on {describe_data(run)}: give --data PATH with the path of your copy")
            if run.kind == "own":
                raise DataError(
                    "every peer of this run brings its own data: name yours with --data "
                    "('stdlib' is the Python standard library)"
                )
            source = STDLIB
        if source != STDLIB:
            source = str(user_path(source).absolute())
        if run.kind in ("stdlib", "corpus") and (source == STDLIB) != (run.kind == "stdlib") and not may_differ:
            here = DataConfig(kind="stdlib") if source == STDLIB else DataConfig(kind="corpus", name=name_of(source))
            raise _refusal(run, here)
        if run.kind == "corpus" and not may_differ and not Path(source).exists() and not glob.has_magic(source):
            raise DataError(
                f"the run trains on {describe_data(run)}, but --data {self.peer.data or source!r} does not exist here: "
                "give the path of your copy"
            )
        return source, may_differ

    def found(self, wanted: DataConfig, tokenizer: Tokenizer) -> DataConfig:
        """Returns the data description of a new run: the configuration, completed from this peer's own data.

        Raises:
            DataError: this peer's data differ from the configuration, or cannot be used.
        """
        data = self.open(wanted, tokenizer)
        if data.differs:
            raise DataError(
                f"the configuration says that the run trains on {describe_data(wanted)}, but this peer's data are "
                f"{describe_data(data.described)}: a founder needs the run's data (--data-differs is for joiners)"
            )
        self._founded = data
        if wanted.kind == "own":
            return wanted
        return dataclasses.replace(data.described, name=wanted.name or data.described.name)

    def open(self, run: DataConfig, tokenizer: Tokenizer) -> LocalData:
        """Opens this peer's data, tokenising text that has no cached tokens, and compares them with the run's.

        Raises:
            DataError: the data differ without --data-differs, or cannot be used.
            LeftEarlyError: the user stopped the peer while it was reading token files.
        """
        if self._founded is not None:
            return self._founded
        source, may_differ = self.choose(run)
        self.say(f"opening data: {source}")
        files = tuple(open_corpus(source, tokenizer, say=self.say, pause=self._leave_if_stopped))
        if source == STDLIB:
            here, member = DataConfig(kind="stdlib", python_version=platform.python_version()), None
            if run.python_version not in (None, here.python_version):
                self.say(
                    f"the run uses the standard library of Python {run.python_version}, this peer that of "
                    f"{here.python_version}: the text differs slightly"
                )
        else:
            if run.kind != "own":  # `own` is compared with nothing
                check_contents_once(files, default_cache_dir(), self.say, self._leave_if_stopped)
            member = membership(files)
            here = DataConfig(kind="corpus", name=name_of(source), digest=member.digest)
        differs = not _same(run, here)
        if differs and not may_differ:
            raise _refusal(run, here, member)
        if differs:
            self.say(f"training on {describe_data(here)}, although the run trains on {describe_data(run)}")
        return LocalData(source, files, here, member.num_shards if member is not None else len(files), differs)

    def remember(self, data: LocalData) -> None:
        """Stores where the data are, for the next start in this directory.

        Raises:
            UserError: the directory cannot be written.
        """
        self.directory.remember_data(data.source, differs=data.differs)

    def _leave_if_stopped(self) -> None:
        if self.stop.is_set():
            raise LeftEarlyError("stopped while reading the data")


def same_run_data(given: DataConfig, run: DataConfig) -> bool:
    """Returns True if a configuration file agrees with a run's data, whose description the founder has completed.

    The Python version is not compared: the founder recorded its own.
    """
    stated = {key: value for key, value in dataclasses.asdict(given).items() if key != "python_version"}
    return all(value is None or value == getattr(run, key) for key, value in stated.items())


def name_of(source: str) -> str:
    """Returns a name for a data source: the last part of its path, in characters that a shell does not interpret."""
    path = Path(source)
    if path.name == FILE_LIST:
        path = path.absolute().parent
    while not path.exists() and glob.has_magic(path.name):
        path = path.parent
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", path.name).lstrip(".+-")[:64]
    return name if name not in ("", STDLIB) else "corpus"


def _same(run: DataConfig, here: DataConfig) -> bool:
    if run.kind in (None, "own"):
        return True
    return run.kind == here.kind and run.digest in (None, here.digest)


def _refusal(run: DataConfig, here: DataConfig, member: Membership | None = None) -> DataError:
    hint = ""
    if run.kind == "corpus" and member is not None and not member.is_indexed:
        hint = " (if these are shards of it, put its corpus.json beside them)"
    copy = "give --data PATH with the path of your copy" if run.kind == "corpus" else "leave out --data"
    return DataError(
        f"the run trains on {describe_data(run)}, but this peer's data are {describe_data(here)}{hint}: {copy}, or "
        "pass --data-differs if this is intended"
    )
