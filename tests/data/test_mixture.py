"""Mixtures: shares by weight, each source in its own order, an exact cursor, and evaluation in proportion."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import DataError
from spes_swarm.data.mixture import Mixture, shares
from spes_swarm.data.sampler import Sampler, TokenStream
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.streaming.stream_sampler import StreamSampler
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import ByteTokenizer
from tests.helpers.streamed_data import opened, save_jsonl
from tests.helpers.token_files import token_writer

BYTES = ByteTokenizer()
WINDOW = 16


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[list[Sampler | StreamSampler]]:
    """Token files whose tokens are all 1, and all 2, and a data set that streams."""
    made: list[Sampler | StreamSampler] = []
    for value, length in ((1, 800), (2, 160)):
        path = tmp_path / f"{value}.npy"
        with token_writer(path, BYTES) as writer:
            writer.append(np.full(length, value), 1)
        stream = TokenStream([TokenFile.open(path, BYTES)])
        made.append(Sampler(stream, sequence_length=WINDOW, run_seed=0, peer_seed=3, holdout_fraction=0.2))
    units = opened(save_jsonl(tmp_path / "set", [range(200)]))
    prepare = Preparing(BYTES, is_chat=False, name="set", say=print)
    made.append(StreamSampler(units, prepare, sequence_length=WINDOW, run_seed=0, peer_id="a", holdout_fraction=0.2))
    yield made
    made[2].close()


def mixture(sources: Sequence[Sampler | StreamSampler], *weights: float, peer_seed: int = 3) -> Mixture:
    return Mixture(sources, weights, run_seed=0, peer_seed=peer_seed)


def kinds(batch: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> list[int]:
    """The source of each window: 1, 2, or 3 for the data set."""
    return [int(row[0]) if row[0] in (1, 2) else 3 for row in batch]


def test_windows_are_drawn_by_weight(sources: list[Sampler | StreamSampler]) -> None:
    drawn = kinds(mixture(sources, 0.2, 0.3, 0.5).next_batch(2000))
    for source, weight in ((1, 0.2), (2, 0.3), (3, 0.5)):
        deviation = (2000 * weight * (1 - weight)) ** 0.5
        assert abs(drawn.count(source) - 2000 * weight) < 4 * deviation
    assert drawn != kinds(mixture(sources, 0.2, 0.3, 0.5, peer_seed=4).next_batch(2000))


def test_each_source_keeps_its_own_order(sources: list[Sampler | StreamSampler], tmp_path: Path) -> None:
    mixed = mixture(sources, 0.2, 0.3, 0.5)
    batch = np.concatenate([mixed.next_batch(3) for _ in range(40)])
    of_set = batch[[kind == 3 for kind in kinds(batch)]]
    alone = sources[2]
    alone.restore({**alone.state(), "epoch": 0, "place": 0, "example": 0, "token": 0, "begun": 0})
    np.testing.assert_array_equal(of_set, alone.next_batch(len(of_set)))


@pytest.mark.parametrize("num_batches", [0, 1, 13])
def test_a_cursor_continues_with_the_same_bits(sources: list[Sampler | StreamSampler], num_batches: int) -> None:
    mixed = mixture(sources, 0.2, 0.3, 0.5)
    for _ in range(num_batches):
        mixed.next_batch(5)
    saved = json.loads(json.dumps(mixed.state()))
    expected = [mixed.next_batch(5) for _ in range(20)]
    for batch in expected[:3]:
        assert len(set(kinds(batch))) > 1
    again = mixture(sources, 0.2, 0.3, 0.5)
    assert again.restore(saved)
    for batch in expected:
        np.testing.assert_array_equal(again.next_batch(5), batch)


def test_a_cursor_of_another_source_or_settings(sources: list[Sampler | StreamSampler]) -> None:
    mixed = mixture(sources, 0.2, 0.3, 0.5)
    saved, single = mixed.state(), sources[0].state()
    with pytest.raises(DataError, match="other weights"):
        mixture(sources, 0.3, 0.2, 0.5).restore(saved)
    with pytest.raises(DataError, match="damaged"):
        mixed.restore({**saved, "draws": -1})
    assert not mixed.restore(single)  # saved with a single source
    assert not sources[0].restore(saved)
    assert not sources[2].restore(saved)
    assert not mixture(sources[:2], 0.5, 0.5).restore(saved)


def test_a_source_that_fails_moves_no_cursor(
    sources: list[Sampler | StreamSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = mixture(sources, 0.2, 0.3, 0.5)
    mixed.next_batch(7)
    saved = mixed.state()

    def fail(batch_size: int) -> None:
        raise DataError("unplugged")

    with monkeypatch.context() as patch:
        patch.setattr(sources[2], "next_batch", fail)
        with pytest.raises(DataError, match="unplugged"):
            mixed.next_batch(20)
    assert mixed.state() == saved


def test_evaluation_has_every_source_in_proportion(sources: list[Sampler | StreamSampler]) -> None:
    mixed = mixture(sources, 0.25, 0.05, 0.7)
    batches = list(mixed.evaluation_batches(20, 8))
    counts = Counter(kind for batch in batches for kind in kinds(batch))
    assert counts == {1: 5, 2: 1, 3: 14}


def test_members_and_positions_reach_the_data_sets(sources: list[Sampler | StreamSampler]) -> None:
    mixed = mixture(sources, 0.2, 0.3, 0.5)
    assert mixed.positions() == (0,)
    mixed.follow(["a", "b"])
    assert sources[2].state()["members"] == ["a", "b"]
    mixed.advance([5])
    assert mixed.positions() == (5,)
    mixed.advance([])
    assert mixed.positions() == (5,)


@given(
    weights=st.lists(st.floats(0.001, 1), min_size=2, max_size=6).map(lambda w: [x / sum(w) for x in w]),
    total=st.integers(1, 500),
)
def test_shares_are_within_one_of_the_weights(weights: list[float], total: int) -> None:
    found = shares(total, weights)
    assert min(found) >= 1
    assert all(abs(count - total * weight) <= 1 or count == 1 for count, weight in zip(found, weights, strict=True))
    assert total <= sum(found) <= total + len(weights)
