"""Streamed data sets, read by the real `datasets`: the division among peers, and an exact cursor."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import DataError, DataStoppedError
from spes_swarm.config.data_source import parse_hf
from spes_swarm.data.corpus import check_source
from spes_swarm.data.streaming.dataset import Example, StreamedDataset
from spes_swarm.data.streaming.pieces import BLOCK_EXAMPLES, MANY_UNITS
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.streaming.stream_sampler import StreamedUnits, StreamSampler
from spes_swarm.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.helpers.chat_tokenizer import save_chat_tokenizer
from tests.helpers.streamed_data import document, opened, save_jsonl, save_parquet, save_records

BYTES = ByteTokenizer()
NUM_DOCUMENTS = 300


@pytest.fixture(scope="module")
def few_units(tmp_path_factory: pytest.TempPathFactory) -> StreamedDataset:
    """Three files, cut into blocks of examples."""
    root = tmp_path_factory.mktemp("few")
    return opened(save_jsonl(root, [range(0, 50), range(50, 210), range(210, NUM_DOCUMENTS)]))


@pytest.fixture(scope="module")
def many_units(tmp_path_factory: pytest.TempPathFactory) -> StreamedDataset:
    """Seventy files, each of which is one piece with one or two row groups."""
    root = tmp_path_factory.mktemp("many")
    per_file = NUM_DOCUMENTS // 70 + 1
    files = [range(first, min(first + per_file, NUM_DOCUMENTS)) for first in range(0, NUM_DOCUMENTS, per_file)]
    files += [range(0)] * (70 - len(files))
    return opened(save_parquet(root, files, rows_in_group=3))


@pytest.fixture(params=["few_units", "many_units"])
def dataset(request: pytest.FixtureRequest) -> StreamedDataset:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, StreamedDataset)
    return found


@pytest.fixture
def samplers() -> Iterator[list[StreamSampler]]:
    """Closed after the test."""
    made: list[StreamSampler] = []
    yield made
    for sampler in made:
        sampler.close()


def sampler(
    units: StreamedUnits, made: list[StreamSampler], peer_id: str = "a", *, window: int = 16, **changes: Any
) -> StreamSampler:
    settings = {"run_seed": 5, "holdout_fraction": 0.1, "sequence_length": window, **changes}
    prepare = Preparing(BYTES, is_chat=False, name=units.name, say=settings.pop("tell", lambda text: None))
    made.append(StreamSampler(units, prepare, peer_id=peer_id, **settings))
    return made[-1]


def documents_of(tokens: Any) -> list[str]:
    """The complete documents in a stream of tokens; the first and last may be cut."""
    return BYTES.decode(np.asarray(tokens).reshape(-1)).split("<|endoftext|>")[1:-1]


def numbers_in(sampler: StreamSampler, num_tokens: int) -> list[int]:
    """Documents in training order, until this many tokens are used; the first is left out."""
    windows = [sampler.next_batch(4) for _ in range(num_tokens // (4 * sampler.sequence_length))]
    found = documents_of(windows)
    numbers = [int(text[1 : text.index(">")]) for text in found]
    assert found == [document(number) for number in numbers]
    return numbers


def one_epoch(sampler: StreamSampler) -> list[int]:
    """All documents of this peer's first epoch."""
    numbers: list[int] = []
    text = ""
    while sampler.state()["epoch"] == 0:
        text += BYTES.decode(sampler.next_batch(1)[0])
    numbers = [int(number) for number in re.findall(r"<(\d+)>x*<\|endoftext\|>", text)]
    first_again = next((i for i, number in enumerate(numbers) if number in numbers[:i]), len(numbers))
    return numbers[:first_again]


def held_out(sampler: StreamSampler) -> set[int]:
    return {int(n) for batch in sampler.evaluation_batches(10_000, 8) for n in re.findall(r"<(\d+)>", decoded(batch))}


def decoded(batch: Any) -> str:
    return BYTES.decode(np.asarray(batch).reshape(-1))


# ---------------------------------------------------------------------------------------------- who trains on what


