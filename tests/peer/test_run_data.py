"""Which data count as those of a run, what is refused and how it is said, and what a start remembers."""

from __future__ import annotations

import dataclasses
import json
import platform
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from spes_swarm.base.errors import ConfigError, DataError, LeftEarlyError
from spes_swarm.config.data import DataConfig
from spes_swarm.config.file import default_config_path, load_config
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.data import content_check
from spes_swarm.data.corpus_index import INDEX_FILE, membership
from spes_swarm.data.sharding import write_shards
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from spes_swarm.peer.local_data import held_out_batches, name_of
from spes_swarm.peer.run_data import PeerData, same_run_data
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.chat_tokenizer import APPENDING, REWRITING, save_chat_tokenizer
from tests.helpers.streamed_data import save_jsonl, save_records

BYTES = ByteTokenizer()
STDLIB = DataConfig(kind="stdlib", python_version=platform.python_version())
OWN = DataConfig(kind="own")
UNKNOWN = DataConfig()


@pytest.fixture(autouse=True)
def _cache(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))


@pytest.fixture(scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests, so that the standard library is tokenised once; other sources have paths of their own."""
    return tmp_path_factory.mktemp("cache")


def text_file(path: Path, words: str = "to be or not to be") -> Path:
    path.write_text("\n".join(f"{words} {i}" for i in range(3000)), encoding="utf-8")
    return path


def shards(directory: Path, words: str = "to be or not to be") -> Path:
    """A directory of at least four shards, with their index."""
    source = directory.parent / f"{directory.name}-source"
    source.mkdir()
    texts = [text_file(source / f"{i}.txt", f"{words} {i}") for i in range(4)]
    assert len(write_shards(texts, directory, BYTES, shard_tokens=1).shards) == 4
    return directory


def some_of(corpus: Path, target: Path, *numbers: int, with_index: bool = True) -> Path:
    """A copy of some shards of a corpus."""
    target.mkdir()
    for number in numbers:
        for path in corpus.glob(f"tokens-{number:05d}.npy*"):
            shutil.copy(path, target)
    if with_index:
        shutil.copy(corpus / INDEX_FILE, target)
    return target


class Peer:
    """A peer's data in an output directory of its own; `said` is what a person has been told."""

    def __init__(self, directory: Path) -> None:
        self.directory = RunDirectory(directory)
        directory.mkdir(exist_ok=True)
        self.said: list[str] = []

    def data(
        self, source: object = None, *, differs: bool = False, seed: int | None = None, stop: bool = False
    ) -> PeerData:
        told = threading.Event()
        if stop:
            told.set()
        peer = PeerConfig(data=None if source is None else str(source), data_differs=differs, seed=seed)
        return PeerData(peer, self.directory, self.said.append, told)


@pytest.fixture
def peer(tmp_path: Path) -> Peer:
    return Peer(tmp_path / "out")


def founded(source: object, peer: Peer, wanted: DataConfig = UNKNOWN) -> DataConfig:
    return peer.data(source).found(wanted, BYTES)


# ------------------------------------------------------------------------------------------------- founding


def test_a_founder_describes_its_corpus_by_the_digest_of_the_tokens(tmp_path: Path, peer: Peer) -> None:
    path = text_file(tmp_path / "ver ses.txt")
    described = founded(path, peer)
    # Derived here: tokens of the bytes tokenizer are the bytes and one end of text, stored as little-endian uint16.
    tokens = np.array([*path.read_bytes(), 256], dtype="<u2")
    line = f"{BYTES.digest} {blake3(tokens.tobytes()).hexdigest()} {len(tokens)}\n"
    assert described == DataConfig(kind="corpus", name="ver-ses.txt", digest=blake3(line.encode()).hexdigest())


@pytest.mark.slow
def test_a_founder_without_data_takes_the_standard_library(peer: Peer) -> None:
    assert founded(None, peer) == founded("stdlib", peer) == STDLIB


def test_a_configuration_may_name_the_data(tmp_path: Path, peer: Peer) -> None:
    path = text_file(tmp_path / "a.txt")
    digest = founded(path, peer).digest
    named = DataConfig(kind="corpus", name="hamlet", digest=digest)
    assert founded(path, peer, named) == named
    assert founded(path, peer, DataConfig(kind="corpus", name="hamlet")) == named
    assert founded(path, peer, OWN) == OWN
    assert same_run_data(DataConfig(kind="corpus"), named)
    assert same_run_data(UNKNOWN, named)
    assert not same_run_data(OWN, named)
    assert same_run_data(dataclasses.replace(STDLIB, python_version="3.9.1"), STDLIB)  # it counts what was founded
    for wanted in (dataclasses.replace(named, digest="0" * 64), DataConfig(kind="stdlib")):
        with pytest.raises(DataError, match=r"the run trains on"):
            founded(path, peer, wanted)
        with pytest.raises(DataError, match="a founder needs the run's data"):
            peer.data(path, differs=True).found(wanted, BYTES)
    with pytest.raises(DataError, match="give --data PATH"):
        founded(None, peer, named)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "mine"},
        {"name": "x"},
        {"kind": "own", "digest": "0" * 64},
        {"kind": "corpus", "name": "stdlib"},
        {"kind": "corpus", "name": "-rf"},
        {"kind": "corpus", "name": "a b"},
        {"kind": "corpus", "python_version": "3.11.1"},
        {"kind": "corpus", "name": "user/verses"},
        {"kind": "corpus", "revision": "ab" * 20},
        {"kind": "stdlib", "config": "en"},
        {"kind": "hf", "revision": "main"},
        {"kind": "hf", "name": "a/b/c"},
        {"kind": "mixture"},
        {"kind": "mixture", "sources": [{"weight": 1, "kind": "hf"}]},
        {"kind": "mixture", "sources": [{"weight": 0, "kind": "hf"}, {"weight": 1, "kind": "stdlib"}]},
        {"kind": "mixture", "sources": [{"weight": 1, "kind": "own"}, {"weight": 1, "kind": "stdlib"}]},
        {"kind": "hf", "sources": [{"weight": 1, "kind": "hf"}, {"weight": 1, "kind": "stdlib"}]},
    ],
)
def test_impossible_descriptions(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        DataConfig(**values)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("/a/my tokens/", "my-tokens"),
        ("/a/größe.txt", "gr-e.txt"),
        ("/texts/*.txt", "texts"),
        ("/a/**/*.jsonl", "a"),
        ("/a/.hidden", "hidden"),
        ("/a/tokens/file_list.txt", "tokens"),
        ("/a/--data", "data"),
        ("/a/stdlib", "corpus"),
        ("/", "corpus"),
        ("/" + "x" * 200, "x" * 64),
    ],
)
def test_names_can_stand_in_a_command(source: str, name: str) -> None:
    assert name_of(source) == name
    DataConfig(kind="corpus", name=name)


