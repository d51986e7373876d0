"""The donors of a newcomer: their tables, the vote on them, and which donors have failed or lied."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.wording import plural
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Channel, FaultSink, open_channel
from spes_swarm.network.transport.interface import Transport
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import DIGEST_BYTES, ReferenceTable
from spes_swarm.protocol.rounds.statement import MAX_ROUND

_MAX_VOTERS = 16  # donors whose tables are compared
_MAX_UNSURE = 8  # votes without a majority, as when some donors have committed and others are about to
_UNSURE_S = 0.5
_REST_S = 30.0  # until a donor that has failed is asked again while there are others
# These also happen to honest donors: they die, have a bad connection, or are busy.
_HONEST_FAILURES = {"donor", "truncated", "stalled", "refused"}


def table_to_wire(table: ReferenceTable) -> dict[str, Any]:
    """Encodes a table for a newcomer."""
    return {
        "round": table.round,
        "versions": list(table.versions),
        "chunks": [b"".join(digests) for digests in table.chunk_digests],
    }


def table_from_wire(wire: dict[str, Any], layout: Layout) -> ReferenceTable:
    """Checks a table received from a donor.

    Raises:
        ProtocolError: (`malformed`, `shape`) the table cannot be used.
    """
    number, versions, chunks = wire.get("round"), wire.get("versions"), wire.get("chunks")
    if not (
        type(number) is int  # a bool is an int, too
        and number < MAX_ROUND
        and isinstance(versions, list)
        and isinstance(chunks, list)
        and all(type(version) is int and 0 <= version <= number for version in versions)
        and all(isinstance(digests, bytes) and len(digests) % DIGEST_BYTES == 0 for digests in chunks)
    ):
        raise ProtocolError("malformed", "a reference table lacks its fields")
    split = tuple(
        tuple(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)) for digests in chunks
    )
    table = ReferenceTable(number, tuple(versions), split)
    table.check_shape(layout)
    return table


@dataclass(frozen=True)
class Donors:
    """A newcomer's access to donors."""

    transport: Transport
    rpc: Rpc
    name: str
    layout: Layout
    timeout_s: float
    known: Callable[[], Collection[str]]  # returns the peers that may be asked

    async def table(self, donor: str) -> ReferenceTable:
        """Asks for a table; raises OSError or ProtocolError."""
        return table_from_wire(await self.rpc.call(donor, "table", {}, self.timeout_s), self.layout)

    def connect(self, donor: str) -> AbstractAsyncContextManager[Channel]:
        """Opens a stream for requests; raises STREAM_ERRORS."""
        return open_channel(self.transport, donor, self.name, self.timeout_s)


def choose_table(tables: Collection[ReferenceTable]) -> tuple[ReferenceTable, bool]:
    """Returns the table to fetch, and whether most donors have it.

    The table with the most votes wins; in a tie, the newest. A table beyond the upper median of all rounds never wins:
    if honest donors differ because some have just committed, a single claim of a far round must not win.
    """
    rounds = sorted((table.round for table in tables), reverse=True)
    bound = rounds[(len(rounds) - 1) // 2]
    by_digest = {(table.round, table.digest): table for table in tables}
    votes = Counter((table.round, table.digest) for table in tables)
    best = max((key for key in votes if key[0] <= bound), key=lambda key: (votes[key], key[0]))
    return by_digest[best], 2 * votes[best] > len(tables)


class DonorVote:
    """The vote among the donors of one download; `on_fault` is called for donors that fail or lie."""

    def __init__(self, donors: Donors, on_fault: FaultSink) -> None:
        self._donors = donors
        self._on_fault = on_fault
        # Donors that are asked again only if there are no others, and until when; for liars, for ever.
        self._failed: dict[str, float] = {}
        self._accused: set[str] = set()

    async def vote(self) -> tuple[ReferenceTable | None, dict[str, ReferenceTable]]:
        """Returns the table to fetch, None if no donor answered, and the tables of all donors that answered."""
        for attempt in range(_MAX_UNSURE):
            tables = await self._tables()
            if not tables:
                return None, {}
            table, sure = choose_table(tables.values())
            if sure:
                self._accuse_others(table, tables)
                break
            if attempt < _MAX_UNSURE - 1:
                await asyncio.sleep(_UNSURE_S)
        return table, tables

    def _accuse_others(self, table: ReferenceTable, tables: Mapping[str, ReferenceTable]) -> None:
        for donor, other in tables.items():
            if other.round == table.round and other.digest != table.digest and donor not in self._accused:
                self._accused.add(donor)
                num = sum(a != b for a, b in zip(table.digests, other.digests, strict=True))
                detail = (
                    f"its reference of round {table.round} differs from that of most donors in {plural(num, 'block')}"
                )
                self._on_fault(donor, ProtocolError("table", detail))

    async def _tables(self) -> dict[str, ReferenceTable]:
        known = list(self._donors.known())
        random.shuffle(known)  # so that newcomers do not all ask the same donors
        for rested in (True, False):
            tables = await self.tables_of([donor for donor in known if self._is_rested(donor) is rested])
            if tables:
                return tables
        return {}

    def _is_rested(self, donor: str) -> bool:
        return time.monotonic() >= self._failed.get(donor, 0.0)

    def has_recovered(self, donor: str) -> bool:
        """Returns True if a donor has failed, but long enough ago to be tried again."""
        return donor in self._failed and self._is_rested(donor)

    def note_failure(self, donor: str, error: ProtocolError | None) -> None:
        """Notes and reports that a donor has failed or lied; `error` is None if it merely did not answer."""
        is_lie = error is not None and error.kind not in _HONEST_FAILURES
        self._failed[donor] = math.inf if is_lie else time.monotonic() + _REST_S
        if error is not None:
            self._on_fault(donor, error)

    async def tables_of(self, donors: Collection[str]) -> dict[str, ReferenceTable]:
        """Asks a limited number of donors for their tables; returns those that arrive."""

        async def ask(donor: str) -> ReferenceTable | None:
            try:
                return await self._donors.table(donor)
            except ProtocolError as exc:
                self.note_failure(donor, exc)
            except OSError:
                self.note_failure(donor, None)  # not a donor, or gone
            return None

        asked = list(donors)[:_MAX_VOTERS]
        answers = await asyncio.gather(*(ask(donor) for donor in asked))
        return {donor: table for donor, table in zip(asked, answers, strict=True) if table is not None}
