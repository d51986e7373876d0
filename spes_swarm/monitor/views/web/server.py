"""The web server of the page and its API, in the same event loop as the rest of the monitor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from spes_swarm.base.errors import UserError
from spes_swarm.monitor.state import StateSource
from spes_swarm.monitor.views.web.app import build_app
from spes_swarm.monitor.views.web.feed import Feed

MAX_CONNECTIONS: Final = 256
TIMEOUT_S: Final = 20.0  # for a request to arrive, and for a browser to read a response
_GOODBYE_S: Final = 2


async def serve(source: StateSource, listener: socket.socket, *, announce: Callable[[str], None] | None = None) -> None:
    """Serves `source` on a socket of `listen` until cancelled, then closes it; calls `announce` with the page's URL."""
    address, bound_port = listener.getsockname()[:2]
    feed = Feed(source)
    app = build_app(source, feed, loopback_only=ipaddress.ip_address(address.partition("%")[0]).is_loopback)
    config = uvicorn.Config(
        app,
        http=_TimedProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_GOODBYE_S,
    )
    server = _Server(config)
    if announce is not None:
        announce(f"http://{f'[{address}]' if ':' in address else address}:{bound_port}/")
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="monitor web server")
    following = asyncio.create_task(feed.run(), name="monitor event feed")
    try:
        await asyncio.wait((serving, following), return_when=asyncio.FIRST_COMPLETED)
    finally:
        following.cancel()
        feed.close()
        server.should_exit = True
        await asyncio.wait((serving, following))
        listener.close()
    for task in (serving, following):
        if not task.cancelled():
            task.result()  # raises the error that ended it


class _Server(uvicorn.Server):
    """Leaves signals, such as Ctrl-C, to the command that runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _TimedProtocol(H11Protocol):
    """An HTTP connection that is aborted if the client sends no request or does not read the response.

    uvicorn limits only the pause between requests. A client that opens connections and sends nothing, or never reads a
    response, would hold file descriptors forever, and the monitor needs some for the swarm.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._check: asyncio.TimerHandle | None = None
        self._answered = 0
        self._stuck_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._check = self.loop.call_later(TIMEOUT_S, self._end_if_idle, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stuck_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stuck_since = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()

    def _end_if_idle(self, answered_before: int) -> None:
        asking = self.cycle is not None and not self.cycle.response_complete
        silent = not asking and self._answered == answered_before
        stuck = self._stuck_since is not None and self.loop.time() - self._stuck_since > TIMEOUT_S
        if silent or stuck:
            self.transport.abort()
            return
        self._check = self.loop.call_later(TIMEOUT_S, self._end_if_idle, self._answered)


def listen(host: str, port: int) -> socket.socket:
    """Binds the address `host`:`port` (0: any free port) for `serve`.

    Raises:
        UserError: the address cannot be used; the message says why.
    """
    where = f"{host}:{port}"
    if not 0 <= port <= 65535:
        raise UserError(f"{where}: a port is a number from 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UserError(f"{where}: no such host") from error
    # IPv4 if a name has both: browsers try both, tunnels and scripts often only IPv4.
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UserError(f"{where}: {_REASONS.get(error.errno or 0, error.strerror)}") from error
    return listener


_REASONS: Final = {
    errno.EADDRINUSE: "another program uses this port; choose another one, or 0 for any free one",
    errno.EACCES: "not allowed to use this port; ports from 1024 on need no privilege",
    errno.EADDRNOTAVAIL: "this machine has no such address; 127.0.0.1 and 0.0.0.0 always work",
}