# -------------------------------------------------------------------------------------------------- joining


def test_the_same_text_elsewhere_is_the_same_data(tmp_path: Path, peer: Peer) -> None:
    run = founded(text_file(tmp_path / "a.txt"), peer)
    (tmp_path / "there").mkdir()
    opened = Peer(tmp_path / "joiner").data(text_file(tmp_path / "there" / "b.txt")).open(run, BYTES)
    assert not opened.differs


def test_shards_of_one_corpus_are_the_same_data(tmp_path: Path, peer: Peer) -> None:
    corpus = shards(tmp_path / "tokens")
    run = founded(corpus, peer)
    assert run.name == "tokens"
    joiner = Peer(tmp_path / "joiner")
    some = some_of(corpus, tmp_path / "some", 1, 3)
    for source, count in ((corpus, 4), (some, 2), (some / "tokens-00003.npy", 1)):
        opened = joiner.data(source).open(run, BYTES)
        assert (opened.differs, len(opened.files), opened.num_shards) == (False, count, 4)
        assert opened.described.digest == run.digest
    # A founder that has only some shards founds a run on the whole corpus.
    assert founded(some, peer).digest == run.digest
    # Nor does a missing index matter where all shards are there.
    assert not joiner.data(some_of(corpus, tmp_path / "all", 0, 1, 2, 3, with_index=False)).open(run, BYTES).differs


