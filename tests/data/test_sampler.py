"""Sampling: every window once an epoch, an exact cursor, and nothing held out is ever trained on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spes_swarm.base.errors import DataError
from spes_swarm.data.partition import MAX_POSITION, Permutation
from spes_swarm.data.sampler import Sampler, Split, TokenStream
from spes_swarm.data.token_file import TokenFile
from spes_swarm.data.tokenizer import train_bpe
from tests.helpers.token_files import Vocabulary, token_writer

FRACTIONS = st.sampled_from([0.0, 0.001, 0.01, 0.02, 0.1, 0.3, 0.5])


# So large that every token of a test can be its own position.
COUNTING = Vocabulary(1 << 20)


def counting_stream(directory: Path, *lengths: int) -> TokenStream:
    """Files whose tokens are their positions in the stream."""
    paths, start = [], 0
    for number, length in enumerate(lengths):
        paths.append(directory / f"{number}.npy")
        with token_writer(paths[-1], COUNTING) as writer:
            writer.append(np.arange(start, start + length), 1)
        start += length
    return TokenStream([TokenFile.open(path, COUNTING) for path in paths])


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    return counting_stream(tmp_path_factory.mktemp("stream"), 501, 7, 3, 1200, 800)


def sampler(stream: TokenStream, peer_seed: int = 1, *, run_seed: int = 0, fraction: float = 0.1) -> Sampler:
    return Sampler(stream, sequence_length=8, run_seed=run_seed, peer_seed=peer_seed, holdout_fraction=fraction)


@pytest.mark.slow
@given(size=st.integers(1, 3000), key=st.binary(max_size=8))
def test_a_permutation_is_a_bijection(size: int, key: bytes) -> None:
    values = Permutation(size, key)(np.arange(size))
    assert sorted(values.tolist()) == list(range(size))


@pytest.mark.slow
@given(size=st.integers(1, 1 << 62), key=st.binary(max_size=8), data=st.data())
def test_a_huge_permutation_stays_inside_and_apart(size: int, key: bytes, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=50, unique=True))
    values = Permutation(size, key)(np.array(positions))
    assert all(0 <= value < size for value in values.tolist())
    assert len(set(values.tolist())) == len(positions)


def test_a_permutation_is_the_same_for_ever() -> None:
    # A cursor that was saved last year must mean the same windows today.
    assert Permutation(10, b"key")(np.arange(10)).tolist() == PERMUTATION_OF_TEN
    assert Permutation(10**12, b"key")(np.arange(3)).tolist() == PERMUTATION_OF_MANY


PERMUTATION_OF_TEN = [5, 6, 8, 9, 4, 0, 2, 3, 1, 7]  # computed with plain Python integers
PERMUTATION_OF_MANY = [178853288925, 212979036882, 507277986689]


def test_a_permutation_shuffles() -> None:
    values = Permutation(10_000, b"x")(np.arange(10_000))
    assert abs(np.corrcoef(values, np.arange(10_000))[0, 1]) < 0.05
    firsts = Counter(int(Permutation(7, bytes([k]))(np.array([0]))[0]) for k in range(250))
    assert set(firsts) == set(range(7))


@pytest.mark.slow
@given(num_tokens=st.integers(1, 60_000), window=st.integers(1, 64), fraction=FRACTIONS, data=st.data())
def test_the_split_never_leaks(num_tokens: int, window: int, fraction: float, data: st.DataObject) -> None:
    try:
        split = Split.plan(num_tokens, window, fraction)
    except DataError:
        assert num_tokens < (2 if fraction else 1) * window
        return
    offset = data.draw(st.integers(0, window - 1))
    use = np.zeros(num_tokens, dtype=np.int64)
    for index in range(split.num_held_out):
        start = split.held_out_start(index)
        assert start + window <= num_tokens
        use[start : start + window] += 1
    for index in range(split.num_training()):
        start = split.training_start(index, offset)
        assert 0 <= start <= num_tokens - window
        use[start : start + window] += 1
    assert use.max() <= 1  # no window overlaps another, of either kind
    held_out = split.num_held_out / (num_tokens // window)
    if fraction == 0:
        assert held_out == 0
    else:
        assert split.num_held_out >= 1
        assert split.num_training() >= 1
    if num_tokens // window > 1000:
        assert held_out == pytest.approx(fraction, rel=0.3, abs=1e-3)
        assert use.mean() > 0.93


@pytest.mark.parametrize("fraction", [-0.1, 0.6, float("nan")])
def test_impossible_fractions(fraction: float) -> None:
    with pytest.raises(DataError, match=r"between 0 and 0\.5"):
        Split.plan(1000, 10, fraction)


def test_batches_are_windows_of_the_stream(stream: TokenStream) -> None:
    batch = sampler(stream).next_batch(500)
    assert batch.dtype == np.int64
    assert batch.shape == (500, 8)
    assert (np.diff(batch, axis=1) == 1).all()  # tokens are positions


def test_an_epoch_shows_every_window_once_and_the_next_another_order(stream: TokenStream) -> None:
    one = sampler(stream)
    size = one.split.num_training()
    first, second = one.next_batch(size)[:, 0].tolist(), one.next_batch(size)[:, 0].tolist()
    assert len(set(first)) == len(set(second)) == size
    assert first != second
    assert one.state()["epoch"] == 1


def test_no_epoch_of_any_peer_touches_what_is_held_out(stream: TokenStream) -> None:
    evaluated = {int(t) for batch in sampler(stream).evaluation_batches(10**6, 4) for t in batch.ravel()}
    trained: set[int] = set()
    for peer in range(4):
        trained |= {int(t) for t in sampler(stream, peer).next_batch(1500).ravel()}
    assert not evaluated & trained
    assert len(evaluated) + len(trained) > 0.98 * stream.num_tokens  # offsets reach what one epoch leaves out


def test_peers_and_runs_differ_and_are_reproducible(stream: TokenStream) -> None:
    same = [sampler(stream).next_batch(50).tolist() for _ in range(2)]
    assert same[0] == same[1]
    assert sampler(stream, 2).next_batch(50).tolist() != same[0]
    assert sampler(stream, run_seed=5).next_batch(50).tolist() != same[0]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(st.integers(1, 400), max_size=5), after=st.integers(1, 700))
def test_a_cursor_resumes_exactly(stream: TokenStream, before: list[int], after: int) -> None:
    original = sampler(stream)
    for batch_size in before:
        original.next_batch(batch_size)
    state = json.loads(json.dumps(original.state()))
    resumed = sampler(stream)
    resumed.restore(state)
    assert resumed.state() == state
    assert resumed.next_batch(after).tolist() == original.next_batch(after).tolist()
    assert resumed.state() == original.state()


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=12))
def test_the_batch_size_does_not_change_the_order(stream: TokenStream, sizes: list[int]) -> None:
    one = sampler(stream)
    batches = np.concatenate([one.next_batch(size) for size in sizes])
    assert batches.tolist() == sampler(stream).next_batch(sum(sizes)).tolist()


def test_a_foreign_or_damaged_cursor_is_refused(stream: TokenStream) -> None:
    one = sampler(stream)
    one.next_batch(3)
    state = one.state()
    for other in (sampler(stream, 2), sampler(stream, run_seed=1), sampler(stream, fraction=0.2)):
        with pytest.raises(DataError, match="belongs to another --seed, sequence length"):
            other.restore(state)
    for change in ({"position": 10**9}, {"position": -1}, {"epoch": -1}):
        with pytest.raises(DataError, match="damaged"):
            one.restore({**state, **change})
    with pytest.raises(DataError):
        one.restore({})
    assert one.state() == state
    assert all(0 <= value < 1 << 63 for value in state.values())


def test_evaluation_is_the_same_for_all_peers(stream: TokenStream) -> None:
    def evaluation(peer: int) -> list[list[list[int]]]:
        one = sampler(stream, peer)
        one.next_batch(17 * peer + 1)
        return [batch.tolist() for batch in one.evaluation_batches(10, 4)]

    assert evaluation(1) == evaluation(2)
    assert [len(batch) for batch in evaluation(1)] == [4, 4, 2]
    one = sampler(stream)
    everything = np.concatenate(list(one.evaluation_batches(10**6, 7)))
    assert len(everything) == one.split.num_held_out
    assert (np.diff(everything, axis=1) == 1).all()


def test_evaluation_is_a_sample_spread_over_all_that_is_held_out(tmp_path: Path) -> None:
    """One window of each equal part, and no regular grid: text has rhythms of its own."""
    stream = counting_stream(tmp_path, 8000)

    def chosen(run_seed: int) -> list[int]:
        one = sampler(stream, run_seed=run_seed, fraction=0.25)
        place = {one.split.held_out_start(index): index for index in range(one.split.num_held_out)}
        return [place[int(window[0])] for batch in one.evaluation_batches(20, 7) for window in batch]

    num_held_out = sampler(stream, fraction=0.25).split.num_held_out
    assert num_held_out > 200
    for part, index in enumerate(chosen(0)):
        assert part * num_held_out // 20 <= index < (part + 1) * num_held_out // 20
    assert len(set(np.diff(chosen(0)).tolist())) > 3
    assert chosen(0) == chosen(0) != chosen(1)


def test_nothing_held_out_cannot_be_evaluated(stream: TokenStream) -> None:
    with pytest.raises(DataError, match="nothing is held out"):
        next(sampler(stream, fraction=0.0).evaluation_batches(1, 1))


LENGTHS = (501, 7, 3, 1200, 12, 800)


@pytest.mark.slow
@given(chosen=st.sets(st.integers(0, len(LENGTHS) - 1), min_size=1), fraction=FRACTIONS)
def test_what_is_held_out_of_a_shard_does_not_depend_on_the_others(
    shards: list[TokenFile], chosen: set[int], fraction: float
) -> None:
    """A peer with some shards of a corpus must neither train on what the others evaluate, nor the other way round."""
    try:
        some = sampler(TokenStream([shards[i] for i in sorted(chosen)]), 2, fraction=fraction)
    except DataError:
        assert max(LENGTHS[i] for i in chosen) < 16
        return
    everything = sampler(TokenStream(shards), fraction=fraction)
    held_out = [
        {int(t) for batch in one.evaluation_batches(10**6, 64) for t in batch.ravel()} if fraction else set()
        for one in (everything, some)
    ]
    assert held_out[1] <= held_out[0]
    for one in (everything, some):
        trained = {int(t) for t in one.next_batch(one.split.num_training() + 5).ravel()}
        assert not trained & held_out[0]
        # Windows stay inside their files.
        ends = np.cumsum(LENGTHS)
        batch = one.next_batch(one.split.num_training())
        assert (np.searchsorted(ends, batch[:, 0], "right") == np.searchsorted(ends, batch[:, -1], "right")).all()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[TokenFile]:
    return list(counting_stream(tmp_path_factory.mktemp("shards"), *LENGTHS).files)


def test_other_tokens_begin_a_new_walk(tmp_path: Path, stream: TokenStream) -> None:
    before = sampler(stream)
    before.next_batch(3)
    state = json.loads(json.dumps(before.state()))
    now = sampler(counting_stream(tmp_path, 501, 1200))
    now.next_batch(1)
    assert now.restore(state) is False
    assert (now.epoch, now.position) == (0, 0)
    assert before.restore(state) is True
    # A cursor of a version that did not tell the two apart.
    with pytest.raises(DataError, match="or other data"):
        now.restore({key: value for key, value in state.items() if key != "data"})


def test_a_cursor_of_one_file_is_still_that_of_earlier_versions(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, 400)
    plan = "Split(num_tokens=400, window=8, span=9, held_out=1, num_periods=5)"
    text = f"{stream.digest} {plan} 0 1"
    assert sampler(stream).state()["identity"] == int.from_bytes(blake3(text.encode()).digest()[:8], "little") >> 1


def test_too_little_data(tmp_path: Path) -> None:
    stream = counting_stream(tmp_path, 4, 3)
    for fraction in (0.0, 0.1):
        with pytest.raises(DataError, match="7 tokens, less than"):
            sampler(stream, fraction=fraction)


def test_two_windows_are_enough(tmp_path: Path) -> None:
    one = sampler(counting_stream(tmp_path, 16))
    assert one.next_batch(3).tolist() == [list(range(8))] * 3
    assert [batch.tolist() for batch in one.evaluation_batches(5, 5)] == [[list(range(8, 16))]]


def test_a_corrupt_id_is_found_and_the_cursor_stays(tmp_path: Path) -> None:
    path = tmp_path / "0.npy"
    counting_stream(tmp_path, 400)
    content = bytearray(path.read_bytes())
    content[128:] = b"\xff" * (len(content) - 128)
    path.write_bytes(content)
    one = sampler(TokenStream([TokenFile.open(path)]))
    state = one.state()
    with pytest.raises(DataError, match=r"0\.npy is corrupt: token id 4294967295"):
        one.next_batch(4)
    assert one.state() == state


def test_files_must_share_a_tokenizer(tmp_path: Path) -> None:
    counting_stream(tmp_path, 400)
    with token_writer(tmp_path / "other.npy", train_bpe([], 257)) as writer:
        writer.append(np.arange(100), 1)
    with pytest.raises(DataError, match="one run needs one tokenizer"):
        TokenStream([TokenFile.open(tmp_path / "0.npy"), TokenFile.open(tmp_path / "other.npy")])
    with pytest.raises(DataError, match="no token files"):
        TokenStream([])


def divided(stream: TokenStream, me: str, members: str = "abc") -> Sampler:
    one = Sampler(stream, sequence_length=8, run_seed=0, peer_seed=1, holdout_fraction=0.1, divided_as=me)
    one.follow(members)
    return one


def windows_of_epoch(one: Sampler, epoch: int = 0) -> list[int]:
    """First tokens of the windows that a peer takes in an epoch, which is at or after its current one."""
    taken: list[int] = []
    while True:
        window = one.next_batch(1)[0]
        if one.epoch > epoch:
            return taken
        if one.epoch == epoch:
            taken.append(int(window[0]))


@pytest.fixture(scope="module")
def long_stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    """An epoch of 4,500 windows: a block has four, and the last block fewer."""
    return counting_stream(tmp_path_factory.mktemp("long"), 41_003)


def test_peers_that_divide_the_data_train_on_every_window_once(long_stream: TokenStream) -> None:
    taken = [windows_of_epoch(divided(long_stream, me)) for me in "abc"]
    counts = Counter(start for windows in taken for start in windows)
    assert set(counts.values()) == {1}
    assert len(counts) == divided(long_stream, "a").split.num_training()
    assert max(map(len, taken)) < 1.2 * min(map(len, taken))
    # The next epoch is another order, divided in another way.
    one = divided(long_stream, "a")
    assert set(windows_of_epoch(one, 1)) != set(taken[0])


def test_a_peer_alone_takes_all_and_a_small_corpus_is_enough_for_many(
    long_stream: TokenStream, stream: TokenStream
) -> None:
    alone = divided(long_stream, "a", "")
    assert len(windows_of_epoch(alone)) == alone.split.num_training()
    many = [f"{number}" for number in range(400)]  # more than windows
    for me in many[:2]:
        one = Sampler(stream, sequence_length=8, run_seed=0, peer_seed=1, holdout_fraction=0.1, divided_as=me)
        one.follow(many)
        assert one.next_batch(1).shape == (1, 8)


def test_a_member_that_leaves_passes_its_windows_on_and_a_begun_block_stays(long_stream: TokenStream) -> None:
    """Only windows between the places of the peers may be taken twice or left out."""
    peers = [divided(long_stream, me) for me in "abc"]
    taken: Counter[int] = Counter()
    for one in peers:
        while one.position < 2000 or one.position % 4 != 1:  # in a block that it has begun
            taken[int(one.next_batch(1)[0, 0])] += 1
    places = [one.position for one in peers]
    for one, me in zip(peers[:2], "ab", strict=True):
        one.follow("ab")
        begun = set(one.next_batch(3)[:, 0].tolist())
        assert begun == set(windows_of_epoch(divided(long_stream, me, ""))[one.position - 3 : one.position])
        taken.update(begun)
        taken.update(windows_of_epoch(one))
    whole = windows_of_epoch(divided(long_stream, "x", ""))
    assert {taken[window] for window in whole[: min(places) - 1] + whole[max(places) + 3 :]} == {1}


@pytest.mark.parametrize("before", [1, 30, 5000])
def test_a_cursor_of_divided_data_resumes_exactly(long_stream: TokenStream, before: int) -> None:
    original = divided(long_stream, "a")
    original.next_batch(before)
    state = json.loads(json.dumps(original.state()))
    resumed = divided(long_stream, "a", "")
    assert resumed.restore(state)
    assert resumed.state() == original.state()
    assert resumed.next_batch(700).tolist() == original.next_batch(700).tolist()
    with pytest.raises(DataError, match="another --seed"):
        divided(long_stream, "b").restore(state)


def test_a_newcomer_begins_where_the_furthest_has_not_been(long_stream: TokenStream) -> None:
    members = [divided(long_stream, me, "ab") for me in "ab"]
    seen = {int(start) for one in members for start in one.next_batch(600)[:, 0]}
    furthest = max(one.positions()[0] for one in members)
    newcomer = divided(long_stream, "c")
    newcomer.advance((furthest,))
    newcomer.advance((furthest - 1,))  # never back
    assert newcomer.positions() == (furthest,)
    assert not seen & set(windows_of_epoch(newcomer))
    newcomer.advance((3 * newcomer._num_blocks,))
    assert (newcomer.epoch, newcomer.position) == (3, 0)


def test_an_order_of_its_own_ignores_the_members(stream: TokenStream) -> None:
    one, other = sampler(stream), sampler(stream)
    one.follow("ab")
    one.advance((7,))
    assert one.positions() == ()
    assert one.next_batch(40).tolist() == other.next_batch(40).tolist()


def test_a_claim_of_the_largest_position_keeps_positions_publishable(long_stream: TokenStream) -> None:
    newcomer = divided(long_stream, "c")
    newcomer.advance((MAX_POSITION,))
    newcomer.next_batch(200)
    assert newcomer.positions() == (MAX_POSITION,)


def test_a_cursor_of_an_own_order_starts_the_divided_one(long_stream: TokenStream) -> None:
    own = Sampler(long_stream, sequence_length=8, run_seed=0, peer_seed=1, holdout_fraction=0.1)
    own.next_batch(3)
    now = divided(long_stream, "a")
    now.next_batch(5)
    assert now.restore(own.state()) is False
    assert (now.epoch, now.position) == (0, 0)
