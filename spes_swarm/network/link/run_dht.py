"""A process's part in the DHT of one run, and what every part answers: the time, and which run this is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

from hivemind.dht import DHTNode
from hivemind.dht.validation import RecordValidatorBase

from spes_swarm.base.errors import ProtocolError
from spes_swarm.config.manifest import Manifest
from spes_swarm.network.link.clock import Timekeeper, give_to_hivemind
from spes_swarm.network.link.daemon import Daemon
from spes_swarm.network.link.dht import join_dht
from spes_swarm.network.link.rpc import Rpc

Trust = Callable[[set[str]], Collection[str]]
"""Of the connected peers, those whose word on the time counts."""


class RunDht:
    """Joins and leaves the DHT, and keeps the swarm's time.

    Args:
        daemon: of this process.
        rpc: of this process.
        manifest: of the run.
        on_fault: told when a peer answers nonsense, or this machine's clock is wrong.

    Attributes:
        now: the swarm's time in Unix seconds.
        own_maddrs: addresses under which others may reach this process, once it has joined.
    """

    def __init__(
        self, daemon: Daemon, rpc: Rpc, manifest: Manifest, on_fault: Callable[[str, ProtocolError], None]
    ) -> None:
        self._daemon = daemon
        self._rpc = rpc
        self._manifest = manifest
        self._timekeeper = Timekeeper(rpc, manifest.run_id, daemon.peer_id, on_fault)
        self._node: DHTNode | None = None
        self.now = self._timekeeper.clock.now
        self.own_maddrs: list[str] = []

    @property
    def node(self) -> DHTNode:
        """The node; there is one between `join` and `leave`."""
        assert self._node is not None
        return self._node

    async def join(
        self,
        initial_peers: Sequence[str],
        validator: RecordValidatorBase,
        trust: Trust,
        *,
        client_mode: bool,
        **options: Any,
    ) -> None:
        """Takes the swarm's time and joins; `options` are further ones of `DHTNode.create`."""
        give_to_hivemind(self.now)
        trusted = set(trust(await self.connected()))
        await self._timekeeper.settle(trusted)
        self._node = await join_dht(self._daemon.p2p, initial_peers, validator, client_mode=client_mode, **options)
        self.own_maddrs = await self._daemon.maddrs()
        more = set(trust(await self.connected()))
        if more != trusted:  # the DHT has found them
            await self._timekeeper.settle(more)

    async def serve(self) -> None:
        """Answers others from now on."""
        await self._timekeeper.serve()
        await self._rpc.serve("manifest", self._serve_manifest)

    async def _serve_manifest(self, peer_id: str, request: dict[str, Any]) -> dict[str, Any]:
        del peer_id, request
        return dict(self._manifest.to_wire())

    async def check_time(self, trust: Trust) -> float:
        """Waits until the time is to be compared with that of the others, and corrects it; returns the step in s."""
        await asyncio.sleep(self._timekeeper.until_check_s())
        step_s = await self._timekeeper.check(trust(await self.connected()))
        if step_s < 0 and self._node is not None:
            self._node.blacklist.clear()  # it would keep peers out until a time that is now far away
        return step_s

    async def connected(self) -> set[str]:
        """Peers that this process has a connection to."""
        return {peer_id for peer_id in await self._daemon.connections() if peer_id != self._daemon.peer_id}

    async def leave(self) -> None:
        """Leaves the DHT."""
        if self._node is not None:
            await self._node.shutdown()