def test_shards_without_their_index_are_refused_with_what_to_do(tmp_path: Path, peer: Peer) -> None:
    corpus = shards(tmp_path / "tokens")
    run = founded(corpus, peer)
    some = some_of(corpus, tmp_path / "some", 1, 3, with_index=False)
    with pytest.raises(DataError, match=r"if these are shards of it, put its corpus\.json next to them"):
        peer.data(some).open(run, BYTES)


def test_an_index_cannot_vouch_for_other_shards(tmp_path: Path, peer: Peer) -> None:
    corpus = shards(tmp_path / "tokens")
    run = founded(corpus, peer)
    other = shards(tmp_path / "other", "something else")
    shutil.copy(corpus / INDEX_FILE, other)
    with pytest.raises(DataError, match=r"tokens-00000\.npy is not a shard of the corpus"):
        peer.data(other).open(run, BYTES)
    # One that was named alone is a corpus of its own, and so another one.
    with pytest.raises(DataError, match="the run trains on 'tokens'"):
        peer.data(other / "tokens-00000.npy").open(run, BYTES)
    # An index that lists one shard more is that of another corpus.
    index = json.loads((corpus / INDEX_FILE).read_text())
    index["shards"].append({"name": "x", "num_tokens": 5, "blake3": "0" * 64})
    some = some_of(corpus, tmp_path / "some", 0)
    (some / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(DataError, match="the run trains on 'tokens'"):
        peer.data(some).open(run, BYTES)


@pytest.mark.parametrize(
    ("damage", "why"),
    [('{"format": "x"}', "format: "), ("{", "Invalid JSON"), ("[]", "Input should be"), ('{"shards": []}', "tok")],
)
def test_a_damaged_index(tmp_path: Path, damage: str, why: str) -> None:
    corpus = shards(tmp_path / "tokens")
    (corpus / INDEX_FILE).write_text(damage)
    with pytest.raises(DataError, match=rf"corpus\.json is damaged \({why}"):
        membership([TokenFile.open(corpus / "tokens-00000.npy")])


def test_tokens_that_were_changed_are_not_the_same_data(tmp_path: Path, peer: Peer) -> None:
    """A sidecar proves nothing about its tokens."""
    corpus = shards(tmp_path / "tokens")
    run = founded(corpus, peer)
    copy = some_of(corpus, tmp_path / "copy", 0, 1)
    content = bytearray((copy / "tokens-00001.npy").read_bytes())
    content[-10] ^= 1
    (copy / "tokens-00001.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"tokens-00001\.npy is corrupt"):
        peer.data(copy).open(run, BYTES)


def test_other_data_are_refused_in_one_line_that_names_both(tmp_path: Path, peer: Peer) -> None:
    run = founded(text_file(tmp_path / "a.txt"), peer)
    assert run.digest is not None
    other = text_file(tmp_path / "b.txt", "it was the best of times")
    with pytest.raises(DataError) as caught:
        peer.data(other).open(run, BYTES)
    for part in (f"'a.txt' (digest {run.digest[:12]})", "'b.txt' (digest ", "--data-differs"):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    opened = peer.data(other, differs=True).open(run, BYTES)
    assert opened.differs
    assert opened.to_event().differs is True
    assert any("although the run trains on 'a.txt'" in line for line in peer.said)


def test_what_is_plainly_other_data_is_refused_before_anything_is_opened(tmp_path: Path, peer: Peer) -> None:
    run = DataConfig(kind="corpus", name="verses.txt", digest="ab" * 32)
    with pytest.raises(
        DataError, match=r"on 'verses\.txt' \(digest abababababab\), and a swarm never moves data: give"
    ):
        peer.data().choose(run)
    with pytest.raises(DataError, match="this peer's data are the Python standard library"):
        peer.data("stdlib").choose(run)
    named = r"the run trains on 'verses\.txt' \(digest abababababab\), and a swarm never moves data; give the path"
    for missing in ("verses.txt", "hf:./verses.txt", "hf:./verses.txt:en", "0.5*verses.txt + 0.5*stdlib"):
        with pytest.raises(DataError, match=rf"^--data '[hf:./]*verses\.txt(:en)?' does not exist here: {named}"):
            peer.data(missing).choose(run)
    with pytest.raises(DataError, match=r"trains on the Python standard library, but this peer's data are 'b\.txt'"):
        peer.data(text_file(tmp_path / "b.txt")).choose(STDLIB)
    assert peer.data("stdlib", differs=True).choose(run) == ("stdlib", True)


def test_the_standard_library_of_another_python_is_the_same_data(peer: Peer) -> None:
    run = DataConfig(kind="stdlib", python_version="3.0.1")
    opened = peer.data().open(run, BYTES)
    assert not opened.differs
    assert opened.described.python_version == platform.python_version()
    assert any("Python 3.0.1" in line for line in peer.said)


def test_everybody_may_bring_their_own(tmp_path: Path, peer: Peer) -> None:
    with pytest.raises(DataError, match="name yours with --data"):
        peer.data().choose(OWN)
    for source in ("stdlib", text_file(tmp_path / "a.txt"), shards(tmp_path / "tokens")):
        assert not peer.data(source).open(OWN, BYTES).differs


def test_a_run_of_an_earlier_version_says_nothing_of_its_data(tmp_path: Path, peer: Peer) -> None:
    assert peer.data().choose(UNKNOWN) == ("stdlib", False)
    assert not peer.data(text_file(tmp_path / "a.txt")).open(UNKNOWN, BYTES).differs


# -------------------------------------------------------------------------------- data sets that stream, mixtures


def quickstart(data: DataConfig) -> RunConfig:
    run = load_config(default_config_path()).run
    assert run is not None
    return dataclasses.replace(run, data=data)


def test_data_are_divided_only_with_peers_that_have_the_same(tmp_path: Path, peer: Peer) -> None:
    source, other = (f"hf:{save_jsonl(tmp_path / name, [range(size)])}" for name, size in (("a", 50), ("b", 51)))
    of_run = founded(source, peer)
    corpus = shards(tmp_path / "corpus")
    tokens = founded(corpus, peer)
    for run_data, mine, differs, divided in (
        (tokens, corpus, False, 1),
        (tokens, some_of(corpus, tmp_path / "some", 0), False, 0),
        (of_run, corpus, True, 0),
        (of_run, source, False, 1),
        (of_run, other, True, 0),
        (OWN, source, False, 0),
        (of_run, f"0.5*{source} + 0.5*{other}", True, 0),
    ):
        data = Peer(tmp_path / "peer").data(mine, differs=differs).open(run_data, BYTES)
        batches = data.batches(quickstart(run_data), peer_id="a", seed=None, stop=threading.Event())
        assert len(batches.positions()) == divided


def test_a_directory_that_streams_is_compared_by_its_files(tmp_path: Path, peer: Peer) -> None:
    run = founded(f"hf:{save_jsonl(tmp_path / 'set', [range(50)])}", peer)
    assert (run.kind, run.name, run.split, run.revision) == ("hf", "set", "train", None)
    copy = save_jsonl(tmp_path / "copy", [range(50)])
    joiner = Peer(tmp_path / "joiner")
    data = joiner.data(f"hf:{copy}")
    opened = data.open(run, BYTES)
    assert (opened.differs, opened.described.digest, opened.num_shards) == (False, run.digest, 1)
    data.remember(opened)
    assert joiner.data().open(run, BYTES).source == f"hf:{copy}"
    other = f"hf:{save_jsonl(tmp_path / 'other', [range(51)])}"
    with pytest.raises(DataError, match=r"trains on 'set' \(digest .*, but this peer's data are 'other' \(digest "):
        peer.data(other).open(run, BYTES)
    assert peer.data(other, differs=True).open(run, BYTES).differs
    for source, message in (
        (None, "give --data PATH"),
        ("stdlib", "but this peer's data are the Python standard library"),
        (copy, "but this peer's data are 'copy'"),
        (f"1*hf:{copy} + 1*stdlib", "but this peer's data are 0.5 of 'copy' and 0.5 of the Python standard library"),
    ):
        with pytest.raises(DataError, match=message):
            Peer(tmp_path / "new").data(source).choose(run)
    with pytest.raises(DataError, match="a founder needs the run's data"):
        peer.data(f"hf:{copy}", differs=True).found(dataclasses.replace(run, digest="0" * 64), BYTES)


def test_the_chat_template_is_part_of_the_data(tmp_path: Path, peer: Peer) -> None:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}]
    source = f"hf:{save_records(tmp_path / 'chats', {'messages': messages})}"
    with pytest.raises(DataError, match="has no chat template"):
        founded(source, peer)
    digests = {
        peer.data(source).found(UNKNOWN, load_tokenizer(save_chat_tokenizer(tmp_path / str(n), template))).digest
        for n, template in enumerate((APPENDING, REWRITING, APPENDING))
    }
    assert len(digests) == 2


