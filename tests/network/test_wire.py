"""Frames on a stream: every one bounded in size and time, whoever is at the other end."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.wire import MAX_EXTRA_BYTES, Channel, report_loop_errors
from spes_swarm.network.transport.interface import STREAM_ERRORS
from spes_swarm.protocol.rounds.frames import MAX_ERROR_BYTES, Frame, FrameKind

PATIENCE_S = 60.0  # for what succeeds
SHORT_S = 0.05  # for what is expected to run into its deadline
LIMIT = 1 << 20


def header(
    kind: int = 1, form: int = 0, num_extra: int = 0, part: int = 0, weight: float = 0.0, num_payload: int = 0
) -> bytes:
    """The documented header: kind, form, extra bytes, part, weight, payload bytes; little-endian."""
    return struct.pack("<BBHIdI", kind, form, num_extra, part, weight, num_payload)


@asynccontextmanager
async def pair(timeout_s: float = PATIENCE_S) -> AsyncIterator[tuple[Channel, Channel]]:
    """Two channels, one at each end of a socket pair."""
    ends = [await asyncio.open_connection(sock=end) for end in socket.socketpair()]
    try:
        yield Channel("left", *ends[0], timeout_s), Channel("right", *ends[1], timeout_s)
    finally:
        for _, writer in ends:
            writer.transport.abort()
        await asyncio.gather(*(writer.wait_closed() for _, writer in ends), return_exceptions=True)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 10)

    asyncio.run(bounded())


async def receive(data: bytes, *, end: bool = True, timeout_s: float = SHORT_S, limit: int = LIMIT) -> Frame:
    """What a channel makes of these bytes; `end`: nothing will follow them."""
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    if end:
        reader.feed_eof()
    return await Channel("peer", reader, None, timeout_s).receive(limit)  # type: ignore[arg-type]  # only reads


frames = st.builds(
    Frame,
    kind=st.sampled_from(FrameKind),
    form=st.integers(0, 255),
    part=st.integers(0, 2**32 - 1),
    weight=st.floats(allow_nan=False),
    extra=st.binary(max_size=50),
    payload=st.binary(max_size=200),
)


@pytest.mark.slow
@given(st.lists(frames, max_size=5))
def test_frames_arrive_as_they_were_sent(sent: list[Frame]) -> None:
    async def test() -> None:
        async with pair() as (left, right):
            for frame in sent:
                await left.send(frame)
            assert [await right.receive(LIMIT) for _ in sent] == sent

    run(test)


@pytest.mark.slow
def test_a_frame_larger_than_the_sockets_buffers_arrives() -> None:
    async def test() -> None:
        async with pair() as (left, right):
            frame = Frame(FrameKind.DATA, payload=bytes(range(256)) * 20_000)
            _, received = await asyncio.gather(left.send(frame), right.receive(len(frame.payload)))
            assert received == frame

    run(test)


def test_the_layout_on_the_wire() -> None:
    data = header(1, 1, 2, 7, 2.5, 3) + b"ab" + b"xyz"
    assert asyncio.run(receive(data)) == Frame(FrameKind.DATA, 1, 7, 2.5, b"ab", b"xyz")


@pytest.mark.parametrize(
    "sizes", [{"num_payload": 101}, {"num_payload": 2**32 - 1}, {"num_extra": MAX_EXTRA_BYTES + 1}], ids=str
)
def test_a_frame_that_is_too_long_is_refused_by_its_header_alone(sizes: dict[str, int]) -> None:
    """Nothing but the header is there: if the channel waited for the rest, this would time out instead."""
    with pytest.raises(ProtocolError) as error:
        asyncio.run(receive(header(**sizes), end=False, limit=100))
    assert error.value.kind == "oversized"


def test_the_largest_allowed_frame_is_accepted() -> None:
    data = header(num_extra=MAX_EXTRA_BYTES, num_payload=100) + b"e" * MAX_EXTRA_BYTES + b"p" * 100
    assert len(asyncio.run(receive(data, limit=100)).payload) == 100


@pytest.mark.parametrize("kind", [5, 77, 255])
def test_an_unknown_kind_is_malformed(kind: int) -> None:
    with pytest.raises(ProtocolError) as error:
        asyncio.run(receive(header(kind) + b"\0" * 100))
    assert error.value.kind == "malformed"


def test_a_stream_may_end_between_frames_and_nowhere_else() -> None:
    data = header(num_extra=3, num_payload=5) + b"abc" + b"12345"
    with pytest.raises(EOFError):
        asyncio.run(receive(b""))
    for length in range(1, len(data)):
        with pytest.raises(ProtocolError) as error:
            asyncio.run(receive(data[:length]))
        assert error.value.kind == "truncated"
    assert asyncio.run(receive(data)).payload == b"12345"


@pytest.mark.parametrize("begun", [b"", header()[:5], header(num_payload=5) + b"123"], ids=len)
def test_a_peer_that_falls_silent_costs_no_more_than_the_deadline(begun: bytes) -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(receive(begun, end=False))


async def send_without_end(channel: Channel) -> None:
    """Sends until all buffers on the way are full, and on."""
    while True:
        await channel.send(Frame(FrameKind.DATA, payload=b"\0" * LIMIT))


def test_a_peer_that_does_not_read_costs_no_more_than_the_deadline() -> None:
    async def test() -> None:
        async with pair(SHORT_S) as (left, _):
            with pytest.raises(TimeoutError):
                await send_without_end(left)

    run(test)


def test_a_peer_that_has_gone_is_a_broken_stream() -> None:
    async def test() -> None:
        async with pair() as (left, right):
            right.close()
            with pytest.raises(STREAM_ERRORS):
                await left.receive(LIMIT)
            with pytest.raises(STREAM_ERRORS):
                await send_without_end(left)
            await left.send_error("nobody hears this, and that is fine")

    run(test)


# Opening a conversation.


def test_a_hello_arrives() -> None:
    async def test() -> None:
        async with pair() as (left, right):
            await left.send_hello(group=b"\1\2", part=3)
            assert await right.receive_hello(1000) == {"group": b"\1\2", "part": 3}

    run(test)


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (Frame(FrameKind.DATA, payload=msgpack.packb({})), "malformed"),
        (Frame(FrameKind.END), "malformed"),
        (Frame(FrameKind.HELLO, payload=msgpack.packb([1])), "malformed"),
        (Frame(FrameKind.HELLO, payload=b"\xc1"), "malformed"),
        (Frame(FrameKind.HELLO, payload=b"\x91" * 500), "malformed"),
        (Frame(FrameKind.HELLO, payload=b"\0" * 1001), "oversized"),
    ],
    ids=repr,
)
def test_what_is_no_hello_is_refused(frame: Frame, kind: str) -> None:
    async def test() -> None:
        async with pair() as (left, right):
            await left.send(frame)
            with pytest.raises(ProtocolError) as error:
                await right.receive_hello(1000)
            assert error.value.kind == kind

    run(test)


def test_the_end_is_answered() -> None:
    async def answered_with(answer: Frame | None) -> FrameKind:
        async with pair() as (left, right):
            ending = asyncio.ensure_future(left.end())
            frame = await right.receive(LIMIT)
            if answer is not None:
                await right.send(answer)
            right.close()
            await ending
        return frame.kind

    assert asyncio.run(answered_with(Frame(FrameKind.END))) is FrameKind.END
    assert asyncio.run(answered_with(None)) is FrameKind.END  # lost with the stream
    with pytest.raises(ProtocolError, match="no such round") as caught:
        asyncio.run(answered_with(Frame(FrameKind.ERROR, payload=b"no such round")))
    assert caught.value.kind == "refused"


def test_nobody_answers_the_end() -> None:
    async def silence() -> None:
        async with pair(SHORT_S) as (left, _):
            with pytest.raises(TimeoutError):
                await left.end()

    run(silence)


@pytest.mark.parametrize("late", [b"", b"requests made in advance"])
def test_waiting_for_the_other_side_to_close(late: bytes) -> None:
    async def test() -> None:
        async with pair() as (left, right):
            waiting = asyncio.ensure_future(right.wait_until_closed())
            left._writer.write(late)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(waiting), SHORT_S)
            left.close()
            await waiting

    run(test)


def test_a_peer_that_never_closes_costs_no_more_than_the_deadline() -> None:
    async def test() -> None:
        async with pair(SHORT_S) as (_, right):
            await right.wait_until_closed()

    run(test)


def test_a_peer_that_keeps_sending_is_not_waited_for() -> None:
    async def test() -> None:
        async with pair() as (left, right):
            sending = asyncio.ensure_future(send_without_end(left))
            await right.wait_until_closed()
            assert not sending.done()
            right.close()
            with pytest.raises(STREAM_ERRORS):
                await sending

    run(test)


def test_an_error_is_told_within_its_limit() -> None:
    async def test() -> None:
        async with pair() as (left, right):
            await left.send_error("ä" * 10_000)
            frame = await right.receive(MAX_ERROR_BYTES)
            assert frame.kind is FrameKind.ERROR
            assert frame.payload == ("ä" * (MAX_ERROR_BYTES // 2)).encode()

    run(test)


@pytest.mark.slow
@given(
    st.binary(max_size=300)
    | st.builds(
        lambda kind, num_extra, num_payload, rest: header(kind, 0, num_extra, 0, 0.0, num_payload) + rest,
        st.integers(0, 6),
        st.integers(0, 40),
        st.integers(0, 300),
        st.binary(max_size=300),
    )
)
def test_no_bytes_fail_in_another_way(data: bytes) -> None:
    def outcome(hello: bool) -> Any:
        async def read() -> Any:
            reader = asyncio.StreamReader()
            reader.feed_data(data)
            reader.feed_eof()
            channel = Channel("peer", reader, None, PATIENCE_S)  # type: ignore[arg-type]  # only reads
            return await (channel.receive_hello(200) if hello else channel.receive(200))

        try:
            return asyncio.run(read())
        except (ProtocolError, *STREAM_ERRORS) as error:
            return error

    frame, hello = outcome(hello=False), outcome(hello=True)
    if isinstance(frame, Frame):
        assert data.startswith(header(frame.kind, frame.form, len(frame.extra), frame.part)[:8])
        assert len(frame.payload) <= 200
    else:
        assert not isinstance(hello, dict)


def test_errors_in_the_loop_are_one_line_and_what_is_cancelled_is_none(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.set()
        try:
            await reader.read()
        finally:
            writer.close()

    def fail() -> None:
        raise ValueError("unexpected")

    async def run() -> None:
        report_loop_errors(reported.append)
        asyncio.get_running_loop().call_soon(fail)
        server = await asyncio.start_server(serve, "127.0.0.1")
        other.connect(server.sockets[0].getsockname())
        await served.wait()
        server.close()  # the stream is still being served when the loop ends

    served = asyncio.Event()
    with socket.socket() as other:
        asyncio.run(run())
    assert len(reported) == 1
    assert "ValueError('unexpected')" in reported[0]
    assert "\n" not in reported[0]
    (record,) = caplog.records  # "never retrieved" would be another
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)
