"""Peers without training: real daemons on this machine with the services around them, and peers in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from hivemind.p2p import P2P, PeerID

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.reach import ReachService
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Guests
from spes_swarm.network.transport.daemon import Daemon, bootstrap
from spes_swarm.network.transport.interface import Transport
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.rounds import identity

MEMBERS = Guests(admits=lambda peer_id: True, is_member=lambda peer_id: True)


class Endpoint:
    """A peer that answers calls."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.peer_id = transport.peer_id
        self.faults: list[ProtocolError] = []
        self.rpc = Rpc(transport, lambda peer_id, error: self.faults.append(error))

    async def start(self) -> None:
        await self.rpc.start()


class Host(Endpoint):
    """A daemon with the services around it."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.transport)
        self.daemon = daemon
        self.reach = ReachService(daemon, self.rpc)
        self.received = 0

    async def start(self) -> None:
        await super().start()
        await self.reach.start()

    async def maddrs(self) -> list[str]:
        return [maddr for maddr in await self.daemon.maddrs() if "127.0.0.1" in maddr]

    async def connect(self, other: Host) -> None:
        await bootstrap(self.daemon, await other.maddrs(), 60.0)

    async def listen(self) -> None:
        """Counts what arrives on streams named `sink`, and says how much it was."""

        async def serve(peer_id: str, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del peer_id, address
            size = int.from_bytes(await reader.readexactly(8), "big")
            while self.received < size and (data := await reader.read(1 << 16)):
                self.received += len(data)
            writer.write(b"done")
            await reader.read()  # the sender closes: the daemon could drop the answer if this end did
            writer.close()

        await self.transport.serve_streams("sink", serve)

    async def send(self, other: Host, size: int) -> str:
        """Sends so many bytes and waits until all have arrived; returns the address at the other end."""
        p2p: P2P = self.daemon.p2p
        info, reader, writer = await p2p.call_binary_stream_handler(PeerID.from_base58(other.peer_id), "sink")
        writer.write(size.to_bytes(8, "big"))
        for start in range(0, size, 1 << 16):
            writer.write(bytes(min(1 << 16, size - start)))
            await writer.drain()
        assert await asyncio.wait_for(reader.readexactly(4), 60) == b"done"
        writer.close()
        return str(info.addr)


@asynccontextmanager
async def hosts(count: int, clients: Collection[int] = (), first: int = 0) -> AsyncIterator[list[Host]]:
    """Daemons that know nothing of each other yet; those that are clients do not listen.

    `first`: the number of the first one's identity.
    """
    async with AsyncExitStack() as stack:
        started: list[Host] = []
        for number in range(first, first + count):
            maddrs = ["/ip4/127.0.0.1/tcp/0"]
            host = Host(await Daemon.start(identity(number).path, maddrs, client_mode=number in clients))
            stack.push_async_callback(host.daemon.stop)
            await host.start()
            started.append(host)
        yield started


@asynccontextmanager
async def connected(count: int, *, real: bool = False) -> AsyncIterator[Sequence[Endpoint]]:
    """Peers that are connected with each other: in memory, or through daemons."""
    if real:
        async with hosts(count) as found:
            for number, host in enumerate(found):
                for other in found[:number]:
                    await host.connect(other)
            yield found
    else:
        network = MemoryNetwork()
        endpoints = [Endpoint(network.join(identity(number).peer_id)) for number in range(count)]
        for endpoint in endpoints:
            await endpoint.start()
        yield endpoints


def run(scenario: Callable[[], Any], timeout_s: float = 600.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))
