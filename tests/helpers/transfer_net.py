"""A newcomer and donors in one process, each with a reference and the transfer service: in memory, or with daemons."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import ProtocolError
from spes_swarm.metrics.events import SyncProgress
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.transfer import donors as donors_module
from spes_swarm.network.transfer import download as download_module
from spes_swarm.network.transfer.transfer import Transfer
from spes_swarm.network.transport.daemon import Daemon
from spes_swarm.network.transport.interface import Transport
from spes_swarm.port.messages import TransferReport
from spes_swarm.protocol.consensus.layout import Layout
from spes_swarm.protocol.consensus.reference import CHUNK_ELEMENTS, Reference, chunks_of
from tests.helpers.hosts import MEMBERS
from tests.helpers.memory_network import MemoryNetwork
from tests.helpers.rounds import RUN_ID, identity

CHUNK_BYTES = 4 * CHUNK_ELEMENTS
STALL_S = 15.0  # nobody who is honest takes so long, however busy the machine

LAYOUT = Layout.build({"embed": (4 * CHUNK_ELEMENTS - 5,)}, {"up": (4, 2 * CHUNK_ELEMENTS + 11)})
TOTAL_BYTES = 4 * LAYOUT.num_elements
NUM_BLOCKS = len(LAYOUT.blocks)
NUM_CHUNKS = sum(1 for block in LAYOUT.blocks for _ in chunks_of(block))


@lru_cache(maxsize=8)
def weights(round_number: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What an honest peer holds after a round in which all blocks changed."""
    return np.random.default_rng(round_number).normal(0, 0.1, LAYOUT.num_elements).astype(np.float32)


class Node:
    """One peer with a reference and the transfer service."""

    def __init__(
        self,
        transport: Transport,
        rpc: Rpc,
        run_id: str,
        values_N: np.ndarray[Any, np.dtype[np.float32]],
        **options: Any,
    ) -> None:
        self.transport = transport
        self.run_id = run_id
        self.peer_id = transport.peer_id
        self.faults: list[tuple[str, str]] = []
        self.saw_a_fault = asyncio.Event()
        self.rpc = rpc
        self.rpc.on_fault = self._on_fault
        self.reference = Reference(LAYOUT, values_N)
        self.transfer = Transfer(
            transport,
            self.rpc,
            run_id,
            self.reference,
            **dict[str, Any](stall_timeout_s=STALL_S, on_fault=self._on_fault, guests=MEMBERS) | options,
        )
        self.others: list[str] = []
        self.progress: list[SyncProgress] = []
        self.on_progress: Callable[[SyncProgress], None] = lambda progress: None

    def _on_fault(self, peer_id: str, error: ProtocolError) -> None:
        self.faults.append((peer_id, error.kind))
        self.saw_a_fault.set()

    def commit(self, number: int, blocks: Sequence[int] = range(NUM_BLOCKS)) -> None:
        """What RoundState.commit does."""
        for index in blocks:
            block = LAYOUT.blocks[index]
            self.reference.values_N[block.start : block.stop] = weights(number)[block.start : block.stop]
        self.reference.finish(number, [(index, number) for index in blocks])

    async def download(self, partial: Path | None = None) -> TransferReport:
        def note(progress: SyncProgress) -> None:
            self.progress.append(progress)
            self.on_progress(progress)

        return await self.transfer.download(lambda: self.others, partial, note)

    def kinds(self, who: Node) -> set[str]:
        return {kind for peer_id, kind in self.faults if peer_id == who.peer_id}


class Net:
    """Peers that serve one test after the other, each with services of its own: in memory, or daemons on 127.0.0.1."""

    def __init__(self, *, real: bool = False) -> None:
        self._runner = asyncio.Runner()
        self._network = None if real else MemoryNetwork()
        self._daemons: dict[str, Daemon] = {}  # by peer id
        self._rpcs: dict[str, Rpc] = {}
        self._run_ids = itertools.count()

    def run(self, test: Callable[[], Awaitable[None]], timeout_s: float = 120.0) -> None:
        """Runs a test in the loop of the peers."""

        async def bounded() -> None:
            await asyncio.wait_for(test(), timeout_s)

        self._runner.run(bounded())

    def close(self) -> None:
        """Ends the daemons."""

        async def stop() -> None:
            await asyncio.gather(*(daemon.stop() for daemon in self._daemons.values()))

        self._runner.run(stop())
        self._runner.close()

    def kill(self, node: Node) -> None:
        """Ends a peer's daemon, or cuts it off for the rest of its test."""
        if self._network is not None:
            self._network.cut(node.peer_id)
        else:
            os.kill(self._daemons[node.peer_id].pid, signal.SIGKILL)

    def is_alive(self, node: Node) -> bool:
        """Returns False for a peer that has been killed."""
        return node.peer_id in self._network if self._network is not None else self._daemons[node.peer_id].is_alive

    async def connect(self, node: Node, other: Node) -> None:
        """Connects two peers."""
        if self._network is None:
            maddrs = await self._daemons[other.peer_id].maddrs()
            await self._daemons[node.peer_id].connect(next(m for m in maddrs if "127.0.0.1" in m), 10.0)

    async def _join(self, number: int) -> tuple[Transport, Rpc]:
        who = identity(number)
        transport: Transport
        if self._network is not None:
            transport = self._network.join(who.peer_id)
        else:
            daemon = self._daemons.get(who.peer_id)
            if daemon is not None and not daemon.is_alive:  # a test has killed it
                await daemon.stop()
                daemon = None
            if daemon is not None:
                return daemon.transport, self._rpcs[who.peer_id]
            daemon = self._daemons[who.peer_id] = await Daemon.start(who.path, ["/ip4/127.0.0.1/tcp/0"])
            transport = daemon.transport
        rpc = self._rpcs[who.peer_id] = Rpc(transport, lambda peer_id, error: None)
        await rpc.start()
        return transport, rpc

    @asynccontextmanager
    async def peers(self, num_donors: int, **options: Any) -> AsyncIterator[tuple[Node, list[Node]]]:
        """A newcomer with zeros, and donors that are at round 1."""
        nodes: list[Node] = []
        run_id = f"{RUN_ID}-{next(self._run_ids)}"
        for number in range(num_donors + 1):
            values_N = weights(1).copy() if number else np.zeros(LAYOUT.num_elements, np.float32)
            nodes.append(Node(*await self._join(number), run_id, values_N, **(options if number else {})))
            await nodes[-1].transfer.start()
            if number:
                nodes[-1].commit(1)
                nodes[-1].transfer.open()
        newcomer, *donors = nodes
        for donor in donors:
            await self.connect(newcomer, donor)
            newcomer.others.append(donor.peer_id)
        yield newcomer, donors


@contextmanager
def running_net(*, real: bool = False) -> Iterator[Net]:
    """The peers of a file of tests, which do not wait as patiently as others do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(donors_module, "_UNSURE_S", 0.1)
        patch.setattr(download_module, "_PROGRESS_S", 0.05)
        net = Net(real=real)
        yield net
        net.close()


def assert_same(newcomer: Node, donor: Node) -> None:
    assert newcomer.reference.digest == donor.reference.digest
    assert newcomer.reference.round == donor.reference.round
    np.testing.assert_array_equal(newcomer.reference.values_N, donor.reference.values_N)
    assert Reference(LAYOUT, newcomer.reference.values_N).digests == newcomer.reference.digests


def kept_bytes(report: TransferReport) -> int:
    return report.payload_bytes - report.refetched_bytes - report.superseded_bytes
