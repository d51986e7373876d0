"""Event streams: one reader of the source serves many browsers, and no browser can delay another.

The source is read once per change, however many browsers there are, and not at all if there are none. A browser that
falls behind is not sent its backlog, but the whole state once it is ready again. With a thousand peers, converting a
state to JSON takes a tenth of a second; a thread does it, because the event loop also serves the swarm's network.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from spes_swarm.monitor.state import HistoryPoint, StateSource
from spes_swarm.monitor.views.web.changes import Json, difference, new_points

MAX_STREAMS: Final = 64
BEAT_S: Final = 5.0  # a heartbeat at least this often; the page drops a stream that misses four
_MAX_BACKLOG: Final = 8  # changes queued for a slow browser before one whole state replaces them
_CHANGE_PAUSE_S: Final = 0.5
_PAUSE_PER_PEER_S: Final = 0.001  # a thousand peers: every 1.5 s


class Subscription:
    """The events queued for one browser."""

    def __init__(self) -> None:
        self.lagging = False
        self._backlog: list[bytes] = []
        self._ready = asyncio.Event()
        self._closed = False

    def offer(self, event: bytes) -> None:
        """Queues an event; if there are too many, drops all of them and requests a whole state with `lagging`."""
        if len(self._backlog) >= _MAX_BACKLOG:
            self._backlog.clear()
            self.lagging = True
        if not self.lagging:
            self._backlog.append(event)
        self._ready.set()

    def close(self) -> None:
        """Ends the stream after the queued events."""
        self._closed = True
        self._ready.set()

    async def take(self, timeout_s: float) -> bytes | None:
        """Returns all queued events at once; empty if none come within `timeout_s`, None if the stream has ended."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready.wait()
        except TimeoutError:
            return b""
        if not self._backlog and self._closed:
            return None
        if not self._closed:
            self._ready.clear()
        events = b"".join(self._backlog)
        self._backlog.clear()
        return events


class Feed:
    """Follows a source and sends its changes to the subscribers."""

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._state: Json | None = None  # as last published; None without subscribers
        self._history: Sequence[HistoryPoint] = ()
        self._whole: bytes | None = None  # the event with all of `_state`, encoded on first use
        self._subscriptions: set[Subscription] = set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        waiting = asyncio.create_task(self._source.wait_for_change(BEAT_S))
        try:
            while True:
                await waiting
                # Wait for the next change before reading this one, so that none during the pause is missed.
                waiting = asyncio.create_task(self._source.wait_for_change(BEAT_S))
                await asyncio.sleep(0)
                if self._subscriptions:
                    await self._publish()
                else:
                    self._take(None, ())
                peers = len(self._state["peers"]) if self._state else 0
                await asyncio.sleep(_CHANGE_PAUSE_S + _PAUSE_PER_PEER_S * min(peers, 2_000))
        finally:
            waiting.cancel()

    def subscribe(self) -> Subscription | None:
        """Opens a stream that begins with the whole state; None if there are too many."""
        if len(self._subscriptions) >= MAX_STREAMS:
            return None
        if self._state is None:
            self._take(self._source.state().to_json(), self._source.history())
        subscription = Subscription()
        subscription.offer(self._whole_event())
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Removes a stream."""
        self._subscriptions.discard(subscription)

    def whole(self, subscription: Subscription) -> bytes:
        """The event that brings a lagging browser up to date; clears `lagging`."""
        subscription.lagging = False
        return self._whole_event()

    def close(self) -> None:
        """Ends all streams."""
        for subscription in self._subscriptions:
            subscription.close()

    def _take(self, state: Json | None, history: Sequence[HistoryPoint]) -> None:
        self._state, self._history, self._whole = state, history, None

    def _whole_event(self) -> bytes:
        if self._whole is None:
            self._whole = event_bytes("state", self._state)
        return self._whole

    async def _publish(self) -> None:
        history = self._source.history()
        state = await asyncio.to_thread(self._source.state().to_json)
        old_state, old_history = self._state, self._history
        self._take(state, history)
        change = difference(old_state, state) if old_state is not None else None
        points = new_points(old_history, history)
        if change is None or points is None:
            event = self._whole_event()
        elif points:
            event = event_bytes("change", {**change, "history": [point.to_json() for point in points]})
        elif len(change) > 1:
            event = event_bytes("change", change)
        else:
            return  # only the time differs; heartbeats show that the monitor is alive
        for subscription in self._subscriptions:
            subscription.offer(event)


def event_bytes(name: str, value: Any) -> bytes:
    """Encodes one server-sent event. JSON escapes newlines, so the data is always one line."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'), allow_nan=False)}\n\n".encode()


class EventStream:
    """The ASGI endpoint of the event streams."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one stream until the browser disconnects or the monitor ends."""
        subscription = self._feed.subscribe()
        if subscription is None:
            busy = PlainTextResponse("too many open pages: close some\n", 503, {"Retry-After": "10"})
            await busy(scope, receive, send)
            return
        try:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] != "HEAD":
                await self._pump(subscription, receive, send)
            await send({"type": "http.response.body", "body": b""})
        finally:
            self._feed.unsubscribe(subscription)

    async def _pump(self, subscription: Subscription, receive: Receive, send: Send) -> None:
        hung_up = asyncio.create_task(_disconnected(receive))
        try:
            # A browser that stops reading blocks only this task, and the connection is cut after a while (server.py).
            while (events := await self._next(subscription, hung_up)) is not None:
                await send({"type": "http.response.body", "body": events, "more_body": True})
        finally:
            hung_up.cancel()

    async def _next(self, subscription: Subscription, hung_up: asyncio.Task[None]) -> bytes | None:
        taken = asyncio.create_task(subscription.take(BEAT_S))
        try:
            await asyncio.wait((taken, hung_up), return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done():
                return None
            events = taken.result()
        finally:
            taken.cancel()
        if subscription.lagging:
            return self._feed.whole(subscription)
        return event_bytes("beat", None) if events == b"" else events


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
