"""Batches from a streamed data set: documents are tokenised as they arrive and packed into windows.

The documents of a peer's pieces, each with its end of text, form one stream that is cut into windows of S tokens. The
cursor is the place of the next token: epoch, place of the unit in the epoch's order, example, and token in the example.
A peer that resumes there tokenises that example again and continues bit for bit. The cursor also contains the members
among whom the pieces were divided, since they decide which piece is next.

Memory holds a few dozen examples (see reader.py), and nothing is written.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spes_swarm.base.errors import DataError
from spes_swarm.data.batch_source import BatchSource, Cursor, short_digest
from spes_swarm.data.partition import Permutation
from spes_swarm.data.streaming.pieces import BLOCK_EXAMPLES, Deal, Piece
from spes_swarm.data.streaming.reader import Prepare, Reader, Units
from spes_swarm.data.streaming.rows import Unusable

TIMEOUT_S = 180.0  # how long training waits for the next example

_EVALUATED_UNITS = 8  # evaluation sequences come from this many units, if the data set has them
_MAX_BARREN_EPOCHS = 20  # consecutive epochs in which this peer read units and found no example that it can use
_CLOSE_S = 5.0
_NUMBERS = ("epoch", "place", "part", "example", "token")


class StreamedUnits(Units, Protocol):
    """A data set as the sampler sees it."""

    num_units: int
    digest: str


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of the next token."""

    epoch: int = 0
    place: int = 0  # of the unit in the epoch's order
    part: int = 0
    example: int = 0  # in the part
    token: int = 0  # in the example
    begun: bool = False  # this peer has begun the piece, and finishes it even if it now belongs to another


@dataclass(slots=True)
class _Document:
    """A tokenised example; its first tokens may already be used."""

    at: _Place
    tokens_N: NDArray[np.int64]


