"""Real daemons on this machine with the services around them, without training."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from hivemind.p2p import P2P, PeerID

from spes_swarm.base.errors import ProtocolError
from spes_swarm.network.link.daemon import Daemon, bootstrap
from spes_swarm.network.link.reach import ReachService
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import Guests
from tests.helpers.rounds import identity

MEMBERS = Guests(admits=lambda peer_id: True, is_member=lambda peer_id: True)


class Host:
    """A daemon with the services around it."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.peer_id = daemon.peer_id
        self.faults: list[ProtocolError] = []
        self.rpc = Rpc(daemon.p2p, lambda peer_id, error: self.faults.append(error))
        self.reach = ReachService(daemon, self.rpc)
        self.received = 0

    async def start(self) -> None:
        await self.rpc.start()
        await self.reach.start()

    async def maddrs(self) -> list[str]:
        return [maddr for maddr in await self.daemon.maddrs() if "127.0.0.1" in maddr]

    async def connect(self, other: Host) -> None:
        await bootstrap(self.daemon, await other.maddrs(), 60.0)

    async def listen(self) -> None:
        """Counts what arrives on streams named `sink`, and says how much it was."""

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = int.from_bytes(await reader.readexactly(8), "big")
            while self.received < size and (data := await reader.read(1 << 16)):
                self.received += len(data)
            writer.write(b"done")
            await reader.read()  # the sender closes: the daemon could drop the answer if this end did
            writer.close()

        await self.daemon.p2p.add_binary_stream_handler("sink", serve)

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


def run(scenario: Callable[[], Any], timeout_s: float = 600.0) -> None:
    asyncio.run(asyncio.wait_for(scenario(), timeout_s))
