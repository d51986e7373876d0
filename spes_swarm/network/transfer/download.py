"""The newcomer's side of state transfer: brings a reference up to date, even if donors die, lie or commit meanwhile.

A vote decides what to fetch: the table that most donors announce. Each chunk is verified by its own digest, so it does
not matter which donor it comes from, and no chunk is fetched twice while its digest is current.

The swarm may commit faster than a download completes. Donors keep what is being fetched from them (see transfer.py), so
every block can be fetched whole. When all blocks have been, each as of one of the votes, the newcomer fetches what has
changed since, for as long as each pass at least halves that amount. Then it starts with blocks of different rounds. To
the swarm, it is a member with an older base, and the next round sends it full values.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.changes import Changes
from spes_swarm.base.errors import ProtocolError, TransferError
from spes_swarm.metrics import events
from spes_swarm.network.link.wire import FaultSink
from spes_swarm.network.transfer.chunk_queue import ChunkQueue
from spes_swarm.network.transfer.chunk_stream import PIECE_BYTES, ChunkAssembler
from spes_swarm.network.transfer.donors import Donors, DonorVote
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.port.messages import TransferReport
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.reference import Chunk, Reference, ReferenceTable, chunk_digest, chunks_of
from spes_swarm.protocol.rounds.frames import FrameKind

# Donors that are fetched from at a time: at first, and at most. While a pass takes long, they become more one by one.
_NUM_DONORS, _MAX_DONORS = 8, 16
_WINDOW = 2  # chunks requested from one donor at a time: one under way, and one so that the donor is never idle
_MAX_FRUITLESS = 6  # votes in a row after which no block became whole
_LOOK_S = 10.0  # after this long without a change, more donors are looked for
_PIECE_STALLS = 4.0  # stall timeouts in which at least one piece must arrive
_PROGRESS_S = 1.0
_MAX_UNWRITTEN = 64  # chunks that wait for the disk; further ones are not written, so a download never waits for it


@dataclass(eq=False)
class Download:
    """One download into `reference`, which is consistent with its own table at all times."""

    reference: Reference
    donors: Donors
    stall_timeout_s: float
    partial: PartialReference | None  # keeps verified chunks of unfinished attempts
    on_fault: FaultSink  # called for donors that fail or lie
    on_progress: Callable[[events.SyncProgress], None]  # called about once a second

    def __post_init__(self) -> None:
        reference = self.reference
        self._vote = DonorVote(self.donors, self.on_fault)
        self._chunks = [chunk for block in reference.layout.blocks for chunk in chunks_of(block)]
        self._chunks_of_block: list[list[int]] = [[] for _ in reference.layout.blocks]
        for number, chunk in enumerate(self._chunks):
            self._chunks_of_block[chunk.block].append(number)
        self._total_bytes = EXACT.num_bytes(reference.layout.num_elements)
        self._report = TransferReport(round=reference.round)
        self._whole: dict[int, tuple[int, int]] = {}  # block -> its version, and the round of the table that it matches
        self._fetched: set[int] = set()  # chunks that came from donors in this download
        self._unwritten: asyncio.Queue[tuple[Chunk, FloatArray]] = asyncio.Queue(_MAX_UNWRITTEN)
        self._progress_at = 0.0
        # State of the current pass.
        self._wanted: dict[int, bytes] = {}
        self._queue = ChunkQueue((), self.stall_timeout_s)
        self._changed = Changes()  # notified when the queue changes

    async def run(self) -> TransferReport:
        """Runs the download.

        Raises:
            TransferError: no donor answered, or none delivered; what has arrived is kept for the next attempt.
        """
        writer = asyncio.create_task(self._write_forever())
        try:
            await self._bring_up_to_date()
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer
            if self.partial is not None:
                self.partial.close()
        if self.partial is not None:
            self.partial.remove()
        self._report.digest = self.reference.digest.hex()
        return self._report

    async def _bring_up_to_date(self) -> None:
        last_bytes = self._total_bytes
        fruitless = 0
        restored = False
        while fruitless < _MAX_FRUITLESS:
            table, tables = await self._vote.vote()
            if table is None:
                fruitless += 1
                await asyncio.sleep(0.5 * fruitless)
                continue
            if not restored:
                restored = True
                await self._restore(table)
            wanted = self._compare(table)
            if wanted and len(self._whole) == len(table.versions):
                num_bytes = self._num_bytes(wanted)
                if 2 * num_bytes > last_bytes:
                    break  # it changes as fast as it arrives
                last_bytes = num_bytes
            elif wanted:
                wanted = {n: digest for n, digest in wanted.items() if self._chunks[n].block not in self._whole}
            num_whole = len(self._whole)
            await self._fetch(table, wanted, tables)
            if not self._compare(table):
                self._report.round = table.round
                self.reference.adopt(table.round, table.versions)
                assert self.reference.digest == table.digest
                return
            fruitless = 0 if len(self._whole) > num_whole else fruitless + 1
            await asyncio.sleep(0.5 * fruitless)
        if len(self._whole) < len(self._chunks_of_block):
            raise TransferError("the swarm's reference could not be fetched: no donor answered, or none delivered")
        self._adopt_from_different_rounds(table)

    def _adopt_from_different_rounds(self, last: ReferenceTable | None) -> None:
        blocks = [self._whole[index] for index in range(len(self._chunks_of_block))]
        self._report.round = max(round_number for _, round_number in blocks)
        self.reference.adopt(self._report.round, [version for version, _ in blocks])
        if last is not None:
            mine = self.reference.digests
            self._report.outdated_blocks = sum(a != b for a, b in zip(mine, last.digests, strict=True))

    def _compare(self, table: ReferenceTable) -> dict[int, bytes]:
        """Notes which blocks match the table; returns the table's digests of the chunks that do not."""
        mine = self.reference.table.chunk_digests
        wanted: dict[int, bytes] = {}
        for block, numbers in enumerate(self._chunks_of_block):
            theirs = table.chunk_digests[block]
            if mine[block] == theirs:
                self._whole[block] = (table.versions[block], table.round)
            else:
                wanted.update((n, theirs[i]) for i, n in enumerate(numbers) if mine[block][i] != theirs[i])
        return wanted

    def _num_bytes(self, chunks: Collection[int]) -> int:
        return sum(EXACT.num_bytes(self._chunks[n].size) for n in chunks)

    # The disk.

    async def _restore(self, table: ReferenceTable) -> None:
        """Takes over the chunks that an earlier attempt has fetched and that still match the table."""
        if self.partial is None:
            return
        for number, digest in self._compare(table).items():
            chunk = self._chunks[number]
            values_N = await asyncio.to_thread(self.partial.read, chunk)
            if values_N is not None and chunk_digest(values_N) == digest:
                self.reference.replace_chunk(chunk, values_N, digest)
                self._report.resumed_bytes += EXACT.num_bytes(chunk.size)

    async def _write_forever(self) -> None:
        while True:
            chunk, values_N = await self._unwritten.get()
            if self.partial is not None:
                await asyncio.to_thread(self.partial.write, chunk, values_N)

    # One pass: fetch what differs from one table.

    async def _fetch(self, table: ReferenceTable, wanted: dict[int, bytes], tables: dict[str, ReferenceTable]) -> None:
        """Fetches chunks until all have arrived, or no known donor has the remaining ones."""
        self._wanted = wanted
        queue = self._queue = ChunkQueue(wanted, self.stall_timeout_s / 4)
        seen = {*self.donors.known(), *tables}
        waiting: deque[str] = deque()
        lanes: dict[str, asyncio.Task[None]] = {}
        num_lanes = _NUM_DONORS

        def add(more: Mapping[str, ReferenceTable]) -> None:
            for donor, has in more.items():
                queue.add_donor(donor, [n for n, digest in wanted.items() if self._has(has, n, digest)])
                waiting.append(donor)

        self._report_progress(table.round)
        add(tables)
        try:
            while not queue.finished:
                while waiting and len(lanes) < num_lanes:
                    donor = waiting.popleft()
                    lanes[donor] = asyncio.create_task(self._use(donor, table.round))
                if not lanes:
                    break
                done, _ = await asyncio.wait(lanes.values(), timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                for donor in [d for d, task in lanes.items() if task in done]:
                    lanes.pop(donor).result()  # raises unexpected errors
                if done:
                    continue
                num_lanes = min(num_lanes + 1, _MAX_DONORS)  # some of the donors may be slow, even on purpose
                others = set(self.donors.known()) - lanes.keys() - set(waiting)
                more = {donor for donor in others if donor not in seen or self._vote.has_recovered(donor)}
                seen |= more
                add(await self._vote.tables_of(more))
        finally:
            for task in lanes.values():
                task.cancel()
            await asyncio.gather(*lanes.values(), return_exceptions=True)

    def _has(self, table: ReferenceTable, number: int, digest: bytes) -> bool:
        chunk = self._chunks[number]
        return table.chunk_digests[chunk.block][chunk.index] == digest

    async def _use(self, donor: str, round_number: int) -> None:
        """Fetches from one donor for as long as it has wanted chunks."""
        queue = self._queue
        try:
            while not queue.finished:
                first = queue.take(donor, time.monotonic())
                if first is not None:
                    await self._converse(donor, first, round_number)
                    continue
                idle_s = queue.idle_s(donor, time.monotonic())
                if idle_s is None:
                    return
                await self._changed.wait(idle_s + 0.01)
        except ProtocolError as exc:
            self._vote.note_failure(donor, exc)
        except STREAM_ERRORS as exc:
            reason = "it closed the stream" if isinstance(exc, EOFError) else str(exc) or type(exc).__name__
            self._vote.note_failure(donor, ProtocolError("donor", f"a transfer ended early: {reason}"))
        finally:
            queue.give_up(donor)
            self._changed.notify()

    async def _converse(self, donor: str, first: int, round_number: int) -> None:
        """Fetches `first` and whatever else the queue has for this donor over one stream."""
        queue, report = self._queue, self._report
        arrivals = ChunkAssembler(self._chunks)
        num_received = num_kept = 0
        try:
            async with self.donors.connect(donor) as channel:
                await channel.send(arrivals.ask(first, self._wanted[first]))
                heard_at = answered_at = time.monotonic()
                while arrivals.num_asked and not queue.finished:
                    while arrivals.num_asked < _WINDOW and (n := queue.take(donor, time.monotonic())) is not None:
                        await channel.send(arrivals.ask(n, self._wanted[n]))
                    frame = await channel.receive(PIECE_BYTES)
                    now = time.monotonic()
                    if frame.kind is FrameKind.KEEPALIVE and now - heard_at < _PIECE_STALLS * self.stall_timeout_s:
                        continue
                    if frame.kind is FrameKind.KEEPALIVE:
                        raise ProtocolError("stalled", f"nothing but keepalives for {now - heard_at:.0f} s")
                    if frame.kind is not FrameKind.DATA:
                        raise ProtocolError("refused", frame.error_text() or f"a {frame.kind.name} frame")
                    heard_at = now
                    num_received += len(frame.payload)
                    report.payload_bytes += len(frame.payload)
                    self._report_progress(round_number)
                    answer = arrivals.take(frame)
                    if answer is None:
                        continue
                    if answer.values_N is None:
                        report.moved_on[donor] += 1
                        queue.lacks(donor, self._chunks_of_block[self._chunks[answer.number].block])
                        self._changed.notify()
                        continue
                    queue.measured(donor, now - answered_at)
                    answered_at = now
                    if self._keep(donor, answer.number, answer.values_N):
                        num_kept += EXACT.num_bytes(answer.values_N.size)
        except ProtocolError as exc:
            if isinstance(exc.__cause__, asyncio.IncompleteReadError):
                num_received += len(exc.__cause__.partial)
                report.payload_bytes += len(exc.__cause__.partial)
            raise
        finally:
            report.refetched_bytes += num_received - num_kept

    def _keep(self, donor: str, number: int, values_N: FloatArray) -> bool:
        """Puts a verified chunk into the reference. Returns True if it was still wanted."""
        if not self._queue.done(number):
            return False
        chunk = self._chunks[number]
        self._whole.pop(chunk.block, None)
        self.reference.replace_chunk(chunk, values_N, self._wanted[number])
        if number in self._fetched:
            self._report.superseded_bytes += EXACT.num_bytes(chunk.size)
        self._fetched.add(number)
        self._report.chunks_by_donor[donor] += 1
        with suppress(asyncio.QueueFull):
            self._unwritten.put_nowait((chunk, values_N))
        self._changed.notify()
        return True

    def _report_progress(self, round_number: int) -> None:
        now = time.monotonic()
        if now - self._progress_at < _PROGRESS_S:
            return
        self._progress_at = now
        report = self._report
        done_bytes = self._total_bytes - self._num_bytes(self._queue.remaining)
        self.on_progress(
            events.SyncProgress(
                round=round_number,
                done_bytes=done_bytes,
                total_bytes=self._total_bytes,
                payload_bytes=report.payload_bytes,
                chunks_by_donor=dict(report.chunks_by_donor),
            )
        )