def test_a_mixture_is_the_same_with_the_same_sources_and_weights(tmp_path: Path, peer: Peer) -> None:
    streamed, text = save_jsonl(tmp_path / "set", [range(50)]), text_file(tmp_path / "a.txt")
    run = founded(f"3*hf:{streamed} + 1*{text}", peer)
    assert [(source.weight, source.kind, source.name) for source in run.sources] == [
        (0.75, "hf", "set"),
        (0.25, "corpus", "a.txt"),
    ]
    assert DataConfig(**json.loads(json.dumps(run.to_dict()))) == run
    same = peer.data(f"0.3*hf:{streamed} + 0.1*{text}").open(run, BYTES)
    assert (same.differs, same.num_shards) == (False, 2)
    for source in (f"0.7*hf:{streamed} + 0.3*{text}", f"0.75*hf:{text.parent / 'set'} + 0.25*{shards(tmp_path / 't')}"):
        with pytest.raises(DataError, match=r"the run trains on 0\.75 of 'set' .* and 0\.25 of 'a\.txt'"):
            peer.data(source).open(run, BYTES)
    with pytest.raises(DataError, match=r"this peer's data are 0\.25 of 'a\.txt' and 0\.75 of 'set'"):
        peer.data(f"0.25*{text} + 0.75*hf:{streamed}").choose(run)
    with pytest.raises(DataError, match=r"--data .*missing' does not exist here"):
        peer.data(f"0.75*hf:{streamed} + 0.25*{tmp_path}/missing").choose(run)
    # A configuration may name the sources, with weights of any sum.
    wanted = DataConfig(kind="mixture", sources=({"weight": 3, "kind": "hf"}, {"weight": 1, "kind": "corpus"}))  # type: ignore[arg-type]
    assert same_run_data(wanted, run)
    assert founded(f"3*hf:{streamed} + 1*{text}", peer, wanted) == run
    assert not same_run_data(dataclasses.replace(wanted, sources=wanted.sources[::-1]), run)