def test_a_peer_whose_data_no_other_has_trains_on_all_of_them(
    dataset: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    mine, others = (sampler(dataset, samplers, peer_id, divided=False) for peer_id in "ab")
    mine.follow(["a", "b", "c"])
    mine.advance([40 << 20])  # of a member whose data are others
    assert mine.positions() == ()
    order, kept = one_epoch(mine), held_out(mine)
    assert set(order) == set(one_epoch(sampler(dataset, samplers))) == set(one_epoch(others))
    assert order != one_epoch(sampler(dataset, samplers, "b", divided=False))
    assert kept == held_out(others)


def test_an_epoch_has_every_document_that_is_not_held_out(
    dataset: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    assert (dataset.num_units >= MANY_UNITS) == (dataset.num_units == 70)
    trained = Counter(one_epoch(sampler(dataset, samplers)))
    kept = held_out(samplers[0])
    # The last held-out window is incomplete, so a few held-out documents may be in neither.
    missing = set(range(NUM_DOCUMENTS)) - trained.keys() - kept
    assert not trained.keys() & kept
    assert 10 < len(kept) < 60
    assert len(missing) <= 2
    assert set(trained.values()) == {1}


def test_members_divide_an_epoch_among_themselves(dataset: StreamedDataset, samplers: list[StreamSampler]) -> None:
    alone = set(one_epoch(sampler(dataset, samplers)))
    members = ["a", "b", "c"]
    shares = []
    for member in members:
        sampler(dataset, samplers, member).follow(members)
        shares.append(one_epoch(samplers[-1]))
    assert Counter(number for share in shares for number in share) == Counter(alone)
    assert all(len(share) > len(alone) / 12 for share in shares)


def test_a_newcomer_begins_beyond_what_the_others_have_begun(
    dataset: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    members = ["a", "b"]
    for member in members:
        sampler(dataset, samplers, member).follow(members)
    done = [number for old in samplers for number in numbers_in(old, 1600)]
    newcomer = sampler(dataset, samplers, "n")
    everyone = ["a", "b", "n"]
    for peer in samplers:
        peer.follow(everyone)
    assert newcomer.positions() == (0,)
    newcomer.advance([max(old.positions()[0] for old in samplers[:2])])
    assert newcomer.positions()[0] > 0
    theirs = set(one_epoch(newcomer))
    assert theirs
    assert not theirs & set(done)
    # From here on the three are disjoint, except for pieces that moved between peers at different places.
    assert len(theirs & set(one_epoch(samplers[0]))) == 0


def test_no_peer_moves_backwards(dataset: StreamedDataset, samplers: list[StreamSampler]) -> None:
    peer = sampler(dataset, samplers)
    numbers_in(peer, 3200)
    before = peer.state()
    peer.advance([0])
    peer.advance([])
    assert peer.state() == before


# ---------------------------------------------------------------------------------------------------- the cursor


@pytest.mark.parametrize("num_batches", [0, 1, 2, 7, 40, 150])
def test_a_cursor_continues_with_the_same_bits(
    dataset: StreamedDataset, samplers: list[StreamSampler], num_batches: int
) -> None:
    """Through epochs, and with other members than at the beginning."""
    first = sampler(dataset, samplers)
    for number in range(num_batches):
        first.next_batch(3)
        if number == num_batches // 2:
            first.follow(["a", "b"])
    saved = json.loads(json.dumps(first.state()))
    again = sampler(dataset, samplers)
    assert again.restore(saved)
    assert again.state() == saved
    assert again.positions() == first.positions()
    for _ in range(60):
        np.testing.assert_array_equal(again.next_batch(3), first.next_batch(3))
    assert again.state() == first.state()


def test_a_cursor_is_exact_at_every_token_of_a_piece_for_any_members(
    dataset: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    """A piece that was begun is finished, and a cursor that was restored can be saved again at once."""
    peer = sampler(dataset, samplers, window=1)
    strangers = [f"stranger {i}" for i in range(200)]
    for _ in range(80):
        saved = peer.state()
        again = sampler(dataset, samplers, window=1)
        again.restore(saved)
        if saved["example"] % (BLOCK_EXAMPLES if dataset.num_units < MANY_UNITS else 10**9):
            again.follow(strangers)  # it is inside a piece
        np.testing.assert_array_equal(again.next_batch(1), peer.next_batch(1))
        assert {**again.state(), "members": ["a"]} == peer.state()
        samplers.pop().close()


def test_a_cursor_of_other_data_or_settings(
    few_units: StreamedDataset, many_units: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    peer = sampler(few_units, samplers)
    peer.next_batch(5)
    saved, fresh = peer.state(), sampler(few_units, samplers).state()
    other = sampler(many_units, samplers)
    assert not other.restore(saved)
    assert other.positions() == (0,)
    for changes in ({"window": 17}, {"run_seed": 6}, {"holdout_fraction": 0.2}, {"peer_id": "b"}):
        with pytest.raises(DataError, match="belongs to another"):
            sampler(few_units, samplers, **changes).restore(saved)
    for damage in ({"example": -1}, {"place": 3}, {"token": "x"}, {"members": None}):
        with pytest.raises(DataError, match="damaged"):
            peer.restore({**saved, **damage})
    assert not peer.restore({"epoch": 0, "position": 3, "identity": 1, "data": 2})  # of token files
    assert peer.state() == fresh


def test_a_newer_set_of_members_applies_from_the_next_piece_on(
    few_units: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    """The piece that has been begun is finished, also after a restart."""
    peer = sampler(few_units, samplers)
    peer.next_batch(8)
    state = peer.state()
    assert state["begun"]
    block = state["example"] // BLOCK_EXAMPLES
    strangers = [f"stranger {i}" for i in range(200)]
    peer.follow(strangers)
    again = sampler(few_units, samplers)
    again.restore(peer.state())
    expected = sampler(few_units, samplers)
    expected.restore(state)
    for sampled in (peer, again):
        sampled_batch, expected_batch = sampled.next_batch(8), None
        expected.restore(state)
        expected_batch = expected.next_batch(8)
        np.testing.assert_array_equal(sampled_batch, expected_batch)
        assert sampled.state()["example"] // BLOCK_EXAMPLES == block


# -------------------------------------------------------------------------------------------------------- reading


def test_formats_and_columns(tmp_path: Path, samplers: list[StreamSampler]) -> None:
    groups = [range(0, 40), range(40, 90)]
    directories = (
        save_jsonl(tmp_path / "plain", groups),
        save_jsonl(tmp_path / "packed", groups, packed=True),
        save_parquet(tmp_path / "table", groups, rows_in_group=100),
    )
    for directory in directories:
        found = opened(directory)
        assert [example.value for unit in range(2) for example in found.read(unit)] == list(map(document, range(90)))
    content = opened(save_records(tmp_path / "content", *({"content": document(i), "n": i} for i in range(5))))
    assert content.column == "content"
    assert [example.value for example in content.read(0)] == list(map(document, range(5)))


def test_reading_can_begin_anywhere(tmp_path: Path) -> None:
    found = opened(save_parquet(tmp_path, [range(7)], rows_in_group=3))
    assert found.num_units == 3  # few files are cut into row groups
    assert [(e.number, e.value) for e in found.read(1, 0, 2)] == [(2, document(5))]
    many = opened(save_parquet(tmp_path / "many", [range(7)] + [range(1)] * 63, rows_in_group=3))
    places = [(e.part, e.number, e.value) for e in many.read(0, 1, 1)]
    assert places == [(1, 1, document(4)), (1, 2, document(5)), (2, 0, document(6))]


def test_the_digest_covers_files_and_column_but_not_the_place(tmp_path: Path) -> None:
    here, copy = (opened(save_jsonl(tmp_path / name, [range(9)])) for name in ("here", "copy"))
    assert here.digest == copy.digest
    others = [save_jsonl(tmp_path / "longer", [range(10)]), save_jsonl(tmp_path / "cut", [range(4), range(4, 9)])]
    content = save_records(tmp_path / "content", *({"content": document(i)} for i in range(9)))
    assert len({here.digest, *(opened(other).digest for other in (*others, content))}) == 4


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    cases = {
        "no-column": (save_records(tmp_path / "no-column", {"body": "x"}), "has the columns body"),
        "empty": (tmp_path / "empty", "holds no file with a known suffix"),
        "pickle": (tmp_path / "pickle", r"holds no files that can be streamed \(1 \.pkl\)"),
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "data.pkl").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    for directory, message in cases.values():
        with pytest.raises(DataError, match=message) as error:
            opened(directory)
        assert "\n" not in str(error.value)
    name = parse_hf(f"hf:{save_jsonl(tmp_path / 'good', [range(3)])}:other")
    assert name is not None
    with pytest.raises(DataError, match="'other'"):
        StreamedDataset(name)
    name = parse_hf(f"hf:{tmp_path / 'good'}")
    assert name is not None
    with pytest.raises(DataError, match=r"no split 'test' \(splits: train\)"):
        StreamedDataset(name, "test")


def test_unusable_examples_are_counted(tmp_path: Path, samplers: list[StreamSampler]) -> None:
    records = [{"text": text} for text in ("a" * 30, "", None, "  ", "b" * 30)]
    said: list[str] = []
    found = opened(save_records(tmp_path, *records))
    peer = sampler(found, samplers, holdout_fraction=0.0, tell=said.append, window=31)
    assert sorted(decoded(peer.next_batch(1))[0] for _ in range(2)) == ["a", "b"]
    for _ in range(10):
        peer.next_batch(2)
    assert said[0].endswith("examples skipped so far: 1 empty")
    assert "empty" in said[1]
    assert "missing_field" in said[1]


def test_without_a_usable_example_it_says_so(tmp_path: Path, samplers: list[StreamSampler]) -> None:
    peer = sampler(opened(save_records(tmp_path, {"text": " "}, {"text": ""})), samplers, holdout_fraction=0.0)
    with pytest.raises(DataError, match="has no usable example"):
        peer.next_batch(1)
    with pytest.raises(DataError, match="nothing is held out"):
        list(peer.evaluation_batches(1, 1))
    few = sampler(opened(save_jsonl(tmp_path / "few", [range(4)])), samplers, holdout_fraction=0.01)
    with pytest.raises(
        DataError, match=r"fewer tokens than one sequence \(16\): raise run.evaluation.holdout_fraction"
    ):
        list(few.evaluation_batches(1, 1))


def test_conversations_have_a_loss_on_answers_only(tmp_path: Path, samplers: list[StreamSampler]) -> None:
    tokenizer = load_tokenizer(save_chat_tokenizer(tmp_path / "tokenizer"))
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "the sky"}]
    forged = [{"role": "user<|im_end|>", "content": "what?"}, messages[1]]
    # In a table each message has the fields of all others.
    found = opened(
        save_records(
            tmp_path / "chats",
            {"text": "not this", "messages": messages},
            {"text": None, "messages": [{**messages[0], "name": "x"}, messages[1]]},
            {"text": None, "messages": forged},
        )
    )
    said: list[str] = []
    prepare = Preparing(tokenizer, is_chat=found.is_chat, name="chats", say=said.append)
    arrays = [prepare(example.value) for example in found.read(0)]
    assert arrays[0] is not None
    assert arrays[1] is not None
    np.testing.assert_array_equal(arrays[0], arrays[1])
    assert arrays[2] is None
    assert said == ["chats: examples skipped so far: 1 special_token"]
    targets = [token for token in arrays[0].tolist() if token >= 0]
    assert tokenizer.decode(targets) == "the sky<|im_end|>\n"
    everything = [token if token >= 0 else -1 - token for token in arrays[0].tolist()]
    assert "not this" not in tokenizer.decode(everything)
    peer = StreamSampler(
        found, prepare, sequence_length=8, run_seed=0, peer_id="a", holdout_fraction=0.0, timeout_s=60.0
    )
    samplers.append(peer)
    batch = peer.next_batch(20)
    assert (batch < 0).any()
    assert (batch >= 0).any()


# ------------------------------------------------------------------------------------------------------- failures


class Failing(StreamedUnits):
    """Units whose reads fail after a number of examples, a number of times."""

    def __init__(self, units: StreamedDataset, error: Exception, after: int, times: int) -> None:
        self.units, self.error, self.after, self.times = units, error, after, times
        self.name, self.num_units, self.digest = units.name, units.num_units, units.digest
        self.starts: list[tuple[int, int]] = []  # unit and number

    def read(self, unit: int, part: int = 0, number: int = 0) -> Iterator[Example]:
        self.starts.append((unit, number))
        for example in self.units.read(unit, part, number):
            if example.number == self.after and self.times > 0:
                self.times -= 1
                raise self.error
            yield example


def test_reading_resumes_after_a_failure_where_it_stopped(
    few_units: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    failing = Failing(few_units, ConnectionError("reset by peer"), after=11, times=2)
    peer, intact = sampler(failing, samplers), sampler(few_units, samplers)
    for _ in range(40):
        np.testing.assert_array_equal(peer.next_batch(3), intact.next_batch(3))
    assert failing.times == 0
    assert sum(number == 11 for _, number in failing.starts) == 2


def test_a_failure_that_lasts_ends_in_one_line_and_loses_nothing(
    few_units: StreamedDataset, samplers: list[StreamSampler]
) -> None:
    failing = Failing(few_units, TimeoutError("no route"), after=20, times=10**9)
    peer = sampler(failing, samplers, timeout_s=0.3)
    with pytest.raises(DataError, match=r"could not be read for 0 seconds \(no route\): the same command resumes"):
        numbers_in(peer, 100_000)
    lost = peer.state()
    assert lost["example"] > 0
    failing.times = 0
    resumed, intact = peer.next_batch(4), sampler(few_units, samplers)
    intact.restore(lost)
    np.testing.assert_array_equal(resumed, intact.next_batch(4))


def test_a_peer_that_leaves_does_not_wait(few_units: StreamedDataset, samplers: list[StreamSampler]) -> None:
    stop = threading.Event()
    failing = Failing(few_units, ConnectionError("down"), after=0, times=10**9)
    peer = sampler(failing, samplers, stop=stop)
    stop.set()
    with pytest.raises(DataStoppedError):
        peer.next_batch(1)


def test_what_can_be_refused_before_anything_slow_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_jsonl(tmp_path / "set", [range(3)])
    for source in (f"hf:{tmp_path / 'set'}", "hf:user/name@main", f"0.5*hf:{tmp_path / 'set'} + 0.5*stdlib"):
        check_source(source)
    with pytest.raises(DataError, match=r"directory \./missing does not exist"):
        check_source("0.5*hf:./missing + 0.5*stdlib")
    with pytest.raises(DataError, match="data source 'missing' does not exist"):
        check_source("0.5*hf:user/name + 0.5*missing")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"^hf:user/name needs the package datasets: pip install 'spes-swarm\[hf\]'$"):
        check_source("hf:user/name")
