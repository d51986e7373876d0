"""State transfer: a newcomer fetches the reference from many donors at once and checks every chunk.

Donors answer `table` with the digests of all their chunks, and the stream `fetch` with chunks. The newcomer takes the
table that most donors agree on and shares the chunks out among them; a chunk that does not match its digest, or a donor
that stops, costs only that chunk.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hivemind.p2p import P2P

from spes_swarm.codec import EXACT
from spes_swarm.errors import ProtocolError, RoundError
from spes_swarm.layout import Layout
from spes_swarm.reference import CHUNK_ELEMENTS, Chunk, Reference, ReferenceTable, chunk_digest, chunks_of
from spes_swarm.rpc import Rpc
from spes_swarm.statement import MAX_ROUND
from spes_swarm.wire import STREAM_ERRORS, Channel, Frame, FrameKind, open_channel, serve_channel

_MAX_HELLO_BYTES = 1 << 20
_BATCH = 8  # chunks asked for at a time
_MAX_ATTEMPTS = 6  # each time the swarm commits during a transfer, the newcomer begins again with what has changed


@dataclass
class TransferReport:
    """How a download went."""

    round: int
    payload_bytes: int = 0
    chunks_by_donor: Counter[str] = field(default_factory=Counter)


def table_to_wire(table: ReferenceTable) -> dict[str, Any]:
    """A table as sent to a newcomer."""
    return {
        "round": table.round,
        "versions": list(table.versions),
        "chunks": [b"".join(digests) for digests in table.chunk_digests],
    }


def table_from_wire(wire: dict[str, Any], layout: Layout) -> ReferenceTable:
    """Checks a table received from a donor.

    Raises:
        ProtocolError: (`malformed`, `shape`) it cannot be used.
    """
    number, versions, chunks = wire.get("round"), wire.get("versions"), wire.get("chunks")
    if not (
        type(number) is int  # a bool is an int, too
        and number < MAX_ROUND
        and isinstance(versions, list)
        and isinstance(chunks, list)
        and all(type(version) is int and 0 <= version <= number for version in versions)
        and all(isinstance(digests, bytes) and len(digests) % 32 == 0 for digests in chunks)
    ):
        raise ProtocolError("malformed", "a reference table lacks its fields")
    split = tuple(tuple(digests[i : i + 32] for i in range(0, len(digests), 32)) for digests in chunks)
    table = ReferenceTable(number, tuple(versions), split)
    table.check_shape(layout)
    return table


class Transfer:
    """Serves this peer's reference and downloads that of others."""

    def __init__(
        self,
        p2p: P2P,
        rpc: Rpc,
        run_id: str,
        reference: Reference,
        stall_timeout_s: float,
        on_fault: Callable[[str, ProtocolError], None],
    ) -> None:
        self._p2p = p2p
        self._rpc = rpc
        self._reference = reference
        self._stall_timeout_s = stall_timeout_s
        self._on_fault = on_fault
        self._name = f"{run_id}/fetch"
        self._chunks = [chunk for block in reference.layout.blocks for chunk in chunks_of(block)]
        self._serving = False

    async def start(self) -> None:
        """Registers the handlers; nothing is given away before `open`."""
        await serve_channel(self._p2p, self._name, self._serve_fetch, self._stall_timeout_s, self._on_fault)
        await self._rpc.serve("table", self._serve_table)

    def open(self) -> None:
        """From now on this peer's reference is complete and may be given to others."""
        self._serving = True

    async def download(self, donors: Callable[[], Collection[str]]) -> TransferReport:
        """Brings this peer's reference to what the donors have.

        Raises:
            RoundError: no donor answered, or the donors changed faster than their state could be fetched.
        """
        report = TransferReport(round=self._reference.round)
        failed: set[str] = set()
        for attempt in range(_MAX_ATTEMPTS):
            tables = await self._tables(donors())
            # Who has failed once is asked again only when there is nobody else.
            tables = {donor: table for donor, table in tables.items() if donor not in failed} or tables
            if not tables:
                await asyncio.sleep(0.5 * (attempt + 1))
                continue
            votes = Counter((table.digest, table.round) for table in tables.values())
            best = max(votes, key=lambda entry: (votes[entry], entry[1]))
            table = next(t for t in tables.values() if (t.digest, t.round) == best)
            if await self._fetch_all(table, tables, report, failed):
                report.round = table.round
                return report
        raise RoundError("the swarm's reference could not be fetched: no donor, or it changes faster than it arrives")

    async def _tables(self, donors: Collection[str]) -> dict[str, ReferenceTable]:
        async def ask(donor: str) -> ReferenceTable | None:
            try:
                return table_from_wire(
                    await self._rpc.call(donor, "table", {}, self._stall_timeout_s), self._reference.layout
                )
            except ProtocolError as exc:
                self._on_fault(donor, exc)
            except STREAM_ERRORS:
                pass  # not a donor, then
            return None

        answers = await asyncio.gather(*(ask(donor) for donor in donors))
        return {donor: table for donor, table in zip(donors, answers, strict=True) if table is not None}

    async def _fetch_all(
        self, table: ReferenceTable, tables: dict[str, ReferenceTable], report: TransferReport, failed: set[str]
    ) -> bool:
        """Fetches what differs from `table`; whether all of it came."""
        mine = self._reference.table
        wanted = {
            number: table.chunk_digests[chunk.block][chunk.index]
            for number, chunk in enumerate(self._chunks)
            if mine.chunk_digests[chunk.block][chunk.index] != table.chunk_digests[chunk.block][chunk.index]
        }
        pending = deque(sorted(wanted))
        batch = max(1, min(_BATCH, len(pending) // (2 * len(tables))))
        touched: set[int] = set()

        async def work(donor: str) -> None:
            has = tables[donor]
            while pending:
                mine_now = [pending.popleft() for _ in range(min(batch, len(pending)))]
                able = [n for n in mine_now if self._digest_in(has, self._chunks[n]) == wanted[n]]
                pending.extend(n for n in mine_now if n not in able)
                got = await self._fetch(donor, {n: wanted[n] for n in able}, has.round, report)
                touched.update(self._chunks[n].block for n in got)
                pending.extend(n for n in able if n not in got)
                if len(got) < len(able):
                    failed.add(donor)
                if len(got) < len(mine_now):
                    return  # it failed or has moved on: the others take over what is left

        await asyncio.gather(*(work(donor) for donor in tables))
        complete = not pending
        blocks = range(len(table.versions)) if complete else touched
        versions = table.versions if complete else self._reference.versions
        self._reference.finish(
            table.round if complete else self._reference.round, [(block, versions[block]) for block in blocks]
        )
        if complete and self._reference.digest != table.digest:
            raise RoundError("the fetched reference does not have the digest that the donors announced")
        return complete

    @staticmethod
    def _digest_in(table: ReferenceTable, chunk: Chunk) -> bytes:
        return table.chunk_digests[chunk.block][chunk.index]

    async def _fetch(
        self, donor: str, wanted: dict[int, bytes], expected_round: int, report: TransferReport
    ) -> set[int]:
        """Fetches some chunks from one donor; returns those that came and match their digests."""
        got: set[int] = set()
        if not wanted:
            return got
        try:
            async with open_channel(self._p2p, donor, self._name, self._stall_timeout_s) as channel:
                await channel.send_hello(chunks=np.array(sorted(wanted), dtype="<u4").tobytes())
                while len(got) < len(wanted):
                    frame = await channel.receive(EXACT.num_bytes(CHUNK_ELEMENTS))
                    if frame.kind is not FrameKind.DATA:
                        break
                    if frame.part not in wanted or frame.part in got:
                        raise ProtocolError("part", f"chunk {frame.part} was not asked for")
                    if int.from_bytes(frame.extra, "little") != expected_round:
                        break  # the donor has committed another round meanwhile: an honest mismatch
                    chunk = self._chunks[frame.part]
                    values_N = EXACT.decode(frame.payload, chunk.size)
                    if chunk_digest(values_N) != wanted[frame.part]:
                        raise ProtocolError("digest", f"chunk {frame.part} does not match its digest")
                    self._reference.values_N[chunk.start : chunk.start + chunk.size] = values_N
                    got.add(frame.part)
                    report.payload_bytes += len(frame.payload)
                    report.chunks_by_donor[donor] += 1
        except ProtocolError as exc:
            self._on_fault(donor, exc)
        except STREAM_ERRORS as exc:
            self._on_fault(donor, ProtocolError("donor", f"a transfer ended early: {exc or type(exc).__name__}"))
        return got

    async def _serve_table(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        if not self._serving:
            return {"error": "this peer has no complete reference yet"}
        return table_to_wire(self._reference.table)

    async def _serve_fetch(self, channel: Channel) -> None:
        hello = await channel.receive_hello(_MAX_HELLO_BYTES)
        listed = hello.get("chunks")
        if not self._serving or not isinstance(listed, bytes) or len(listed) % 4:
            raise ProtocolError("malformed", "a fetch lists its chunks as 32-bit numbers")
        for number in np.unique(np.frombuffer(listed, dtype="<u4")).tolist():
            if number >= len(self._chunks):
                raise ProtocolError("part", f"there is no chunk {number}")
            chunk = self._chunks[number]
            payload = EXACT.encode(self._reference.values_N[chunk.start : chunk.start + chunk.size])
            held_round = self._reference.round.to_bytes(8, "little")
            await channel.send(Frame(FrameKind.DATA, part=number, extra=held_round, payload=payload))
        await channel.send(Frame(FrameKind.END))
