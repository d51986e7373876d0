"""The data that a peer trains on: opens its sources, and describes them as a founder would."""

from __future__ import annotations

import glob
import platform
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spes_swarm.base.errors import DataStoppedError, LeftEarlyError
from spes_swarm.base.user_paths import user_path
from spes_swarm.config.data import DataConfig
from spes_swarm.config.data_source import STDLIB, HfName, Weighted, join_mixture, parse_hf, parse_mixture
from spes_swarm.config.run import EvaluationConfig, RunConfig
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.data.content_check import check_contents_once
from spes_swarm.data.corpus import default_cache_dir, open_corpus
from spes_swarm.data.corpus_index import Membership, membership
from spes_swarm.data.file_list import FILE_LIST
from spes_swarm.data.mixture import Mixture
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.streaming.dataset import SPLIT, StreamedDataset
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.streaming.stream_sampler import StreamSampler
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import Tokenizer
from spes_swarm.metrics import events

_EVALUATION_BATCH = 8  # sequences


@dataclass(frozen=True)
class LocalSource:
    """One source: token files, or a data set that streams."""

    described: DataConfig  # as a founder would describe it
    files: tuple[TokenFile, ...] = ()
    stream: tuple[StreamedDataset, Preparing] | None = None
    member: Membership | None = None  # position of the files in their corpus; None: not a corpus

    @property
    def shards(self) -> tuple[int, int]:
        """Number of shards on this peer and in the whole data."""
        if self.stream is not None:
            return self.stream[0].num_units, self.stream[0].num_units
        return len(self.files), self.member.num_shards if self.member is not None else len(self.files)


@dataclass(frozen=True)
class LocalData:
    """What this peer trains on."""

    source: str  # as --data names it; paths are absolute
    parts: tuple[tuple[float, LocalSource], ...]  # with their weights, which add up to 1
    differs: bool  # from the run's data

    @property
    def described(self) -> DataConfig:
        """The data as a founder would describe them."""
        return DataConfig.mixed(tuple((weight, part.described) for weight, part in self.parts))

    @property
    def files(self) -> tuple[TokenFile, ...]:
        """The token files of all sources."""
        return tuple(file for _, part in self.parts for file in part.files)

    @property
    def num_shards(self) -> int:
        """Number of shards in the whole data, of which this peer may have a subset."""
        return sum(part.shards[1] for _, part in self.parts)

    def to_event(self) -> events.Data:
        """Returns the `data` event."""
        shards = sum(part.shards[0] for _, part in self.parts)
        described = self.described.to_dict()
        return events.Data(**described, shards=shards, shards_total=self.num_shards, differs=self.differs)

    def batches(self, run: RunConfig, *, peer_id: str, seed: int | None, stop: threading.Event) -> BatchSource:
        """Returns this peer's batches.

        Args:
            run: settings of the run.
            peer_id: of this peer.
            seed: of an order of its own for the data in token files; None: the order that the peers of the run divide,
                or, if its data may differ from theirs, one derived from the peer id.
            stop: set when the peer is told to leave, which ends all waiting for data.

        Raises:
            DataError: there is too little data.
        """
        training, holdout_fraction = run.training, run.evaluation.holdout_fraction
        own_seed = int.from_bytes(blake3(peer_id.encode()).digest()[:6], "little")
        peer_seed = seed if seed is not None else own_seed
        divided = not self.differs and run.data.kind not in (None, "own")  # others are known to have the same data

        def batches_of(part: LocalSource) -> BatchSource:
            if part.stream is None:
                # Peers with some shards each have little in common: each goes through all of its own.
                whole = part.shards[0] == part.shards[1]
                return Sampler(
                    TokenStream(part.files),
                    sequence_length=training.sequence_length,
                    run_seed=training.seed,
                    peer_seed=peer_seed,
                    holdout_fraction=holdout_fraction,
                    divided_as=peer_id if divided and whole and seed is None else None,
                )
            dataset, prepare = part.stream
            return StreamSampler(
                dataset,
                prepare,
                sequence_length=training.sequence_length,
                run_seed=training.seed,
                peer_id=peer_id,
                holdout_fraction=holdout_fraction,
                divided=divided,
                stop=stop,
            )

        sources = [batches_of(part) for _, part in self.parts]
        if len(sources) == 1:
            return sources[0]
        weights = [weight for weight, _ in self.parts]
        return Mixture(sources, weights, run_seed=training.seed, peer_seed=peer_seed)


