"""Which tokens a peer trains on next: a resumable walk through token files.

All files of a peer form one stream of N tokens. Each file is cut into *windows* of S tokens; the loss shifts inside a
window, so a window gives S - 1 predictions. A file is divided into equal periods; the last windows of each period are
held out for evaluation, and the rest, a *span*, is for training:

    | span: T windows          | held out: R | span                     | held out: R | ... | rest: training |

Each training window lies inside one span, so it never contains a held-out token, and the held-out part is spread
evenly over all sources. What is held out of a file depends on that file alone: a peer that has only some shards of a
corpus never trains on what others evaluate. In each epoch, all windows are shifted by a new offset below S (long spans
only: it costs each span one window), and their order is a new pseudo-random permutation.

Peers with the same files *divide* them: all walk through the order of the run, in which each block of windows belongs
to one member (data/partition.py), and skip the blocks of others. So no window is trained on twice in an epoch while the
members stay the same; streaming/pieces.py has the limits when they change. Other peers walk through an order of their
own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError
from spes_swarm.data.batch_source import BatchSource, Cursor, short_digest
from spes_swarm.data.corpus_index import corpus_digest
from spes_swarm.data.partition import MAX_POSITION, Permutation, owner_of
from spes_swarm.data.token_file import TokenFile

_MAX_HELD_OUT_RUN = 64  # windows; longer runs sample fewer places, shorter ones lose more windows to offsets
_MIN_SPAN_FOR_OFFSET = 16  # windows; an offset costs a span one of them
# Windows in a block of the order that peers divide. Fewer cost more hashes; more make the shares of a small corpus
# uneven, so an epoch has at least _MIN_BLOCKS, given enough windows.
_BLOCK_WINDOWS = 32
_MIN_BLOCKS = 1024


class TokenStream:
    """One or more token files, read as if they were one array; their order is part of its identity.

    Raises:
        DataError: no file, or files of different tokenizers.
    """

    def __init__(self, files: Sequence[TokenFile]) -> None:
        if not files:
            raise DataError("no token files were given; name a .npy file, a directory of them, or a corpus")
        first = files[0].sidecar
        for file in files[1:]:
            if file.sidecar.tokenizer_digest != first.tokenizer_digest:
                raise DataError(
                    f"{file.path} was made with the tokenizer {file.sidecar.tokenizer!r}, {files[0].path} with "
                    f"{first.tokenizer!r}: one run needs one tokenizer; tokenise one of them again"
                )
        self.files = tuple(files)
        self.vocab_size = first.vocab_size
        self._starts = [0]
        for file in files:
            self._starts.append(self._starts[-1] + len(file.tokens))

    @property
    def num_tokens(self) -> int:
        """Length N of the stream."""
        return self._starts[-1]

    @property
    def digest(self) -> str:
        """Hex BLAKE3 over the files' content digests, in order: equal if the tokens are, wherever they are stored."""
        shards = [(file.sidecar.blake3, len(file.tokens)) for file in self.files]
        return corpus_digest(self.files[0].sidecar.tokenizer_digest, shards)

    def read(self, start: int, out_S: NDArray[np.int64]) -> None:
        """Copies the S tokens from `start` on into `out_S`, across files if needed; negative: `~id`, no target.

        Raises:
            DataError: an id is not below the vocabulary size: the file is corrupt.
        """
        assert 0 <= start <= self.num_tokens - len(out_S)
        filled = 0
        index = bisect_right(self._starts, start) - 1
        while filled < len(out_S):
            file = self.files[index]
            local = start + filled - self._starts[index]
            piece = file.tokens[local : local + len(out_S) - filled]
            file.check_range(piece)
            out_S[filled : filled + len(piece)] = piece
            filled += len(piece)
            index += 1


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a file's windows into training and evaluation; depends only on the arguments of `plan`."""

    num_tokens: int
    window: int  # S, tokens
    span: int  # T, training windows in a period
    held_out: int  # R, held-out windows in a period
    num_periods: int

    @classmethod
    def plan(cls, num_tokens: int, window: int, holdout_fraction: float) -> Split:
        """Chooses the period: about `holdout_fraction` of the windows is held out, at least one unless it is 0.

        Raises:
            DataError: fewer tokens than one window, or than two if any are held out; or an invalid fraction.
        """
        assert window >= 1
        if not 0 <= holdout_fraction <= 0.5:
            raise DataError(f"the held-out fraction is {holdout_fraction}; it must lie between 0 and 0.5")
        num_windows = num_tokens // window
        if num_windows < (2 if holdout_fraction else 1):
            needed = f"two windows of {window} tokens (one is held out)" if holdout_fraction else f"one of {window}"
            raise DataError(
                f"the data has {num_tokens} tokens, less than {needed}: use more data or a shorter sequence length"
            )
        if holdout_fraction == 0:
            return cls(num_tokens, window, 0, 0, 0)
        per_period = min(max(2, round(1 / holdout_fraction)), num_windows)
        # At least four periods if possible, so that a small corpus is not evaluated on a single passage.
        run = min(max(1, num_windows // (4 * per_period)), _MAX_HELD_OUT_RUN)
        return cls(num_tokens, window, (per_period - 1) * run, run, num_windows // (per_period * run))

    @property
    def period(self) -> int:
        """Windows in a period."""
        return self.span + self.held_out

    @property
    def num_held_out(self) -> int:
        """Number of held-out windows."""
        return self.num_periods * self.held_out

    def held_out_start(self, index: int) -> int:
        """First token of a held-out window."""
        period, inside = divmod(index, self.held_out)
        return (period * self.period + self.span + inside) * self.window

    def num_training(self) -> int:
        """Windows in an epoch, the same for every offset."""
        return self.num_periods * _laid(self.span) + _laid(self._rest)

    def training_start(self, index: int, offset: int) -> int:
        """First token of a training window in an epoch whose windows start at `offset`, 0 <= offset < S."""
        in_periods = self.num_periods * _laid(self.span)
        if index < in_periods:
            period, inside = divmod(index, _laid(self.span))
            length = self.span
        else:
            period, inside = self.num_periods, index - in_periods
            length = self._rest
        shift = offset if length >= _MIN_SPAN_FOR_OFFSET else 0
        return (period * self.period + inside) * self.window + shift

    @property
    def _rest(self) -> int:
        """Training windows after the last whole period."""
        return self.num_tokens // self.window - self.num_periods * self.period


@dataclass(frozen=True, slots=True)
class StreamSplit:
    """The splits of a stream's files, addressed as one."""

    starts: tuple[int, ...]  # first token of each file that has a window
    splits: tuple[Split, ...]  # of the same files
    trained: tuple[int, ...]  # cumulative number of their training windows, from 0
    held_out: tuple[int, ...]  # cumulative number of their held-out windows, from 0

    @classmethod
    def plan(cls, lengths: Sequence[int], window: int, holdout_fraction: float) -> StreamSplit:
        """Splits files of the given lengths. A file of one window is for training only; a shorter one is unused.

        Raises:
            DataError: no file has a window, or none has two although some are to be held out.
        """
        if len(lengths) == 1:
            return cls._of((0,), (Split.plan(lengths[0], window, holdout_fraction),))
        starts, splits, start = [], [], 0
        for length in lengths:
            if length >= window:
                starts.append(start)
                splits.append(Split.plan(length, window, holdout_fraction if length >= 2 * window else 0))
            start += length
        planned = cls._of(tuple(starts), tuple(splits))
        if not splits or (holdout_fraction and not planned.num_held_out):
            needed = f"two windows of {window} tokens (one is held out)" if holdout_fraction else f"one of {window}"
            raise DataError(
                f"the data has {start} tokens, less than {needed} in any of {len(lengths)} files: use more data or "
                "a shorter sequence length"
            )
        return planned

    @classmethod
    def _of(cls, starts: tuple[int, ...], splits: tuple[Split, ...]) -> StreamSplit:
        trained = tuple(accumulate((split.num_training() for split in splits), initial=0))
        held_out = tuple(accumulate((split.num_held_out for split in splits), initial=0))
        return cls(starts, splits, trained, held_out)

    @property
    def num_held_out(self) -> int:
        """Number of held-out windows."""
        return self.held_out[-1]

    def num_training(self) -> int:
        """Windows in an epoch, the same for every offset."""
        return self.trained[-1]

    def held_out_start(self, index: int) -> int:
        """First token of a held-out window."""
        file = bisect_right(self.held_out, index) - 1
        return self.starts[file] + self.splits[file].held_out_start(index - self.held_out[file])

    def training_start(self, index: int, offset: int) -> int:
        """First token of a training window in an epoch whose windows start at `offset`, 0 <= offset < S."""
        file = bisect_right(self.trained, index) - 1
        return self.starts[file] + self.splits[file].training_start(index - self.trained[file], offset)


def _laid(length: int) -> int:
    """Windows that an epoch takes from a span of `length` windows."""
    return length - 1 if length >= _MIN_SPAN_FOR_OFFSET else length


class Sampler(BatchSource):
    """Endless training batches for one peer, and the evaluation batches that all peers share.

    Args:
        stream: the data.
        sequence_length: S, tokens in a window; a window's last token has no target, see the module docstring.
        run_seed: the same for all peers of a run.
        peer_seed: different for each peer; a peer that keeps its seed resumes its own order.
        holdout_fraction: fraction of the windows that is never trained on, 0 to 0.5.
        divided_as: this peer's id, if it divides the data with others; None: it has its own order.

    Raises:
        DataError: too little data, or an invalid fraction.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        sequence_length: int,
        run_seed: int,
        peer_seed: int,
        holdout_fraction: float = 0.01,
        divided_as: str | None = None,
    ) -> None:
        self.stream = stream
        self.sequence_length = sequence_length
        lengths = [len(file.tokens) for file in stream.files]
        self.split = StreamSplit.plan(lengths, sequence_length, holdout_fraction)
        self._run_seed = run_seed
        self._key = f"{run_seed} {peer_seed}" if divided_as is None else f"{run_seed}"
        self._me = divided_as
        self._members: frozenset[str] = frozenset() if divided_as is None else frozenset({divided_as})
        self._block = min(_BLOCK_WINDOWS, max(1, self.split.num_training() // _MIN_BLOCKS))
        # The meaning of a cursor depends on all of this, so the state includes it.
        split = self.split.splits[0] if len(lengths) == 1 else self.split
        walk = self._key if divided_as is None else f"{self._key} divided {divided_as}"
        self._identity = short_digest(f"{stream.digest} {split} {walk}")
        self._data = short_digest(stream.digest)
        self._enter(0, 0)

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """Returns the next windows in this peer's order, int64 (B, S); negative: `~id`, a token that is not a target.

        Raises:
            DataError: a token file is corrupt; the cursor has not moved.
        """
        epoch, position = self.epoch, self.position
        batch_BS = np.empty((batch_size, self.sequence_length), dtype=np.int64)
        try:
            for row_S, start in zip(batch_BS, self._take(batch_size), strict=True):
                self.stream.read(start, row_S)
        except DataError:
            self._enter(epoch, position)
            raise
        return batch_BS

    def state(self) -> Cursor:
        """Returns the cursor, from which `restore` continues exactly here."""
        cursor: Cursor = {"epoch": self.epoch, "position": self.position}
        if self._me is not None:
            cursor["members"] = sorted(self._members)
        return {**cursor, "identity": self._identity, "data": self._data}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Moves the cursor to a saved one.

        Returns:
            True if the sampler continues there. False if the cursor was saved with other tokens, or in an order of this
            peer's own that it now divides with others: the order restarts.
            (peer/run_data.py decides whether a peer may change its data.)

        Raises:
            DataError: the cursor was saved with another sequence length, split or seed, or is damaged; the sampler has
                not moved.
        """
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        own_order = self._me is not None and "data" in state and "members" not in state  # of an earlier version, too
        if state.get("data", self._data) != self._data or own_order:
            self._enter(0, 0)
            return False
        if state.get("identity") != self._identity:
            raise DataError(
                "the newest checkpoint belongs to another --seed, sequence length or other data: use the same ones as "
                "before, or choose another --output-dir"
            )
        if epoch < 0 or not 0 <= position <= self.split.num_training():
            raise DataError(f"the saved data cursor is damaged (epoch {epoch}, position {position})")
        self.follow(map(str, state.get("members", ())))
        self._enter(epoch, position)
        return True

    def follow(self, members: Iterable[str]) -> None:
        """See `BatchSource`. A block that this peer has begun stays its own."""
        if self._me is not None:
            self._members = frozenset({*members, self._me})

    def positions(self) -> tuple[int, ...]:
        """See `BatchSource`: the number of blocks begun or passed in all epochs, if the data is divided."""
        if self._me is None:
            return ()
        return (min(self.epoch * self._num_blocks + -(-self.position // self._block), MAX_POSITION),)

    def advance(self, positions: Sequence[int]) -> None:
        """See `BatchSource`."""
        if self._me is not None and positions and positions[0] > self.positions()[0]:
            epoch, block = divmod(positions[0], self._num_blocks)
            self._enter(epoch, block * self._block)

    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """Yields held-out windows, int64 (B, S); the same ones in the same order on every peer with the same data.

        Yields up to `num_sequences` windows; the last batch may be smaller. The held-out windows are divided into as
        many equal parts, and the run's seed draws one window from each. This stratified sample has no period, and
        represents the whole split better than independent draws.

        Raises:
            DataError: nothing is held out, or a token file is corrupt.
        """
        if self.split.num_held_out == 0:
            raise DataError("nothing is held out for evaluation: set the held-out fraction above 0")
        num_held_out = self.split.num_held_out
        count = min(num_sequences, num_held_out)
        starts = [index * num_held_out // count for index in range(count + 1)]
        chosen = [first + self._draw(index, after - first) for index, (first, after) in enumerate(pairwise(starts))]
        for first in range(0, count, batch_size):
            group = chosen[first : first + batch_size]
            batch_BS = np.empty((len(group), self.sequence_length), dtype=np.int64)
            for row_S, index in zip(batch_BS, group, strict=True):
                self.stream.read(self.split.held_out_start(index), row_S)
            yield batch_BS

    def _draw(self, index: int, size: int) -> int:
        """Draws a number below `size`, the same for all peers of the run."""
        key = f"spes-swarm evaluation {self._run_seed} {index}".encode()
        return int.from_bytes(blake3(key).digest()[:8], "little") % size

    def _enter(self, epoch: int, position: int) -> None:
        """Moves the cursor and derives the epoch's order and offset."""
        self.epoch, self.position = epoch, position
        key = f"spes-swarm sampler {self._key} {epoch}".encode()
        self._order = Permutation(self.split.num_training(), key)
        self._offset = int.from_bytes(blake3(key + b" offset").digest()[:8], "little") % self.sequence_length

    @property
    def _num_blocks(self) -> int:
        """Blocks in an epoch; the last one may be smaller."""
        return -(-self.split.num_training() // self._block)

    def _owns_next_block(self) -> bool:
        piece = f"spes-swarm windows {self._key} {self.epoch} {self.position // self._block} "
        return owner_of(piece.encode(), self._members) == self._me

    def _take(self, count: int) -> list[int]:
        """Returns the first tokens of the next `count` windows, and moves the cursor past them."""
        starts: list[int] = []
        while len(starts) < count:
            if self.position == self.split.num_training():
                self._enter(self.epoch + 1, 0)
            stop = min(self.position + count - len(starts), self.split.num_training())
            if self._me is not None:
                end = min((self.position // self._block + 1) * self._block, self.split.num_training())
                if self.position % self._block == 0 and not self._owns_next_block():
                    self.position = end
                    continue
                stop = min(stop, end)
            order = self._order(np.arange(self.position, stop, dtype=np.int64))
            starts += [self.split.training_start(index, self._offset) for index in order.tolist()]
            self.position = stop
        return starts
