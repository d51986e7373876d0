"""A process's node in the DHT of one run, and what every node answers: the time, the manifest and the tokenizer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from spes_swarm.base.decoding import MAX_TOKENIZER_BYTES
from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.network.link.clock import Timekeeper
from spes_swarm.network.link.door import Door
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import FaultSink
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.dht import DhtNode, RecordValidator
from spes_swarm.network.transport.hivemind_changes import Guard
from spes_swarm.storage.acts_file import ActsFile

_PIECE_BYTES = 1 << 20  # of a tokenizer, in one answer

Trust = Callable[[set[str]], Collection[str]]
"""Returns those of the connected peers whose clocks count."""


class RunDht:
    """Joins and leaves the DHT, and keeps the swarm's time. `on_fault` gets invalid answers, and wrong clocks."""

    def __init__(
        self,
        daemon: Daemon,
        rpc: Rpc,
        manifest: Manifest,
        on_fault: FaultSink,
        tokenizer: Path | None = None,
        acts: Path | None = None,
    ) -> None:
        """`tokenizer` is a file for peers that ask for it, `acts` the file of the run's acts."""
        self._daemon = daemon
        self._rpc = rpc
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._timekeeper = Timekeeper(rpc, manifest.run_id, daemon.peer_id, on_fault)
        self._node: DhtNode | None = None
        self.now = self._timekeeper.clock.now  # returns the swarm's time in Unix seconds
        self.door = Door(rpc, manifest, self.now, ActsFile(acts) if acts is not None else None)
        self.own_maddrs: list[str] = []  # addresses at which other peers may reach this process, once it has joined

    @property
    def node(self) -> DhtNode:
        """The DHT node; it exists between `join` and `leave`."""
        assert self._node is not None
        return self._node

    async def join(
        self,
        initial_peers: Sequence[str],
        validator: RecordValidator,
        trust: Trust,
        *,
        client_mode: bool,
        **options: Any,
    ) -> None:
        """Takes the swarm's time and joins the DHT; `options` are passed on to `DHTNode.create`."""
        await self.door.open(self._daemon.peer_id, trust(await self.connected()))
        trusted = await self._trusted(trust)
        await self._timekeeper.synchronise(trusted)
        guard = None if self.door.is_visible else Guard(self.door.sees, self._rpc.introduce)
        self._node = await DhtNode.start(
            self._daemon.p2p, initial_peers, validator, self.now, guard, client_mode=client_mode, **options
        )
        self.own_maddrs = await self._daemon.maddrs()
        more = await self._trusted(trust)
        if more != trusted:  # the DHT has found them
            await self._timekeeper.synchronise(more)

    async def serve(self) -> None:
        """Starts answering other peers."""
        await self._timekeeper.serve()
        await self._rpc.serve("manifest", self._serve_manifest)
        if self._tokenizer is not None:
            await self._rpc.serve("tokenizer", self._serve_tokenizer)

    async def _serve_manifest(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(self._manifest.to_wire())

    async def _serve_tokenizer(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id
        offset = request.get("offset")
        if not isinstance(offset, int) or not 0 <= offset <= MAX_TOKENIZER_BYTES:
            raise ProtocolError("malformed", "offset of a tokenizer")
        assert self._tokenizer is not None
        try:
            with self._tokenizer.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(offset)
                return {"piece": file.read(_PIECE_BYTES), "size": size}
        except OSError:
            return {"error": "the tokenizer cannot be read"}

    async def check_time(self, trust: Trust) -> float:
        """Waits until the next clock check, then corrects the clock; returns the step in seconds."""
        await asyncio.sleep(self._timekeeper.until_check_s())
        step_s = await self._timekeeper.check(await self._trusted(trust))
        if step_s < 0 and self._node is not None:
            self._node.forgive_all()  # it would exclude peers until a time that is now far away
        return step_s

    async def _trusted(self, trust: Trust) -> set[str]:
        return set(filter(self.door.admits, trust(await self.connected())))

    def has_met(self, peer_id: str) -> bool:
        """Returns True if a peer's DHT node has answered this one, or called it."""
        return self._node is not None and self._node.knows(peer_id)

    async def connected(self) -> set[str]:
        """Ids of the peers that this process is connected to."""
        return {peer_id for peer_id in await self._daemon.connections() if peer_id != self._daemon.peer_id}

    async def leave(self) -> None:
        """Leaves the DHT."""
        if self._node is not None:
            await self._node.stop()