def held_out_batches(batches: BatchSource, evaluation: EvaluationConfig) -> list[NDArray[np.int64]]:
    """Returns the batches on which a run is evaluated, each int64 (B, S); none if it is not evaluated.

    Raises:
        DataError: nothing is held out, or the data cannot be read.
        LeftEarlyError: the user stopped the peer while it was reading them.
    """
    if not evaluation.every_rounds:
        return []
    try:
        return list(batches.evaluation_batches(evaluation.sequences, _EVALUATION_BATCH))
    except DataStoppedError as exc:
        raise LeftEarlyError(str(exc)) from exc


def absolute_source(source: str) -> str:
    """Returns --data with absolute paths.

    Raises:
        DataError: it is malformed.
    """
    terms = parse_mixture(source)
    return join_mixture([Weighted(term.weight, _absolute(term.source)) for term in terms])


def _absolute(source: str) -> str:
    if source == STDLIB:
        return source
    hf = parse_hf(source)
    return str(hf) if hf is not None else str(user_path(source).absolute())


def described_by_name(source: str) -> DataConfig:
    """Describes one source from its name alone.

    Raises:
        DataError: it is malformed.
    """
    if source == STDLIB:
        return DataConfig(kind="stdlib")
    hf = parse_hf(source)
    if hf is None:
        return DataConfig(kind="corpus", name=name_of(source))
    return DataConfig(kind="hf", name=_name_of_hf(hf), config=hf.config)


def open_source(
    source: str,
    tokenizer: Tokenizer,
    run: DataConfig,
    *,
    check_content: bool,
    say: Callable[[str], None],
    pause: Callable[[], None],
) -> LocalSource:
    """Opens one source, tokenising text that has no cached tokens.

    Args:
        source: see config/data_source.py.
        tokenizer: of the run.
        run: the run's description of this source. It decides the split and, unless the source names one, the commit of
            a data set on the Hub.
        check_content: compare token files with their digests, once per machine.
        say: gets messages for the user.
        pause: called repeatedly; may raise to abort.

    Raises:
        DataError: the data cannot be used.
    """
    hf = parse_hf(source)
    if hf is not None:
        return _open_hf(hf, tokenizer, run, say)
    files = tuple(open_corpus(source, tokenizer, say=say, say_found=say, pause=pause))
    if source == STDLIB:
        return LocalSource(DataConfig(kind="stdlib", python_version=platform.python_version()), files)
    if check_content:
        check_contents_once(files, default_cache_dir(), say, pause)
    member = membership(files)
    described = DataConfig(kind="corpus", name=name_of(source), digest=member.digest)
    return LocalSource(described, files, member=member)


def _open_hf(hf: HfName, tokenizer: Tokenizer, run: DataConfig, say: Callable[[str], None]) -> LocalSource:
    same = run.kind == "hf" and run.name == hf.name and run.config == hf.config
    if same and hf.revision is None and not hf.is_local and run.revision is not None:
        hf = HfName(hf.name, hf.config, run.revision)
    split = (run.split if run.kind == "hf" else None) or SPLIT
    dataset = StreamedDataset(hf, split)
    say(dataset.summary)
    prepare = Preparing(tokenizer, is_chat=dataset.is_chat, name=str(hf), say=say)
    described = DataConfig(
        kind="hf",
        name=_name_of_hf(hf),
        config=hf.config,
        split=split,
        revision=dataset.revision,
        digest=blake3(f"{dataset.digest} {prepare.digest}".encode()).hexdigest(),
    )
    return LocalSource(described, stream=(dataset, prepare))


def name_of(source: str) -> str:
    """Returns a name for a data source: the last part of its path, in characters that a shell does not interpret."""
    path = Path(source)
    if path.name == FILE_LIST:
        path = path.absolute().parent
    while not path.exists() and glob.has_magic(path.name):
        path = path.parent
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "-", path.name).lstrip(".+-")[:64]
    return name if name not in ("", STDLIB) else "corpus"


def _name_of_hf(hf: HfName) -> str:
    return name_of(hf.name) if hf.is_local else hf.name
