"""The monitor's web server in a thread of this process, with a made-up swarm behind it."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

from scripts.testing.synthetic_swarm import SyntheticSwarm
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.web import listen, serve

PATIENCE_S = 120.0  # the machine may be busy; nothing here takes as long otherwise


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Served:
    """A web server in a thread of its own, and the swarm that it shows."""

    def __init__(self, swarm: SyntheticSwarm, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.swarm = swarm
        self._host, self._port = host, port
        self._source = HeldState(swarm.state(), swarm.history())
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="web server under test")
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the monitor; does nothing when it has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()

        def announce(url: str) -> None:
            self.url = url
            self._ready.set()

        self._task = asyncio.create_task(serve(self._source, listen(self._host, self._port), announce=announce))
        await asyncio.wait((self._task,))
        assert self._task.cancelled()

    def tell(self, **changes: Any) -> None:
        """The monitor learns what the swarm is like now; `changes` are made to the state."""
        state, history = replace(self.swarm.state(), **changes), self.swarm.history()
        self._loop.call_soon_threadsafe(self._source.update, state, history)

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, headers=headers or {})
            answer = connection.getresponse()
            received = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, received, answer.read())

    @contextmanager
    def events(self) -> Iterator[Iterator[tuple[str, Any]]]:
        """The event stream, parsed, beats left out."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/api/events")
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            yield self._parsed(answer)
            answer.close()

    @staticmethod
    def _parsed(answer: http.client.HTTPResponse) -> Iterator[tuple[str, Any]]:
        name = ""
        while line := answer.readline().decode():
            field, _, value = line.rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data" and name != "beat":
                yield name, json.loads(value)


def a_swarm(num_peers: int = 4, rounds: int = 3) -> SyntheticSwarm:
    """A made-up swarm that has committed this many rounds."""
    swarm = SyntheticSwarm(num_peers=num_peers)
    swarm.advance(20.0 * rounds + 5)
    return swarm
