"""Chunks in pieces, on streams and on disk: only data with the announced digest is used."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.transfer.chunk_stream import (
    PIECE_BYTES,
    ChunkAssembler,
    piece_frames,
    read_request,
    request_frame,
)
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.network.transfer.transfer import Copies, Transfer
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import CHUNK_ELEMENTS, Reference, chunk_digest, chunks_of
from spes_swarm.protocol.rounds.frames import Frame, FrameKind
from tests.helpers.hosts import MEMBERS
from tests.helpers.virtual_time import run_at_once

CHUNK_BYTES = 4 * CHUNK_ELEMENTS


def small_reference(seed: int = 0, shared: int = 3 * CHUNK_ELEMENTS + 7, expert: int = 50_000) -> Reference:
    layout = Layout.build({"embed": (shared,)}, {"up": (3, expert)})
    values_N = np.random.default_rng(seed).normal(0, 0.1, layout.num_elements).astype(np.float32)
    return Reference(layout, values_N)


REFERENCE = small_reference()
CHUNKS = [chunk for block in REFERENCE.layout.blocks for chunk in chunks_of(block)]


def payload_of(number: int) -> bytes:
    chunk = CHUNKS[number]
    return REFERENCE.values_N[chunk.start : chunk.start + chunk.size].tobytes()


def asking(*numbers: int) -> ChunkAssembler:
    arrivals = ChunkAssembler(CHUNKS)
    for number in numbers:
        arrivals.ask(number, REFERENCE.digest_of(CHUNKS[number]))
    return arrivals


def test_chunks_arrive_in_pieces_and_are_verified() -> None:
    arrivals = asking(0, 3, 1)
    for number in (0, 3):
        frames = list(piece_frames(number, payload_of(number), 7))
        assert [int.from_bytes(frame.extra, "little") for frame in frames] == [7] * len(frames)
        assert all(len(frame.payload) <= PIECE_BYTES for frame in frames)
        for frame in frames[:-1]:
            assert arrivals.take(frame) is None
        answer = arrivals.take(frames[-1])
        assert answer is not None
        assert answer.values_N is not None
        np.testing.assert_array_equal(answer.values_N.view(np.uint32), np.frombuffer(payload_of(number), "<u4"))
    assert arrivals.num_asked == 1
    (gone,) = piece_frames(1, None, 8)
    answer = arrivals.take(gone)
    assert answer is not None
    assert answer.values_N is None
    assert arrivals.num_asked == 0


@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (lambda f: dataclasses.replace(f[0], part=1), "part"),
        (lambda f: dataclasses.replace(f[0], part=2**32 - 1), "part"),
        (lambda f: dataclasses.replace(f[0], payload=f[0].payload[:-1]), "shape"),
        (lambda f: dataclasses.replace(f[0], payload=f[0].payload + b"\0"), "shape"),
    ],
)
def test_pieces_that_nobody_asked_for_are_refused(spoil: Callable[[list[Frame]], Frame], kind: str) -> None:
    frames = list(piece_frames(0, payload_of(0), 0))
    with pytest.raises(ProtocolError) as caught:
        asking(0).take(spoil(frames))
    assert caught.value.kind == kind


def test_a_chunk_ends_where_it_must() -> None:
    arrivals = asking(0)
    frames = list(piece_frames(0, payload_of(0), 0))
    arrivals.take(frames[0])
    with pytest.raises(ProtocolError, match="shape"):
        arrivals.take(dataclasses.replace(frames[1], payload=b""))  # "not any more", in the middle
    arrivals = asking(0)
    for frame in frames:
        arrivals.take(frame)
    with pytest.raises(ProtocolError, match="part"):
        arrivals.take(frames[0])  # and goes on


def test_wrong_values_are_refused() -> None:
    for spoiled, kind in ((b"\0" * 4, "digest"), (b"\xff" * 4, "nonfinite")):
        arrivals = asking(3)
        *frames, last = piece_frames(3, payload_of(3)[:-4] + spoiled, 0)
        for frame in frames:
            arrivals.take(frame)
        with pytest.raises(ProtocolError) as caught:
            arrivals.take(last)
        assert caught.value.kind == kind


def test_requests_are_checked() -> None:
    frame = request_frame({2: b"a" * 32, 0: b"b" * 32})
    assert read_request(frame, 3) == [(2, b"a" * 32), (0, b"b" * 32)]
    with pytest.raises(ProtocolError, match="part"):
        read_request(frame, 2)
    for payload in (b"", b"\xc1", b"\x90", request_frame({}).payload + b"\0"):
        with pytest.raises(ProtocolError, match="malformed"):
            read_request(Frame(FrameKind.HELLO, payload=payload), 3)
    with pytest.raises(ProtocolError, match="malformed"):
        read_request(request_frame({0: b"short"}), 3)
    with pytest.raises(ProtocolError, match="malformed"):
        read_request(Frame(FrameKind.KEEPALIVE), 3)


# On disk.


def test_what_was_written_is_read_back_and_the_rest_is_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    first = PartialReference(path)
    written = (0, 3, 4)
    for number in written:
        first.write(CHUNKS[number], np.frombuffer(payload_of(number), "<f4"))
    first.close()
    again = PartialReference(path)
    for number, chunk in enumerate(CHUNKS):
        values_N = again.read(chunk)
        right = values_N is not None and chunk_digest(values_N) == REFERENCE.digest_of(chunk)
        assert right is (number in written)
    again.remove()
    assert not path.exists()
    assert again.error is None
    assert again.read(CHUNKS[0]) is None
    again.write(CHUNKS[0], np.zeros(CHUNKS[0].size, np.float32))


def test_a_full_disk_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    path.symlink_to("/dev/full")
    partial = PartialReference(path)
    partial.write(CHUNKS[0], np.zeros(CHUNKS[0].size, np.float32))
    assert partial.error is not None
    assert "space" in partial.error
    assert not path.is_symlink()
    partial.write(CHUNKS[0], np.zeros(CHUNKS[0].size, np.float32))
    nowhere = PartialReference(tmp_path / "missing" / "partial")
    assert nowhere.error is not None
    assert nowhere.read(CHUNKS[0]) is None
    nowhere.remove()


# Copies for newcomers.


def test_copies_keep_what_a_commit_changes_until_they_are_dropped() -> None:
    async def test() -> None:
        reference = small_reference()
        copies = Copies(reference, max_bytes=3 * CHUNK_BYTES + 300_000)
        before = {
            chunk.index: (reference.digest_of(chunk), copies.encode(chunk, reference.digest_of(chunk)))
            for chunk in CHUNKS[:4]
        }
        await copies.add(0)
        await copies.add(1)
        await copies.add(2)  # no room
        digests = [reference.digest_of(next(iter(chunks_of(reference.layout.blocks[b])))) for b in (1, 2)]
        reference.values_N[:] += 1.0
        reference.finish(1, [(block, 1) for block in range(4)])
        for digest, payload in before.values():
            assert copies.get(0, digest) == payload
        assert copies.get(1, digests[0]) is not None
        assert copies.get(2, digests[1]) is None
        assert copies.get(0, reference.digest_of(CHUNKS[0])) is None
        copies.keep_only([1])
        assert copies.get(0, before[0][0]) is None
        await copies.add(2)
        copies.keep_only([])
        assert not copies._chunks
        assert not copies._num_bytes

    asyncio.run(test())


def test_a_chunk_that_a_commit_changes_is_not_encoded() -> None:
    reference = small_reference()
    copies, (first, *_) = Copies(reference, max_bytes=1), CHUNKS
    digest = reference.digest_of(first)
    assert copies.encode(first, bytes(32)) is None
    reference.changing = frozenset({first.block})
    assert copies.encode(first, digest) is None
    asyncio.run(copies.add(first.block))
    assert copies.get(first.block, digest) is None
    reference.finish(1, [])
    assert copies.encode(first, digest) is not None


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_newcomer_is_kept_waiting_while_a_commit_changes_what_it_has_asked_for(is_changed: bool) -> None:
    reference, stall_s = small_reference(), 8.0
    first, *_ = CHUNKS
    digest, sent = reference.digest_of(first), list[FrameKind]()
    nothing: Any = None

    async def send(frame: Frame) -> None:
        sent.append(frame.kind)
        if len(sent) == 2:
            reference.values_N[first.start] += is_changed
            reference.finish(1, [(first.block, 1)])

    async def test() -> bytes | None:
        transfer = Transfer(nothing, nothing, "run", reference, stall_s, nothing, MEMBERS)
        channel: Any = SimpleNamespace(send=send)
        reference.changing = frozenset({first.block})
        return await transfer._payload(channel, 0, digest)

    values = reference.values_N[first.start : first.start + first.size].tobytes()
    assert run_at_once(test(), stall_s) == (None if is_changed else values)
    assert sent == 2 * [FrameKind.KEEPALIVE]


def test_one_block_is_copied_however_large_it_is() -> None:
    async def test() -> None:
        copies = Copies(REFERENCE, max_bytes=1)
        await copies.add(0)
        assert all(copies.get(0, REFERENCE.digest_of(chunk)) for chunk in CHUNKS[:4])

    asyncio.run(test())