def test_data_that_every_machine_finds_need_no_name(peer: Peer) -> None:
    on_hub = DataConfig(kind="hf", name="user/verses", config="en", revision="ab" * 20, digest="0" * 64)
    assert peer.data().choose(on_hub) == (f"hf:user/verses:en@{'ab' * 20}", False)
    assert peer.data().choose(DataConfig(kind="hf", name="user/verses")) == ("hf:user/verses", False)
    mixed = DataConfig.mixed(((0.75, on_hub), (0.25, STDLIB)))
    assert peer.data().choose(mixed) == (f"0.75*hf:user/verses:en@{'ab' * 20} + 0.25*stdlib", False)


def test_batches_of_a_mixture_are_of_all_sources(tmp_path: Path, peer: Peer) -> None:
    streamed, text = save_jsonl(tmp_path / "set", [range(900)]), text_file(tmp_path / "a.txt", "ZZZZ")
    source = f"0.5*hf:{streamed} + 0.5*{text}"
    run = quickstart(founded(source, peer))
    stop = threading.Event()
    batches = peer.data(source).open(run.data, BYTES).batches(run, peer_id="a", seed=None, stop=stop)
    try:
        training = [BYTES.decode(row) for row in batches.next_batch(40)]
        evaluation = [BYTES.decode(row) for batch in held_out_batches(batches, run.evaluation) for row in batch]
    finally:
        batches.close()
    for windows in (training, evaluation):
        of_text = ["ZZZZ" in window for window in windows]
        assert 0.2 < sum(of_text) / len(of_text) < 0.99
        assert all("xxx" in window for window, is_text in zip(windows, of_text, strict=True) if not is_text)
    assert held_out_batches(batches, dataclasses.replace(run.evaluation, every_rounds=0)) == []


