"""The data that a run trains on, and whether this peer has the same data.

The run's description (`DataConfig`) names one of these kinds:

- `stdlib`: the Python standard library. The text differs slightly between versions of Python. Only the kind is
  compared; the founder's version is recorded.
- `corpus`: token files or text, identified by the digest of the tokens (data/corpus_index.py). A peer with all shards,
  or with some of them and the corpus's index, has the same data.
- `hf`: a data set that streams, from the Hub at the founder's commit, or from a directory whose files are compared
  (data/streaming/dataset.py).
- `mixture`: several of these with weights, in the same order on every peer.
- `own`: every peer brings its own data, and nothing is compared.

A peer whose data differ is rejected before it fetches any weights, unless the user passes --data-differs.
"""

from __future__ import annotations

import dataclasses
import math
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spes_swarm.base.errors import DataError, LeftEarlyError
from spes_swarm.config.data import DataConfig
from spes_swarm.config.data_source import HF_PREFIX, STDLIB, missing_paths, parse_hf, parse_mixture
from spes_swarm.config.join_command import describe_data, source_of
from spes_swarm.config.peer import PeerConfig
from spes_swarm.data.corpus_index import Membership
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.peer.local_data import LocalData, absolute_source, described_by_name, open_source
from spes_swarm.storage.run_directory import KnownData, RunDirectory


