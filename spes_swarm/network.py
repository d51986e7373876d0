"""The network process: everything of a peer that talks to other peers.

Forked from the trainer before CUDA starts. It runs one event loop with the P2P daemon's client, a DHT node, and the
services of the run, holds the reference and the contribution in memory shared with the trainer, and takes commands from
it over a pipe (see network_client.py). It ends when the trainer ends, however that happens.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import select
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from spes_swarm.connectivity import Connectivity
from spes_swarm.daemon import Daemon, bootstrap, remove_stale_sockets
from spes_swarm.download import SyncProgress, TransferReport
from spes_swarm.errors import NetworkProcessError, ProtocolError, RoundError, SwarmError
from spes_swarm.identity import Identity
from spes_swarm.lifetime import die_with_parent
from spes_swarm.lineage import Lineage
from spes_swarm.manifest import Manifest
from spes_swarm.manifest_query import ask_for_manifest
from spes_swarm.moments import Received
from spes_swarm.reach import Reach
from spes_swarm.reference import ReferenceTable
from spes_swarm.rpc import Rpc
from spes_swarm.service_messages import CaughtUp, Presence, RoundReport, RunSettings, SwarmView, TokenCounts
from spes_swarm.services import RunServices

_WATCH_S = 1.0
_SWEEP_EVERY = 10  # looks at the daemon between two looks for sockets of killed peers
_MAX_FAULTS_PER_PEER = 20  # between two commits; a hostile peer must not fill the log


class NetworkProcess:
    """Executes the trainer's commands; each public coroutine is one."""

    def __init__(self, pipe: Connection, identity: Identity) -> None:
        self._pipe = pipe
        self._identity = identity
        self._daemon: Daemon | None = None
        self._run: RunServices | None = None
        self._rpc: Rpc | None = None
        self._connectivity: Connectivity | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._round_task: asyncio.Task[Any] | None = None
        self._fault_counts: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    # Plumbing.

    async def serve(self) -> None:
        """Takes commands until the trainer says `stop` or goes away."""
        loop = asyncio.get_running_loop()
        incoming: asyncio.Queue[tuple[int, str, dict[str, Any]] | None] = asyncio.Queue()

        def read() -> None:
            try:
                while self._pipe.poll():
                    incoming.put_nowait(self._pipe.recv())
            except (EOFError, OSError):
                loop.remove_reader(self._pipe.fileno())
                incoming.put_nowait(None)

        loop.add_reader(self._pipe.fileno(), read)
        tasks: set[asyncio.Task[None]] = set()
        while True:
            command = await incoming.get()
            if command is None:
                break
            number, name, arguments = command
            task = asyncio.create_task(self._execute(number, name, arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if name == "stop":
                await task
                break

    async def _execute(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        try:
            self._send("reply", number, True, await getattr(self, name)(**arguments))
        except Exception as exc:  # whatever went wrong belongs to the caller, who is in the other process
            # Only our own errors are known to survive pickling; the caller must get an answer in any case.
            known = isinstance(exc, SwarmError)
            self._send("reply", number, False, exc if known else NetworkProcessError(f"{name} failed: {exc!r}"))

    def _send(self, *message: Any) -> None:
        with suppress(OSError):  # the trainer is gone; the next read ends this process
            self._pipe.send(message)

    def _tell(self, name: str, value: Any) -> None:
        """Sends an event, unless the trainer is stopped and its pipe is full: this process must not wait for it."""
        _, writable, _ = select.select([], [self._pipe], [], 0)
        if writable:
            self._send("event", name, value)

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """Reports a peer's fault to the trainer's metrics, a limited number of times for each peer and round."""
        self._fault_counts[peer_id] += 1
        if self._fault_counts[peer_id] <= _MAX_FAULTS_PER_PEER:
            self._tell("fault", {"kind": error.kind, "peer": peer_id, "detail": error.detail})

    def on_group(self, round_number: int, members: int) -> None:
        """Tells the trainer that the exchange of a round begins."""
        self._tell("group", {"round": round_number, "peers": members})

    def on_round_over(self) -> None:
        """Begins a new period for the limit on reported faults."""
        self._fault_counts.clear()

    def on_called(self, round_number: int) -> None:
        """Tells the trainer that a leader calls for a round."""
        self._tell("called", round_number)

    def on_view(self, view: SwarmView) -> None:
        """Tells the trainer about the others."""
        self._tell("view", view)

    # Commands.

    async def start_daemon(
        self,
        host_maddrs: list[str],
        announce_maddrs: list[str],
        client_mode: bool,
        relay: bool,
        private: bool = False,
    ) -> tuple[list[str], int]:
        """Starts p2pd, ending one that runs; returns this peer's addresses and the daemon's process id."""
        if self._daemon is not None and self._watcher is not None:
            self._watcher.cancel()
            await self._daemon.stop()
        self._daemon = await Daemon.start(
            self._identity.path, host_maddrs, announce_maddrs, client_mode=client_mode, private=private
        )
        self._watcher = asyncio.create_task(self._watch(self._daemon))
        self._rpc = Rpc(self._daemon.p2p, self.on_fault)
        self._rpc.on_silence = self._replace_connection
        await self._rpc.start()
        before = self._connectivity
        self._connectivity = Connectivity(
            self._daemon,
            self._rpc,
            announced=bool(announce_maddrs),
            relay=relay,
            tell=self._tell,
            on_fault=self.on_fault,
        )
        if before is not None:
            self._connectivity.found = before.found
        await self._connectivity.start()
        return await self._daemon.maddrs(), self._daemon.pid

    def _replace_connection(self, peer_id: str) -> None:
        """Closes connections over which nothing comes; the next call, or links.py, opens a new one."""
        assert self._daemon is not None
        task = asyncio.create_task(self._daemon.disconnect(peer_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self, daemon: Daemon) -> None:
        """Ends this process when the daemon is gone: the trainer notices, and says how to go on."""
        for look in itertools.count(1):
            if not daemon.is_alive:
                break
            if look % _SWEEP_EVERY == 0:  # a killed peer cannot tidy up; any other one on this machine does
                await asyncio.to_thread(remove_stale_sockets)
            await asyncio.sleep(_WATCH_S)
        self.on_fault(self._identity.peer_id, ProtocolError("daemon", "the P2P daemon (p2pd) has ended"))
        os._exit(1)

    async def bootstrap(self, maddrs: list[str], timeout_s: float) -> list[str]:
        """Connects to the initial peers; see daemon.bootstrap."""
        assert self._daemon is not None
        return await bootstrap(self._daemon, maddrs, timeout_s)

    async def fetch_manifest(self, peers: list[str], run_id: str | None, timeout_s: float) -> Manifest:
        """Asks peers for the manifest of the run they take part in.

        Raises:
            BootstrapError: none of them takes part in a run yet.
            ManifestError: what they sent fails verification.
        """
        assert self._rpc is not None
        return await ask_for_manifest(self._rpc, peers, run_id, timeout_s)

    async def check_reach(self) -> Reach:
        """Asks connected peers whether they can open connections to this one; see reach.py."""
        assert self._connectivity is not None
        return await self._connectivity.check()

    async def open_run(self, settings: RunSettings, review_reach: bool) -> None:
        """Joins the run's DHT and opens its services. The shared vectors hold the reference to begin with.

        `review_reach`: whether this peer's reachability is checked again from time to time.
        """
        assert self._daemon is not None
        assert self._rpc is not None
        assert self._connectivity is not None
        self._run = RunServices(self, self._daemon, self._rpc, self._identity, settings)
        await self._run.start()
        self._connectivity.attend(
            self._run,
            review=review_reach,
            is_busy=lambda: self._round_task is not None and not self._round_task.done(),
        )

    async def adopt(self, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int = 0) -> str:
        """Declares the shared reference (initial weights, a checkpoint, a publication) complete; returns its digest."""
        return self._services.adopt(table_round, versions, lineage, swarm_tokens)

    async def download(self, if_newer: bool, partial: Path | None = None) -> TransferReport | None:
        """Fetches the reference from the other peers; with `if_newer` only one that is newer than this peer's.

        `partial` keeps what has come in case this peer is killed; see Transfer.download.
        """

        def tell(progress: SyncProgress) -> None:
            self._tell("sync_progress", asdict(progress))

        return await self._services.download(if_newer, partial, tell)

    async def swarm_table(self) -> ReferenceTable | None:
        """Table of the reference that most of the other peers have, None if nobody answers."""
        return await self._services.catching_up.swarm_table()

    async def table(self) -> ReferenceTable:
        """Table of this peer's reference."""
        return self._services.reference.table

    async def lineage(self) -> tuple[list[int], bytes]:
        """Rounds and marks of the commits that led to this peer's reference; see lineage.py."""
        return self._services.lineage.to_lists()

    async def swarm_tokens(self) -> int:
        """Tokens of all peers that have gone into commits until the reference's round."""
        return self._services.swarm_tokens

    async def peer_maddrs(self) -> list[str]:
        """Addresses of the run's other peers that this peer is connected to."""
        return await self._services.peer_maddrs()

    async def claim(self, experts: tuple[int, ...] | int, room: int, fixed: bool) -> tuple[int, ...]:
        """Takes leases: of these experts, or of that many chosen by the rules; returns the experts held.

        `room`: how many this peer can hold at most; `fixed`: the choice is the user's and must not be changed later.
        """
        return await self._services.claim(experts, room, fixed)

    async def offer_moments(self, round_number: int, step: int, experts: tuple[int, ...], memory_fd: int) -> None:
        """Serves the moments of experts given up at a commit, in shared memory, to those who took the experts over."""
        self._services.offer_moments(round_number, step, experts, memory_fd)

    async def fetch_moments(
        self, round_number: int, sources: dict[int, tuple[str, ...]], memory_fd: int
    ) -> dict[int, Received]:
        """Fetches the moments of experts taken over at a commit into shared memory; returns those that came."""
        return await self._services.fetch_moments(round_number, sources, memory_fd)

    async def wait_until_fetched(self, timeout_s: float) -> bool:
        """Waits until all moments that are due have been fetched from here."""
        return await self._services.wait_until_fetched(timeout_s)

    async def set_presence(self, presence: Presence) -> None:
        """Updates what others see of this peer."""
        await self._services.set_presence(presence)

    async def volunteer(self, target: bytes | None, publishing: bool) -> None:
        """Tells others that this peer would publish there (None: nowhere), and whether it is at it; see election.py."""
        await self._services.volunteer(target, publishing)

    async def beat(self) -> None:
        """The trainer is alive: without this for a while, the peer counts as gone (see RunServices)."""
        if self._run is not None:
            self._run.beat()

    async def view(self) -> SwarmView:
        """Reads the records of the others now."""
        await self._services.refresh()
        return self._services.view()

    async def count_tokens(self) -> TokenCounts:
        """Asks the others directly how many tokens they have processed since the last commit."""
        return await self._services.count_tokens()

    async def run_round(self, tokens: int, routed: tuple[int, ...], leaving: bool) -> RoundReport | CaughtUp:
        """Holds a round with the contribution in shared memory; with `leaving` it is this peer's last.

        Raises:
            RoundError: nothing was committed, and reference and contribution are unchanged.
        """
        self._round_task = asyncio.current_task()
        try:
            return await self._services.run_round(tokens, routed, leaving)
        except RoundError:
            raise
        except Exception as exc:  # one failed round must not end the stay; the work is in the next difference
            raise RoundError(f"unexpected: {exc!r}") from exc

    async def cancel_round(self) -> None:
        """Gives up the round that is under way, if there is one; afterwards the reference is at rest."""
        if self._round_task is not None and not self._round_task.done():
            self._round_task.cancel()
            await asyncio.wait({self._round_task})

    async def traffic(self) -> tuple[int, int]:
        """Payload bytes (sent, received) of the last round, when the others have fetched their share from here."""
        return await self._services.traffic()

    async def stop(self) -> None:
        """Leaves: releases the lease, tells the others, ends the daemon."""
        if self._connectivity is not None:
            self._connectivity.stop()
        if self._run is not None:
            await self._run.leave()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._daemon is not None:
            await self._daemon.stop()

    @property
    def _services(self) -> RunServices:
        if self._run is None:
            raise RoundError("no run is open")
        return self._run


def run_network_process(pipe: Connection, identity_path: Path, trainer_pid: int) -> None:
    """Entry point of the forked process."""
    # A full collection would write into each object that was inherited from the trainer, and so copy all its memory.
    gc.freeze()
    die_with_parent(trainer_pid)
    os.setsid()  # Ctrl-C is for the trainer, which then tells this process to leave
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.getLogger("hivemind").setLevel(logging.ERROR)
    asyncio.run(NetworkProcess(pipe, Identity.load_or_create(identity_path)).serve())