# ----------------------------------------------------------------------------------------------- the next start


def test_the_next_start_has_the_same_data(tmp_path: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    text_file(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    run = founded("a.txt", peer)
    data = peer.data("a.txt")
    data.remember(data.open(run, BYTES))
    monkeypatch.chdir("/")
    opened = peer.data().open(run, BYTES)
    assert (opened.source, opened.differs) == (str(tmp_path / "a.txt"), False)


def test_the_next_start_remembers_that_the_data_differ_and_compares_others(tmp_path: Path, peer: Peer) -> None:
    run = founded(text_file(tmp_path / "a.txt"), peer)
    other = text_file(tmp_path / "b.txt", "it was the best of times")
    data = peer.data(other, differs=True)
    data.remember(data.open(run, BYTES))
    assert peer.data().open(run, BYTES).differs
    with pytest.raises(DataError, match="--data-differs"):
        peer.data(other).open(run, BYTES)
    assert not peer.data(tmp_path / "a.txt").open(run, BYTES).differs


def test_data_that_have_moved_are_not_replaced_by_others(tmp_path: Path, peer: Peer) -> None:
    path = text_file(tmp_path / "a.txt")
    run = founded(path, peer)
    data = peer.data(path)
    data.remember(data.open(run, BYTES))
    path.unlink()
    with pytest.raises(DataError, match=r"a\.txt' does not exist here"):
        peer.data().choose(run)


def test_the_next_start_has_the_same_order(tmp_path: Path, peer: Peer) -> None:
    path, other = text_file(tmp_path / "a.txt"), text_file(tmp_path / "b.txt")
    run = founded(path, peer)
    data = peer.data(path, seed=5)
    data.remember(data.open(run, BYTES))
    again = peer.data(path, seed=5)
    assert again.choose(run) == (str(path), False)
    assert [found.seed for found in (again, peer.data(), peer.data(path), peer.data(other))] == [5, 5, 5, 5]
    peer.data().remember(peer.data().open(run, BYTES))
    assert peer.data().seed == 5
    with pytest.raises(DataError, match=r"goes through its data with --seed 5: leave out --seed 6"):
        peer.data(seed=6).choose(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"source": "a", "differs": true, "seed": "5"}',
        '{"source": 3, "differs": true}',
        '{"source": "a", "differs": 1}',
    ],
)
def test_a_damaged_memory_is_none(peer: Peer, content: str) -> None:
    (peer.directory.path / "data.json").write_text(content)
    assert peer.directory.known_data() is None


# ------------------------------------------------------------------------------------------- the cost of comparing


def test_reading_for_long_is_announced_and_can_be_left(
    tmp_path: Path, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content_check, "WORTH_SAYING_BYTES", 1000)
    corpus = shards(tmp_path / "tokens")
    with pytest.raises(LeftEarlyError):
        peer.data(corpus, stop=True).open(UNKNOWN, BYTES)
    assert any("tokens against their digests, once" in line for line in peer.said)