@dataclass(eq=False)
class PeerData:
    """The data of one peer, from the command line or its last session."""

    peer: PeerConfig
    directory: RunDirectory
    say: Callable[[str], None]
    stop: threading.Event  # set when the user wants to leave
    _founded: LocalData | None = field(default=None, init=False)

    @property
    def seed(self) -> int | None:
        """The seed of an order of this peer's own: the user's, or that of the last session; None: there is none."""
        last = self.directory.known_data()
        return last.seed if self.peer.seed is None and last is not None else self.peer.seed

    def choose(self, run: DataConfig) -> tuple[str, bool]:
        """Returns where this peer's data are, and whether they may differ from the run's; opens nothing.

        Raises:
            DataError: the user has named no data although the run needs some, or obviously different data, or --seed
                contradicts the data or the last session.
        """
        source, may_differ, last = self.peer.data, self.peer.data_differs, self.directory.known_data()
        if last is not None and self.seed != last.seed:
            before = "without --seed" if last.seed is None else f"with --seed {last.seed}"
            raise DataError(
                f"output directory {self.directory.path} goes through its data {before}: leave out --seed {self.seed}, "
                "or choose another --output-dir"
            )
        if source is None and last is not None:
            source, may_differ = last.source, last.differs or may_differ
        if source is None:
            if run.kind == "own":
                raise DataError(
                    "every peer of this run brings its own data: name yours with --data "
                    "('stdlib' is the Python standard library)"
                )
            source = STDLIB if run.kind is None else source_of(run)
        if source is None:
            raise DataError(
                f"the run trains on {describe_data(run)}, and a swarm never moves data: give --data PATH with the path "
                "of your copy"
            )
        if self.peer.seed is not None and source.startswith(HF_PREFIX):
            raise DataError(f"--seed is the order of token files, but {source} streams: leave it out")
        if source_of(run) is None and run.kind != "own" and not may_differ and (missing := missing_paths(source)):
            raise DataError(
                f"--data {missing[0]!r} does not exist here: the run trains on {describe_data(run)}, and a swarm never "
                "moves data; give the path of your copy"
            )
        source = absolute_source(source)
        if run.kind in (None, "own") or may_differ:
            return source, may_differ
        terms = parse_mixture(source)
        here = DataConfig.mixed(tuple((term.weight, described_by_name(term.source)) for term in terms))
        if [part.kind for _, part in run.parts] != [part.kind for _, part in here.parts]:
            raise self._refusal(run, here)
        return source, may_differ

    def folders(self, run: DataConfig) -> list[Path]:
        """Returns the folders in which this peer's data are; none for data that are not on this machine.

        Raises:
            DataError: as `choose`.
        """
        sources = [term.source for term in parse_mixture(self.choose(run)[0]) if term.source != STDLIB]
        streamed = {source: parse_hf(source) for source in sources}
        named = [source if hf is None else hf.name for source, hf in streamed.items() if hf is None or hf.is_local]
        paths = [Path(name) for name in named]
        return [path if path.is_dir() else path.parent for path in paths]

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
        if wanted.kind in (None, "own"):
            return data.described if wanted.kind is None else wanted
        names = [given.name for _, given in wanted.parts]
        named = zip(names, data.described.parts, strict=True)
        return DataConfig.mixed(
            tuple((weight, dataclasses.replace(part, name=name or part.name)) for name, (weight, part) in named)
        )

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
        terms = parse_mixture(source)
        of_run = [part for _, part in run.parts]
        if len(of_run) != len(terms):
            of_run = [DataConfig()] * len(terms)
        parts = tuple(
            (
                term.weight,
                open_source(
                    term.source,
                    tokenizer,
                    described,
                    check_content=run.kind != "own",  # `own` is compared with nothing
                    say=self.say,
                    pause=self._leave_if_stopped,
                ),
            )
            for term, described in zip(terms, of_run, strict=True)
        )
        self._report_python_version(of_run)
        data = LocalData(source, parts, differs=False)
        if _same(run, data.described):
            return data
        if not may_differ:
            members = [part.member for _, part in parts if part.member is not None]
            raise self._refusal(run, data.described, members[0] if len(members) == len(parts) == 1 else None)
        self.say(f"training on {describe_data(data.described)}, although the run trains on {describe_data(run)}")
        return dataclasses.replace(data, differs=True)

    def _refusal(self, run: DataConfig, here: DataConfig, member: Membership | None = None) -> DataError:
        hint = ""
        if run.kind == "corpus" and member is not None and not member.is_indexed:
            hint = " (if these are shards of it, put its corpus.json next to them)"
        copy = "leave out --data" if source_of(run) is not None else "give --data PATH with the path of your copy"
        whose = "the run"
        if self.peer.data is None:  # they were the run's, but have changed
            copy = "give --data PATH with the path of an unchanged copy"
        elif (stored := self.directory.raw_manifest()) is not None:
            whose = f"output directory {self.directory.path} belongs to run {stored.run_id}, which"
            copy = f"choose another --output-dir to found or join another run, {copy} to continue this one"
        return DataError(
            f"{whose} trains on {describe_data(run)}, but this peer's data are {describe_data(here)}{hint}: {copy}, or "
            "pass --data-differs if this is intended"
        )

    def _report_python_version(self, of_run: list[DataConfig]) -> None:
        here = platform.python_version()
        for described in of_run:
            if described.kind == "stdlib" and described.python_version not in (None, here):
                self.say(
                    f"the run uses the standard library of Python {described.python_version}, this peer that of "
                    f"{here}: the text differs slightly"
                )

    def remember(self, data: LocalData) -> None:
        """Stores where the data are, for the next start in this directory.

        Raises:
            UserError: the directory cannot be written.
        """
        self.directory.remember_data(KnownData(data.source, data.differs, self.seed))

    def _leave_if_stopped(self) -> None:
        if self.stop.is_set():
            raise LeftEarlyError("stopped while reading the data")


def same_run_data(given: DataConfig, run: DataConfig) -> bool:
    """Returns True if a configuration file agrees with a run's data, whose description the founder has completed.

    The Python version is not compared: the founder recorded its own.
    """
    if given.kind == "mixture":
        return run.kind == "mixture" and _same_parts(given, run, same_run_data)
    stated = {key: value for key, value in given.to_dict().items() if key not in ("python_version", "sources")}
    return all(value is None or value == getattr(run, key) for key, value in stated.items())


def _same(run: DataConfig, here: DataConfig) -> bool:
    if run.kind in (None, "own"):
        return True
    if run.kind == here.kind == "mixture":
        return _same_parts(run, here, _same)
    if run.kind == here.kind == "hf" and run.digest is None:  # a founder's configuration
        return same_run_data(run, here)
    return run.kind == here.kind and run.digest in (None, here.digest)


def _same_parts(a: DataConfig, b: DataConfig, same: Callable[[DataConfig, DataConfig], bool]) -> bool:
    """Compares the sources of two mixtures."""
    return len(a.parts) == len(b.parts) and all(
        math.isclose(weight_a, weight_b, rel_tol=1e-6) and same(part_a, part_b)
        for (weight_a, part_a), (weight_b, part_b) in zip(a.parts, b.parts, strict=True)
    )
