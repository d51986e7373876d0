"""The libp2p daemon (p2pd) of this peer, started so that it cannot outlive it.

hivemind can start the daemon itself, but then a SIGKILL of the peer leaves it running with its sockets in /tmp. Here it
gets the parent-death signal, its sockets lie in a directory that the next peer on this machine cleans up, and addresses
are dialled one by one, so that a failed bootstrap can say which address failed and why.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import psutil
from hivemind.p2p import P2P, PeerID
from hivemind.utils.multiaddr import Multiaddr

from spes_swarm.errors import AddressError, BootstrapError, NetworkProcessError
from spes_swarm.lifetime import die_with_parent

_SOCKET_PREFIX = "spes_swarm-"
_START_TIMEOUT_S = 30.0


class Daemon:
    """A running p2pd and the hivemind client that talks to it.

    Created in the main thread of the network process: the daemon dies with that thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], p2p: P2P, sockets: Path) -> None:
        self._process = process
        self._sockets = sockets
        self.p2p = p2p
        self.peer_id = str(p2p.peer_id)

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] = (),
        *,
        client_mode: bool = False,
    ) -> Daemon:
        """Starts p2pd and waits until it answers.

        Raises:
            AddressError: it cannot listen on the given addresses.
            NetworkProcessError: it did not start; the message has its last words.
        """
        _remove_stale_sockets()
        sockets = Path(tempfile.mkdtemp(prefix=f"{_SOCKET_PREFIX}{os.getpid()}-"))
        control = Multiaddr(f"/unix{sockets}/p2pd.sock")
        arguments = [
            f"-listen={control}",
            f"-id={identity_path}",
            "-dhtClient=1" if client_mode else "-dhtServer=1",
            "-autonat=1",
            "-connManager=1",
            "-natPortMap=1",
            "-relay=1",
            "-tls=1",
            f"-idleTimeout={_START_TIMEOUT_S:.0f}s",
        ]
        if client_mode:
            arguments.append("-noListenAddrs=1")
        elif host_maddrs:
            arguments.append("-hostAddrs=" + ",".join(host_maddrs))
        if announce_maddrs:
            arguments.append("-announceAddrs=" + ",".join(announce_maddrs))
        parent = os.getpid()
        log = sockets / "p2pd.log"
        with as_file(files("hivemind.hivemind_cli") / "p2pd") as executable, log.open("wb") as output:
            process = subprocess.Popen(
                [str(executable), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,  # Ctrl-C must reach the trainer, which leaves the swarm, and not the daemon
                preexec_fn=lambda: die_with_parent(parent),
            )
        try:
            p2p = await asyncio.wait_for(_attach(process, sockets, control), _START_TIMEOUT_S)
        except (TimeoutError, OSError) as exc:
            process.kill()
            words = log.read_text(errors="replace").strip().splitlines()[-1:]
            shutil.rmtree(sockets, ignore_errors=True)
            reason = " ".join(words) or str(exc)
            if "listen" in reason:
                raise AddressError(f"cannot listen on {', '.join(host_maddrs)}: {reason}") from exc
            raise NetworkProcessError(f"the P2P daemon did not start: {reason}") from exc
        return cls(process, p2p, sockets)

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether p2pd still runs and its answers are still read."""
        return self._process.poll() is None and not self.p2p._client.control._read_task.done()

    async def maddrs(self) -> list[str]:
        """Addresses under which others may reach this peer, each ending in /p2p/PEER_ID."""
        try:
            return [str(maddr) for maddr in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # there is none: client mode, or a machine without a network
            return []

    async def connections(self) -> dict[str, list[str]]:
        """Connected peers with the addresses under which they were reached, each ending in /p2p/PEER_ID."""
        return {
            str(info.peer_id): [f"{maddr}/p2p/{info.peer_id}" for maddr in info.addrs]
            for info in await self.p2p.list_peers()
        }

    async def connect(self, maddr: str, timeout_s: float) -> str:
        """Dials one address and returns the peer id behind it.

        Raises:
            OSError: nobody answers there; the message says why.
        """
        parsed = Multiaddr(maddr)
        peer_id = PeerID.from_base58(parsed["p2p"])
        if str(peer_id) == self.peer_id:
            raise ConnectionError("that is this peer's own address")
        try:
            await asyncio.wait_for(
                self.p2p._client.connect(peer_id, [parsed.decapsulate(f"/p2p/{peer_id}")]), timeout_s
            )
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
        except OSError:
            raise
        except Exception as exc:  # ControlFailure and its kin derive from Exception directly
            raise ConnectionError(_dial_reason(str(exc))) from exc
        return str(peer_id)

    async def stop(self) -> None:
        """Ends p2pd and removes its sockets."""
        await self.p2p.shutdown()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)


async def _attach(process: subprocess.Popen[bytes], sockets: Path, control: Multiaddr) -> P2P:
    # `replicate` names the client's own socket after this prefix; a subclass keeps it inside our directory.
    client: Any = type("P2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{sockets}/"})
    while True:
        if process.poll() is not None:
            raise ConnectionError(f"it ended with code {process.returncode}")
        if (sockets / "p2pd.sock").exists():
            try:
                p2p: P2P = await client.replicate(control)
                p2p._client.control._pending_calls = _PendingCalls()
                return p2p
            except (ConnectionError, FileNotFoundError):
                pass  # the socket file is there a moment before the daemon accepts on it
        await asyncio.sleep(0.02)


class _PendingCalls(dict[Any, asyncio.Future[Any]]):
    """Calls that wait for an answer; those whose caller has given up count as absent.

    hivemind 1.1.12 stores an answer without looking whether its future still waits. When a call times out in the very
    moment its answer arrives, that raises inside the task that reads from the daemon, and from then on no unary call of
    this process, the DHT's included, is ever answered again. (Seen in tests that kill a peer during an exchange.)
    """

    def __contains__(self, key: object) -> bool:
        future = self.get(key)
        return future is not None and not future.done()


def _dial_reason(message: str) -> str:
    """The useful end of libp2p's "failed to dial: ... * [/ip4/...] dial tcp 1.2.3.4:5: connect: connection refused"."""
    lines = [line.strip(" *") for line in message.splitlines() if line.strip()]
    detail = next((line for line in reversed(lines) if "dial" in line or "connect" in line), lines[-1] if lines else "")
    return detail.rsplit("] ", 1)[-1] or "the dial failed"


def _remove_stale_sockets() -> None:
    """Removes the socket directories of peers on this machine that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_SOCKET_PREFIX}*-*"):
        pid = directory.name.removeprefix(_SOCKET_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


async def bootstrap(daemon: Daemon, maddrs: Sequence[str], timeout_s: float) -> list[str]:
    """Connects to the initial peers, retrying with back-off until one answers. Returns the peer ids that did.

    Raises:
        BootstrapError: none answered within `timeout_s`; the message names each address and why it failed.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    delay_s = 0.5
    reasons: dict[str, str] = {}
    while True:
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 1.0)
        outcomes = await asyncio.gather(
            *(daemon.connect(maddr, min(10.0, remaining_s)) for maddr in maddrs), return_exceptions=True
        )
        connected = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if connected:
            return connected
        for maddr, outcome in zip(maddrs, outcomes, strict=True):
            if "backoff" not in str(outcome):  # libp2p refuses to redial at once; what failed before is the reason
                reasons[maddr] = str(outcome)
        if asyncio.get_running_loop().time() + delay_s > deadline:
            details = "; ".join(f"{maddr}: {reasons.get(maddr, 'no answer')}" for maddr in maddrs)
            raise BootstrapError(
                f"none of the {len(maddrs)} initial peers answered within {timeout_s:.0f} s "
                f"(are they running, and is the port open?): {details}"
            )
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, 10.0)