class StreamSampler(BatchSource):
    """Endless training batches of one peer's pieces, and the evaluation batches that all peers share.

    Args:
        units: the data set.
        prepare: tokenises an example; called on another thread.
        sequence_length: S, tokens in a window.
        run_seed: the same for all peers of a run.
        peer_id: of this peer.
        holdout_fraction: share of the examples that is never trained on, 0 to 0.5.
        divided: whether the peers divide this data set; if False, this peer goes through all of it in its own order.
        stop: set when the peer is told to leave, which ends all waiting.
        timeout_s: how long to wait for an example.
    """

    def __init__(
        self,
        units: StreamedUnits,
        prepare: Prepare,
        *,
        sequence_length: int,
        run_seed: int,
        peer_id: str,
        holdout_fraction: float,
        divided: bool = True,
        stop: threading.Event | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._units = units
        self._prepare = prepare
        self.sequence_length = sequence_length
        self._run_seed = run_seed
        self._me = peer_id
        self._stop = stop if stop is not None else threading.Event()
        self._timeout_s = timeout_s
        self._divided = divided
        self._deal = Deal(run_seed, units.num_units, holdout_fraction, "" if divided else peer_id)
        self._members: frozenset[str] = frozenset({peer_id})
        self._data = short_digest(units.digest)
        settings = f"{units.digest} {units.num_units} {sequence_length} {run_seed} {peer_id} {holdout_fraction}"
        self._identity = short_digest(settings)
        self._reader: Reader | None = None  # of the unit at `_at`
        self._ahead: Reader | None = None  # of the unit at `_ahead_at`, which is probably next
        self._ahead_at = _Place()
        self._cursor = _Place()  # where the next batch begins
        self._at = _Place()  # of the next example to be read
        self._enter(_Place())

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """See `BatchSource`."""
        batch_BS = np.empty((batch_size, self.sequence_length), dtype=np.int64)
        try:
            for row_S in batch_BS:
                self._fill(row_S)
        except BaseException:
            self._enter(self._cursor)
            raise
        self._cursor = self._documents[0].at if self._documents else self._at
        return batch_BS

    def state(self) -> Cursor:
        """See `BatchSource`."""
        place = {**dataclasses.asdict(self._cursor), "begun": int(self._cursor.begun)}
        return {**place, "members": sorted(self._members), "identity": self._identity, "data": self._data}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See `BatchSource`."""
        if state.get("data") != self._data:
            self._enter(_Place())
            return False
        if state.get("identity") != self._identity:
            raise DataError(
                f"the saved cursor of {self._units.name} belongs to another sequence length, seed, held-out fraction "
                "or peer: use the same ones as before, or start in a new output directory"
            )
        try:
            epoch, number, part, example, token = (int(state[key]) for key in _NUMBERS)
            place = _Place(epoch, number, part, example, token, begun=bool(state["begun"]))
            members = frozenset(map(str, state["members"]))
        except (KeyError, TypeError, ValueError) as exc:
            raise DataError(f"the saved cursor of {self._units.name} is damaged") from exc
        if min(epoch, number, part, example, token) < 0 or place.place >= self._units.num_units:
            raise DataError(f"the saved cursor of {self._units.name} is damaged")
        self.follow(members)
        self._enter(place)
        return True

    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """See `BatchSource`. The windows come from up to eight units, in an order that follows from the run's seed."""
        if not self._deal.holdout_fraction:
            raise DataError("nothing is held out for evaluation: set the held-out fraction above 0")
        windows, usable, unusable = self._held_out_windows(num_sequences)
        if not windows:
            why = "raise run.evaluation.holdout_fraction"
            if not usable and not self._begins_usable():  # perhaps nothing is held out of so little
                raise DataError(
                    f"{self._units.name} has no usable example (skipped so far: {self._prepare.skipped or 'none'}): "
                    "repair the data set"
                )
            if unusable:
                counts = (
                    f"{unusable:,} of {usable + unusable:,} cannot be used; skipped so far: {self._prepare.skipped}"
                )
                why = f"{'repair the data set' if unusable > usable else why} ({counts})"
            raise DataError(
                f"the held-out examples of {self._units.name} have fewer tokens than one sequence "
                f"({self.sequence_length}): {why}, or set every_rounds to 0"
            )
        for first in range(0, len(windows), batch_size):
            yield np.stack(windows[first : first + batch_size])

    def follow(self, members: Iterable[str]) -> None:
        """See `BatchSource`."""
        self._members = frozenset({*members, self._me} if self._divided else {self._me})

    def positions(self) -> tuple[int, ...]:
        """See `BatchSource`."""
        if not self._divided:
            return ()
        return (self._deal.position(self._piece_of(self._cursor), begun=self._cursor.begun),)

    def advance(self, positions: Sequence[int]) -> None:
        """See `BatchSource`."""
        if not positions or not self._divided:
            return
        epoch, place, example = self._deal.place_of(positions[0])
        now = self._cursor
        if (now.epoch, now.place, now.example if self._deal.in_blocks else 0) < (epoch, place, example):
            self._enter(_Place(epoch, place, 0, example))

    def close(self) -> None:
        """See `BatchSource`."""
        self._leave_unit(_CLOSE_S)

    # Moving through the data set.

    def _enter(self, place: _Place) -> None:
        """Moves to a place without opening its unit."""
        self._leave_unit()
        self._cursor = self._at = place
        self._documents: deque[_Document] = deque()
        self._piece: Piece | None = self._piece_of(place) if place.begun else None
        self._is_mine = place.begun
        self._read_units = self._intact = self._offered = self._usable = self._barren = 0

    def _leave_unit(self, wait_s: float = 0.0) -> None:
        for reader in (self._reader, self._ahead):
            if reader is not None:
                reader.close(wait_s)
        self._reader = self._ahead = None

    def _piece_of(self, place: _Place) -> Piece:
        return self._deal.piece(place.epoch, place.place, place.example)

    def _owns(self, piece: Piece) -> bool:
        return self._deal.owner(piece, self._members) == self._me

    def _fill(self, row_S: NDArray[np.int64]) -> None:
        """Fills a window with the next tokens."""
        filled = 0
        while filled < len(row_S):
            if not self._documents:
                self._take_example()
                continue
            document = self._documents[0]
            used = document.tokens_N[: len(row_S) - filled]
            row_S[filled : filled + len(used)] = used
            filled += len(used)
            document.tokens_N = document.tokens_N[len(used) :]
            document.at = dataclasses.replace(document.at, token=document.at.token + len(used))
            if not len(document.tokens_N):
                self._documents.popleft()

    def _take_example(self) -> None:
        """Takes the next example; appends it to the documents if this peer trains on it."""
        if self._reader is None:
            self._open_unit()
            return
        item = self._reader.next(self._timeout_s, self._stop)
        self._read_ahead()
        if item is None:
            self._next_unit()
            return
        self._intact += not isinstance(item.example.value, Unusable)
        part, number = item.example.part, item.example.number
        first_token = self._at.token
        here = dataclasses.replace(self._at, part=part, example=number, token=0)
        piece = self._piece_of(here)
        if piece != self._piece:
            self._piece, self._is_mine = piece, self._owns(piece)
        here = dataclasses.replace(here, begun=self._is_mine)
        if self._is_mine and not self._deal.is_held_out(self._unit, part, number):
            self._offered += 1
            tokens_N = item.tokens if item.is_prepared else self._prepare(item.example.value)
            if tokens_N is not None and len(tokens_N) > first_token:
                self._usable += 1
                at = dataclasses.replace(here, token=first_token)
                self._documents.append(_Document(at, tokens_N[first_token:].astype(np.int64)))
        # After a piece's last example, the next piece has not been begun.
        after = dataclasses.replace(here, example=number + 1)
        self._at = dataclasses.replace(after, begun=self._is_mine and self._piece_of(after) == piece)

    @property
    def _unit(self) -> int:
        return self._deal.unit(self._at.epoch, self._at.place)

    def _open_unit(self) -> None:
        """Opens the unit at the current place, or the next one that may contain a piece of this peer."""
        if not self._at.begun:
            self._move(self._first_from(self._at))
        if self._ahead is not None and self._ahead_at == self._at:
            self._reader, self._ahead = self._ahead, None
        else:
            self._leave_unit()
            self._reader = self._reader_at(self._at)
        if not self._deal.in_blocks and not self._at.begun:
            self._piece, self._is_mine = self._piece_of(self._at), True
            self._at = dataclasses.replace(self._at, begun=True)

    def _next_unit(self) -> None:
        """Leaves a unit whose end has been reached."""
        self._reader = None
        self._read_units += 1
        self._move(self._following(self._at))

    def _move(self, to: _Place) -> None:
        """Moves to a place whose unit is not open."""
        if to.epoch > self._at.epoch:
            # An epoch in which others own all intact examples is none.
            is_barren = self._read_units and not self._usable and (self._offered or not self._intact)
            self._barren = self._barren + 1 if is_barren else 0
            self._read_units = self._intact = self._offered = self._usable = 0
            if self._barren > _MAX_BARREN_EPOCHS:
                why = f" (skipped so far: {skipped}): repair the data set" if (skipped := self._prepare.skipped) else ""
                raise DataError(f"{self._units.name} has no usable example for this peer{why}")
        self._at = to

    def _following(self, place: _Place) -> _Place:
        """Returns the beginning of the next unit, which may be in the next epoch."""
        if place.place + 1 < self._units.num_units:
            return _Place(place.epoch, place.place + 1)
        return _Place(place.epoch + 1)

    def _first_from(self, place: _Place) -> _Place:
        """Returns the first place, from this one on, whose unit may contain a piece of this peer."""
        while not self._deal.in_blocks and not self._owns(self._piece_of(place)):
            place = self._following(place)
        return place

    def _read_ahead(self) -> None:
        """Opens the next unit when the rest of the current one is in memory."""
        if self._ahead is None and self._reader is not None and self._reader.has_read_all:
            self._ahead_at = self._first_from(self._following(self._at))
            self._ahead = self._reader_at(self._ahead_at)

    def _reader_at(self, at: _Place) -> Reader:
        deal, members, unit = self._deal, self._members, self._deal.unit(at.epoch, at.place)

        def wanted(part: int, number: int) -> bool:
            if deal.is_held_out(unit, part, number):
                return False
            return not deal.in_blocks or deal.owner(deal.piece(at.epoch, at.place, number), members) == self._me

        return Reader(self._units, unit, at.part, at.example, self._prepare, wanted)

    # Evaluation.

    def _held_out_windows(self, count: int) -> tuple[list[NDArray[np.int64]], int, int]:
        """Returns up to `count` windows of held-out examples, and how many examples were usable and not."""
        windows: list[NDArray[np.int64]] = []
        usable = unusable = 0
        rest_N = np.empty(0, dtype=np.int64)
        spread = min(_EVALUATED_UNITS, self._units.num_units)
        order = Permutation(self._units.num_units, f"spes-swarm evaluated units {self._run_seed}".encode())
        for number, unit in enumerate(order(np.arange(self._units.num_units)).tolist()):
            wanted = -(-(count - len(windows)) // max(1, spread - number))
            found = 0
            for tokens_N in self._held_out_documents(unit):
                if tokens_N is None:
                    unusable += 1
                    continue
                usable += 1
                rest_N = np.concatenate([rest_N, tokens_N])
                while len(rest_N) >= self.sequence_length and found < wanted:
                    windows.append(rest_N[: self.sequence_length])
                    rest_N = rest_N[self.sequence_length :]
                    found += 1
                if found == wanted:
                    break
            if len(windows) == count:
                break
        return windows, usable, unusable

    def _held_out_documents(self, unit: int) -> Iterator[NDArray[np.int64] | None]:
        return self._prepared(unit, lambda part, number: self._deal.is_held_out(unit, part, number))

    def _begins_usable(self) -> bool:
        """Returns True if one of the first examples of a few units is usable."""
        units = range(min(_EVALUATED_UNITS, self._units.num_units))
        firsts = (self._prepared(unit, lambda part, number: number < BLOCK_EXAMPLES) for unit in units)
        return any(tokens is not None for first in firsts for tokens in first)

    def _prepared(self, unit: int, wanted: Callable[[int, int], bool]) -> Iterator[NDArray[np.int64] | None]:
        """Yields the tokens of the wanted examples of a unit; None for one that cannot be used."""
        reader = Reader(self._units, unit, 0, 0, self._prepare, wanted)
        try:
            while (item := reader.next(self._timeout_s, self._stop)) is not None:
                if item.is_prepared:
                    yield None if item.tokens is None else item.tokens.astype(np.int64)
        finally:
            reader.close()
