"""State transfer: the donor's side, and the entry point of a download (download.py).

Donors answer `table` with the digests of all their chunks, and serve chunks, named by number and digest, on the stream
`fetch`. Their upload rate is limited (base/rate_limit.py), so that rounds are not starved.

A donor that commits a round changes the chunks that newcomers request. So from the start of a round's exchange, it
keeps copies of the blocks that are under way to a newcomer, until they have been sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spes_swarm.base.address import host_of
from spes_swarm.base.errors import ProtocolError
from spes_swarm.base.rate_limit import Budgets, TransferLimit
from spes_swarm.metrics import events
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Channel, FaultSink, Guests, serve_channel
from spes_swarm.network.transfer.chunk_stream import MAX_REQUEST_BYTES, piece_frames, read_request
from spes_swarm.network.transfer.donors import Donors, DonorVote, table_to_wire
from spes_swarm.network.transfer.download import Download
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.network.transport.interface import Transport
from spes_swarm.port.messages import TransferReport
from spes_swarm.protocol.consensus.codec import EXACT
from spes_swarm.protocol.consensus.reference import Chunk, Reference, ReferenceTable, chunks_of
from spes_swarm.protocol.rounds.frames import Frame, FrameKind

_RECHECK_S = 0.2  # how soon a waiting transfer notices that a round has begun or ended
# Copies for newcomers take no more memory than this, or than one block if that is larger.
_MAX_COPIED_BYTES = 1 << 30
# Newcomers request block after block; several small ones are under way at a time.
_BLOCKS_PER_STREAM = 4
# How often a donor sends its whole reference to one stranger, to strangers at one address, and to one member; and as
# often again, a little at a time, in each hour. An honest download takes at most two references, even from this donor
# alone and in a swarm that keeps committing: each block once, then what has changed, in passes that halve (see
# download.py). What an earlier attempt has fetched is resumed from disk. So two attempts that lost their disk fit into
# a stranger's budget, and eight into that of an address, which many peers of a laboratory or behind a relay may share.
# Beyond it, newcomers turn to other donors; once their work is in a commit, they are members. These fall behind now
# and then.
_PER_STRANGER, _PER_HOST, _PER_MEMBER = 4, 16, 16
_REFILL_S = 3600.0
# A smaller reference counts as this large: a slow newcomer may fall behind quick rounds, and fetch it again and again.
_LEAST_BYTES = 16 << 20


class Copies:
    """Blocks as they were before a commit, kept while a newcomer fetches them. Chunks are found by their digest."""

    def __init__(self, reference: Reference, max_bytes: int = _MAX_COPIED_BYTES) -> None:
        self._reference = reference
        self._max_bytes = max_bytes
        self._chunks: dict[int, dict[bytes, bytes]] = {}  # block -> digest -> payload
        self._num_bytes = 0

    async def add(self, block: int) -> None:
        """Copies a block as it is now, chunk by chunk, unless there is no room for all of it."""
        copied = self._chunks.get(block, {})
        size = self._reference.layout.blocks[block].size
        if self._num_bytes and self._num_bytes + EXACT.num_bytes(size) > self._max_bytes:
            return
        for chunk in chunks_of(self._reference.layout.blocks[block]):
            digest = self._reference.digest_of(chunk)
            if digest not in copied:
                payload = self.encode(chunk, digest)
                if payload is None:
                    return
                copied = self._chunks.setdefault(block, {})
                copied[digest] = payload
                self._num_bytes += len(payload)
                await asyncio.sleep(0)  # lets the round that is under way proceed

    def encode(self, chunk: Chunk, digest: bytes) -> bytes | None:
        """Encodes a chunk with this digest; None if it has another one, or is being changed."""
        payload = EXACT.encode(self._reference.values_N[chunk.start : chunk.start + chunk.size])
        # Only now, since a commit begins, and ends, in another thread.
        is_current = chunk.block not in self._reference.changing and digest == self._reference.digest_of(chunk)
        return payload if is_current else None

    def get(self, block: int, digest: bytes) -> bytes | None:
        """Returns a copied chunk, None if there is none."""
        return self._chunks.get(block, {}).get(digest)

    def keep_only(self, blocks: Collection[int]) -> None:
        """Drops the copies of all other blocks."""
        for block in self._chunks.keys() - set(blocks):
            self._num_bytes -= sum(map(len, self._chunks.pop(block).values()))


@dataclass(eq=False)
class Transfer:
    """Serves this peer's reference and downloads that of other peers."""

    transport: Transport
    rpc: Rpc
    run_id: str
    reference: Reference
    stall_timeout_s: float
    on_fault: FaultSink
    guests: Guests
    upload_mbps: float | None = None  # see base/rate_limit.py

    def __post_init__(self) -> None:
        self._name = f"{self.run_id}/fetch"
        self._chunks = [chunk for block in self.reference.layout.blocks for chunk in chunks_of(block)]
        self._limit = TransferLimit(self.upload_mbps)
        total_bytes = max(EXACT.num_bytes(self.reference.layout.num_elements), _LEAST_BYTES)
        self._of_strangers, self._of_hosts, self._of_members = (
            Budgets(times * total_bytes, _REFILL_S) for times in (_PER_STRANGER, _PER_HOST, _PER_MEMBER)
        )
        self._copies = Copies(self.reference)
        self._copying: set[asyncio.Task[None]] = set()
        # For each open stream: the blocks requested last, each with its newest request (chunk and digest).
        self._under_way: list[dict[int, tuple[int, bytes]]] = []
        self._serving = False

    async def start(self) -> None:
        """Registers the handlers; nothing is served before `open`."""
        await serve_channel(
            self.transport, self._name, self._serve_fetch, self.stall_timeout_s, self.on_fault, self.guests
        )
        await self.rpc.serve("table", self._serve_table)

    def open(self) -> None:
        """Marks this peer's reference as complete: other peers may fetch it from now on."""
        self._serving = True

    @contextmanager
    def round_under_way(self) -> Iterator[None]:
        """While this is open, transfers yield to a round's exchange, and those under way survive its commit."""
        with self._limit.round_under_way():
            task = asyncio.create_task(self._copy_blocks_under_way())
            self._copying.add(task)  # the event loop itself does not keep tasks alive
            task.add_done_callback(self._copying.discard)
            yield

    async def _copy_blocks_under_way(self) -> None:
        for number, digest in [request for blocks in self._under_way for request in blocks.values()]:
            await self._copy_if_current(number, digest)

    async def _copy_if_current(self, number: int, digest: bytes) -> None:
        # For a newcomer that fetches a block as it was before an earlier commit, there are copies already.
        if self.reference.digest_of(self._chunks[number]) == digest:
            await self._copies.add(self._chunks[number].block)

    # The newcomer.

    async def download(
        self,
        donors: Callable[[], Collection[str]],
        partial: Path | None = None,
        on_progress: Callable[[events.SyncProgress], None] = lambda progress: None,
    ) -> TransferReport:
        """Brings this peer's reference up to date with the donors', which are asked for repeatedly.

        `partial` is a file for the chunks that have arrived, in case this process is killed. `on_progress` is called
        about once a second.

        Raises:
            TransferError: no donor answered, or none delivered.
        """
        links = self._links(donors)
        kept = PartialReference(partial) if partial is not None else None
        download = Download(self.reference, links, self.stall_timeout_s, kept, self.on_fault, on_progress)
        try:
            return await download.run()
        finally:
            if kept is not None and kept.error is not None:
                error = ProtocolError("disk", f"fetched chunks could not be kept in {partial}: {kept.error}")
                self.on_fault(self.transport.peer_id, error)

    async def vote(self, donors: Callable[[], Collection[str]]) -> ReferenceTable | None:
        """Returns what a download would fetch: the table that most donors have, None if no donor answers."""
        table, _ = await DonorVote(self._links(donors), self.on_fault).vote()
        return table

    def _links(self, donors: Callable[[], Collection[str]]) -> Donors:
        return Donors(self.transport, self.rpc, self._name, self.reference.layout, self.stall_timeout_s, donors)

    # The donor.

    async def _serve_table(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        if not self._serving:
            return {"error": "this peer has no complete reference yet"}
        return table_to_wire(self.reference.table)

    async def _serve_fetch(self, channel: Channel) -> None:
        blocks: dict[int, tuple[int, bytes]] = {}
        self._under_way.append(blocks)
        try:
            while True:
                frame = await channel.receive(MAX_REQUEST_BYTES)
                for number, digest in read_request(frame, len(self._chunks)):
                    if not self._serving:
                        raise ProtocolError("unready", "this peer has no complete reference yet")
                    payload = await self._payload(channel, number, digest)
                    if payload is not None:
                        self._spend(channel, len(payload))
                        await self._note_under_way(blocks, number, digest)
                    await self._send_chunk(channel, number, payload)
        finally:
            self._under_way = [other for other in self._under_way if other is not blocks]
            self._drop_copies()

    def _spend(self, channel: Channel, num_bytes: int) -> None:
        """Books a chunk that is about to be sent; raises ProtocolError (`budget`) if its receiver has had too many."""
        if not self.guests.admits(channel.peer_id):  # it may have been revoked meanwhile
            raise ProtocolError("stranger", "this peer is not in the run")
        budgets = [(self._of_members, channel.peer_id)]
        if not self.guests.is_member(channel.peer_id):
            budgets = [(self._of_strangers, channel.peer_id), (self._of_hosts, host_of(channel.address))]
        if not all(budget.allows(taker, num_bytes) for budget, taker in budgets):
            raise ProtocolError("budget", "this donor has sent its reference there too often; ask another, or wait")
        for budget, taker in budgets:
            budget.spend(taker, num_bytes)

    async def _note_under_way(self, blocks: dict[int, tuple[int, bytes]], number: int, digest: bytes) -> None:
        block = self._chunks[number].block
        is_new = blocks.pop(block, None) is None
        blocks[block] = number, digest
        if not is_new:
            return
        if len(blocks) > _BLOCKS_PER_STREAM:
            del blocks[next(iter(blocks))]
        self._drop_copies()
        if self._limit.yields:
            await self._copy_if_current(number, digest)

    def _drop_copies(self) -> None:
        self._copies.keep_only({block for blocks in self._under_way for block in blocks})

    async def _payload(self, channel: Channel, number: int, digest: bytes) -> bytes | None:
        """Returns the chunk with that digest, None if there is none, or no longer one.

        While a commit changes it, it cannot be told which; the newcomer is sent keepalives meanwhile.
        """
        chunk, loop = self._chunks[number], asyncio.get_running_loop()
        told_at = loop.time()
        while True:
            if digest == self.reference.digest_of(chunk):
                payload = self._copies.encode(chunk, digest)
                if payload is not None:
                    return payload
            copied = self._copies.get(chunk.block, digest)
            if copied is not None or chunk.block not in self.reference.changing:
                return copied
            await asyncio.sleep(_RECHECK_S)
            if loop.time() - told_at > self.stall_timeout_s / 4:
                await channel.send(Frame(FrameKind.KEEPALIVE))
                told_at = loop.time()

    async def _send_chunk(self, channel: Channel, number: int, payload: bytes | None) -> None:
        for frame in piece_frames(number, payload, self.reference.round):
            await self._wait_for_turn(channel, len(frame.payload))
            await channel.send(frame)

    async def _wait_for_turn(self, channel: Channel, num_bytes: int) -> None:
        """Waits until the rate limit lets these bytes pass, and sends the newcomer keepalives meanwhile."""
        loop = asyncio.get_running_loop()
        place, told_at = self._limit.book(num_bytes), loop.time()
        while (wait_s := self._limit.wait_s(place)) > 0:
            await asyncio.sleep(min(wait_s, _RECHECK_S))
            if loop.time() - told_at > self.stall_timeout_s / 4:
                await channel.send(Frame(FrameKind.KEEPALIVE))
                told_at = loop.time()
