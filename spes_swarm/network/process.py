"""The network process: all of a peer's communication with other peers.

It is forked from the trainer before CUDA starts. It runs one event loop with the P2P daemon's client, a DHT node and
the services of the run. The reference and the contribution lie in memory shared with the trainer, which sends commands
over a pipe (see client.py). The process ends when the trainer ends, however that happens.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import os
import select
import signal
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from spes_swarm.base import log
from spes_swarm.base.errors import NetworkProcessError, ProtocolError, SwarmError
from spes_swarm.base.lifetime import die_with_parent
from spes_swarm.config.manifest import Manifest
from spes_swarm.metrics import events
from spes_swarm.network.connectivity import Connectivity
from spes_swarm.network.diagnosis import stream_lines, task_lines
from spes_swarm.network.link.manifest_query import ask_for_manifest, ask_for_tokenizer
from spes_swarm.network.link.rpc import Rpc
from spes_swarm.network.link.wire import report_loop_errors
from spes_swarm.network.run_services import RunServices
from spes_swarm.network.transport.daemon import Daemon, bootstrap, remove_stale_sockets
from spes_swarm.port.commands import Commands, Notification, ProcessCommands, RunCommands
from spes_swarm.port.messages import Command, Reply, RunSettings
from spes_swarm.protocol.consensus.kernels import use_one_thread
from spes_swarm.protocol.members.identity import Identity

_WATCH_S = 1.0
_SWEEP_EVERY = 10  # checks of the daemon between two sweeps for sockets of killed peers
_MAX_FAULTS_PER_PEER = 20  # per round; a hostile peer must not fill the log
_REPORT_S = 60.0
_LOGGER = logging.getLogger(__name__)


class NetworkProcess(ProcessCommands):
    """Executes the trainer's commands. Those that need an open run are passed on to RunCommandHandler."""

    def __init__(self, pipe: Connection, identity: Identity) -> None:
        self._pipe = pipe
        self._identity = identity
        self._daemon: Daemon | None = None
        self._run: RunServices | None = None
        self._rpc: Rpc | None = None
        self._connectivity: Connectivity | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._fault_counts: Counter[str] = Counter()
        self._is_stopping = False
        self._closing: set[asyncio.Task[None]] = set()
        self._reported_at = -math.inf  # monotonic time

    # Plumbing.

    async def serve(self) -> None:
        """Executes commands until the trainer sends `stop` or exits."""
        loop = asyncio.get_running_loop()
        report_loop_errors(self._on_loop_error)
        log.enter_process("network", partial(loop.call_soon_threadsafe, self._write_report, "asked by a signal"))
        incoming: asyncio.Queue[Command | None] = asyncio.Queue()

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
                self._is_stopping = True
                break
            task = asyncio.create_task(self._execute(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if command.name == Commands.stop.__name__:
                await task
                break

    def _on_loop_error(self, detail: str) -> None:
        if not self._is_stopping:  # whatever is still under way then fails
            self.on_fault(self._identity.peer_id, ProtocolError("internal", detail))

    async def _execute(self, sent: Command) -> None:
        try:
            result = await getattr(self._executor(sent.name), sent.name)(*sent.args, **sent.kwargs)
            self._send(Reply(sent.number, result))
        except SwarmError as exc:
            self._send(Reply(sent.number, error=exc))
        except Exception as exc:  # the caller, which is in the other process, must get an answer in any case
            _LOGGER.exception("%s failed", sent.name)
            # Not the error itself: only our own are known to survive pickling.
            known = NetworkProcessError(f"{sent.name} failed: {exc!r}{log.where_to_read()}")
            self._send(Reply(sent.number, error=known))

    def _executor(self, name: str) -> ProcessCommands | RunCommands:
        if hasattr(ProcessCommands, name):
            return self
        if self._run is None:
            raise NetworkProcessError("no run is open")
        return self._run.commands

    def _send(self, message: Reply | Notification) -> None:
        with suppress(OSError):  # the trainer is gone; the next read ends this process
            self._pipe.send(message)

    def notify(self, notification: Notification) -> None:
        """Sends it to the trainer; drops it if the pipe is full because the trainer is stopped, so as not to block."""
        _, writable, _ = select.select([], [self._pipe], [], 0)
        if writable:
            self._send(notification)

    def on_fault(self, peer_id: str, error: ProtocolError) -> None:
        """Reports a peer's fault to the trainer's metrics, a limited number of times per peer and round."""
        self._fault_counts[peer_id] += 1
        if self._fault_counts[peer_id] <= _MAX_FAULTS_PER_PEER:
            _LOGGER.warning("fault of %s: %s", peer_id, error)
            self.notify(events.Fault(kind=error.kind, peer=peer_id, detail=error.detail))

    def on_round_over(self) -> None:
        """Resets the limit on reported faults."""
        self._fault_counts.clear()

    def report(self, why: str) -> None:
        """See port.commands.Listener; these are long, so one in a while is enough."""
        _LOGGER.warning("%s", why)
        if time.monotonic() - self._reported_at > _REPORT_S:
            self._reported_at = time.monotonic()
            asyncio.get_running_loop().call_soon(self._write_report, why)  # its own errors are not the caller's

    def _write_report(self, why: str) -> None:
        lines = [*(self._run.describe() if self._run is not None else ()), *stream_lines(), *task_lines()]
        _LOGGER.warning("%s: state of the network process\n%s", why, "\n".join(lines))

    # Commands.

    async def start_daemon(
        self, host_maddrs: list[str], announce_maddrs: list[str], client_mode: bool, relay: bool, private: bool = False
    ) -> list[str]:
        """See port.commands.ProcessCommands."""
        if self._daemon is not None and self._watcher is not None:
            self._watcher.cancel()
            await self._daemon.stop()
        self._daemon = await Daemon.start(
            self._identity.path, host_maddrs, announce_maddrs, client_mode=client_mode, private=private
        )
        self._watcher = asyncio.create_task(self._watch(self._daemon))
        admission = self._rpc.admission if self._rpc is not None else b""
        self._rpc = Rpc(self._daemon.transport, self.on_fault)
        self._rpc.admission = admission
        self._rpc.on_silence = self._replace_connection
        await self._rpc.start()
        self._connectivity = Connectivity(
            self._daemon,
            self._rpc,
            announced=bool(announce_maddrs),
            use_relays=relay,
            notify=self.notify,
            found=events.UNKNOWN_REACH if self._connectivity is None else self._connectivity.found,
        )
        await self._connectivity.start()
        return await self._daemon.maddrs()

    def _replace_connection(self, peer_id: str) -> None:
        """Closes a silent peer's connections; the next call, or links.py, opens a new one."""
        assert self._daemon is not None
        task = asyncio.create_task(self._daemon.disconnect(peer_id))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _watch(self, daemon: Daemon) -> None:
        """Ends this process if the daemon has ended; the trainer notices, and prints how to continue."""
        for look in itertools.count(1):
            if not daemon.is_alive:
                break
            if look % _SWEEP_EVERY == 0:  # a killed peer cannot clean up; any other peer on this machine does
                await asyncio.to_thread(remove_stale_sockets)
            await asyncio.sleep(_WATCH_S)
        self.on_fault(self._identity.peer_id, ProtocolError("daemon", await daemon.ending()))
        os._exit(1)

    async def bootstrap(self, maddrs: list[str], timeout_s: float) -> list[str]:
        """See port.commands.ProcessCommands."""
        assert self._daemon is not None
        return await bootstrap(self._daemon, maddrs, timeout_s)

    async def fetch_manifest(
        self, peers: list[str], run_id: str | None, timeout_s: float, admission: bytes = b""
    ) -> Manifest:
        """See port.commands.ProcessCommands."""
        assert self._rpc is not None
        self._rpc.admission = admission
        return await ask_for_manifest(self._rpc, peers, run_id, timeout_s, joins=True)

    async def fetch_tokenizer(self, peers: list[str], digest: str) -> bytes | None:
        """See port.commands.ProcessCommands."""
        assert self._rpc is not None
        return await ask_for_tokenizer(self._rpc, peers, digest)

    async def check_reach(self) -> events.Reach:
        """See port.commands.ProcessCommands."""
        assert self._connectivity is not None
        return await self._connectivity.check()

    async def open_run(self, settings: RunSettings, review_reach: bool) -> None:
        """See port.commands.ProcessCommands."""
        assert self._daemon is not None
        assert self._rpc is not None
        assert self._connectivity is not None
        services = self._run = RunServices(self, self._daemon, self._rpc, self._identity, settings)
        await services.start()
        self._connectivity.attend(services, review=review_reach)

    async def beat(self) -> None:
        """See port.commands.ProcessCommands."""
        if self._run is not None:
            self._run.announcer.beat()

    async def stop(self) -> None:
        """See port.commands.ProcessCommands."""
        self._is_stopping = True
        if self._connectivity is not None:
            self._connectivity.stop()
        if self._run is not None:
            await self._run.leave()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._daemon is not None:
            await self._daemon.stop()


def run_network_process(pipe: Connection, identity_path: Path, trainer_pid: int) -> None:
    """Entry point of the forked process."""
    # A full collection would write to every object inherited from the trainer, and so copy all of its memory.
    gc.freeze()
    die_with_parent(trainer_pid)
    os.setsid()  # Ctrl-C is for the trainer, which then tells this process to leave
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    use_one_thread()  # of torch's, in each of the threads that compute
    asyncio.run(NetworkProcess(pipe, Identity.load_or_create(identity_path)).serve())
