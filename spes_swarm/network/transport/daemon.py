"""This peer's libp2p daemon (p2pd), started so that it cannot outlive the peer.

hivemind can start the daemon itself, but then a SIGKILL of the peer leaves it running with its sockets in /tmp. Here it
gets the parent-death signal, and its sockets lie in a directory that the next peer on this machine cleans up. Addresses
are dialled one by one, so that a failed bootstrap can report which address failed and why.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import psutil
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
from multiaddr import Multiaddr

from spes_swarm.base.errors import AddressError, BootstrapError, NetworkProcessError
from spes_swarm.base.lifetime import die_with_parent
from spes_swarm.network.transport import hivemind_changes
from spes_swarm.network.transport.libp2p import Libp2p

# From the messages of p2pd.
_OTHER_PEER = re.compile(r"peer id mismatch: .* remote key matches (\w+)")
_NO_PEER = "message did not have trailing newline"
_SOCKET_PREFIX = "spes_swarm-"
_LONGEST_SOCKET = "p2pclient-0123456789a.sock"  # the form of hivemind's names for its own socket
_SOCKET_PATH_BYTES = 107  # Linux's sun_path, without the final NUL
_START_TIMEOUT_S = 30.0
_MAX_LINE = 1 << 16
_LOGGER = logging.getLogger(__name__)
_PORT_TIMEOUT_S = 3.0  # the p2pd of an earlier session, killed a moment ago, may still hold the port


class WrongAddressError(ConnectionError):
    """A peer will never answer at an address."""


class Daemon:
    """A running p2pd and the hivemind client that talks to it.

    Created in the main thread of the network process: the daemon dies with that thread.
    """

    def __init__(self, process: subprocess.Popen[bytes], p2p: P2P, sockets: Path, output: _Output) -> None:
        self._process = process
        self._output = output
        self._sockets = sockets
        self.p2p = p2p  # for the DHT
        self.transport = Libp2p(p2p)
        self.peer_id = str(p2p.peer_id)

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        host_maddrs: Sequence[str],
        announce_maddrs: Sequence[str] = (),
        *,
        client_mode: bool = False,
        private: bool = False,
    ) -> Daemon:
        """Starts p2pd and waits until it answers.

        In `client_mode` it does not listen at all. A `private` peer is one that others cannot open connections to.
        libp2p then tries to connect the ends of a circuit directly, from both sides at the same time (hole punching);
        by itself, it takes minutes to detect that this is needed. It learns its own public address once four peers with
        different addresses report it.

        Raises:
            AddressError: it cannot listen on the given addresses.
            NetworkProcessError: it did not start; the message has the last line of its log.
        """
        hivemind_changes.check_version()
        if not client_mode:
            for maddr in host_maddrs:
                if not await asyncio.to_thread(port_is_free, maddr, _PORT_TIMEOUT_S):
                    raise AddressError(f"cannot listen on {maddr}: the port is in use")
                if (problem := _why_not_bound(maddr)) is not None:
                    raise AddressError(f"cannot listen on {maddr}: {problem}")
        remove_stale_sockets()
        sockets = _make_socket_directory()
        control = HivemindMultiaddr(f"/unix{sockets}/p2pd.sock")
        arguments = _arguments(control, identity_path, host_maddrs, announce_maddrs, client_mode, private)
        parent = os.getpid()
        with as_file(files("hivemind.hivemind_cli") / "p2pd") as executable:
            process = subprocess.Popen(
                [str(executable), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,  # Ctrl-C must reach the trainer, which then leaves the swarm, not the daemon
                preexec_fn=lambda: die_with_parent(parent),
            )
        output = await _Output.read(process)
        try:
            p2p = await asyncio.wait_for(_attach(process, sockets, control), _START_TIMEOUT_S)
        except (TimeoutError, OSError) as exc:
            process.kill()
            await asyncio.to_thread(process.wait)
            shutil.rmtree(sockets, ignore_errors=True)
            reason = await output.last_line() or str(exc)
            if "listen" in reason:
                raise AddressError(f"cannot listen on {', '.join(host_maddrs)}: {reason}") from exc
            raise NetworkProcessError(f"the P2P daemon did not start: {reason}") from exc
        return cls(process, p2p, sockets, output)

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if p2pd is running and its answers are being read."""
        return self._process.poll() is None and not self.p2p._client.control._read_task.done()

    async def ending(self) -> str:
        """Says how p2pd ended, with its last words."""
        how = "does not answer" if (code := self._process.poll()) is None else f"has ended with code {code}"
        words = await self._output.last_line()
        return f"the P2P daemon (p2pd) {how}{words and ': '}{words}"

    async def maddrs(self) -> list[str]:
        """Addresses at which others may reach this peer, each ending in /p2p/PEER_ID."""
        try:
            return [str(maddr) for maddr in await self.p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # it has none: client mode, or a machine without a network
            return []

    async def connections(self) -> dict[str, list[str]]:
        """Connected peers with the remote address of each of their connections, each ending in /p2p/PEER_ID."""
        found: dict[str, list[str]] = {}
        for info in await self.p2p.list_peers():  # one entry for each connection
            found.setdefault(str(info.peer_id), []).extend(f"{maddr}/p2p/{info.peer_id}" for maddr in info.addrs)
        return found

    async def connect(self, maddr: str, timeout_s: float) -> str:
        """Dials one address and returns the peer id behind it.

        Raises:
            WrongAddressError: this peer will never answer there.
            OSError: no peer answers there; the message says why.
        """
        address, _, peer_id = maddr.rpartition("/p2p/")
        if peer_id == self.peer_id:
            raise WrongAddressError("that is this peer's own address")
        try:
            await self.connect_peer(peer_id, [address], timeout_s)
        except ConnectionError as exc:
            if "no good addresses" in str(exc):
                await _resolve(address)
            raise
        return peer_id

    async def connect_peer(self, peer_id: str, maddrs: Sequence[str], timeout_s: float) -> None:
        """Connects to a peer at any of these addresses (without /p2p/PEER_ID), or at those that libp2p has of it.

        Raises:
            OSError: it cannot be reached there; the message says why.
        """
        # hivemind's own Multiaddr writes the relay's peer id in a form that p2pd does not read.
        parsed = [Multiaddr(maddr) for maddr in maddrs]
        try:
            await asyncio.wait_for(self.p2p._client.connect(PeerID.from_base58(peer_id), parsed), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
        except OSError:
            raise
        except Exception as exc:  # ControlFailure and similar types derive from Exception directly
            reason, is_own = _dial_reason(str(exc), str(parsed[0]) if parsed else "")
            if is_own and (mismatch := _OTHER_PEER.search(reason)) is not None:
                raise WrongAddressError(f"another peer answers there, {mismatch[1]}; ask for a new address") from exc
            if is_own and _NO_PEER in reason:
                raise WrongAddressError("what answers there is not a peer; ask for a new address") from exc
            raise ConnectionError(reason) from exc

    async def disconnect(self, peer_id: str) -> None:
        """Closes all connections to a peer, if there are any."""
        try:
            await self.p2p._client.disconnect(PeerID.from_base58(peer_id))
        except (OSError, ControlFailure):
            return

    async def stop(self) -> None:
        """Ends p2pd and removes its sockets."""
        await self.p2p.shutdown()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        shutil.rmtree(self._sockets, ignore_errors=True)


class _Output(asyncio.Protocol):
    """What p2pd prints, which goes to the log."""

    def __init__(self) -> None:
        self._rest = b""
        self._last = ""
        self._ended = asyncio.Event()

    @classmethod
    async def read(cls, process: subprocess.Popen[bytes]) -> _Output:
        """Starts to read the output of a process."""
        _, output = await asyncio.get_running_loop().connect_read_pipe(cls, process.stdout)
        return output

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data)[-_MAX_LINE:].split(b"\n")
        for line in filter(None, (line.decode(errors="replace").strip() for line in lines)):
            self._last = line
            _LOGGER.info("p2pd: %s", line)

    def connection_lost(self, exc: Exception | None) -> None:
        self.data_received(b"\n")
        self._ended.set()

    async def last_line(self) -> str:
        """Returns the last line of a process that has ended; empty if there is none."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), 1.0)
        return self._last


def _arguments(
    control: Any,
    identity_path: Path,
    host_maddrs: Sequence[str],
    announce_maddrs: Sequence[str],
    client_mode: bool,
    private: bool,
) -> list[str]:
    """The command line of p2pd."""
    arguments = [
        f"-listen={control}",
        f"-id={identity_path}",
        "-dhtClient=1" if client_mode or private else "-dhtServer=1",
        "-autonat=1",  # also enables hole punching
        "-connManager=1",
        "-natPortMap=1",
        "-relay=1",  # this peer can be an end of circuits
        "-relayService=0",  # relay.py serves as the relay
        "-tls=1",
        f"-idleTimeout={_START_TIMEOUT_S:.0f}s",
    ]
    if private:
        arguments.append("-forceReachabilityPrivate=1")
    if client_mode:
        arguments.append("-noListenAddrs=1")
    elif host_maddrs:
        arguments.append("-hostAddrs=" + ",".join(host_maddrs))
    if announce_maddrs:
        arguments.append("-announceAddrs=" + ",".join(announce_maddrs))
    return arguments


async def _attach(process: subprocess.Popen[bytes], sockets: Path, control: HivemindMultiaddr) -> P2P:
    while True:
        if process.poll() is not None:
            raise ConnectionError(f"it ended with code {process.returncode}")
        if (sockets / "p2pd.sock").exists():
            try:
                return await hivemind_changes.connect(sockets, control)
            except (ConnectionError, FileNotFoundError):
                pass  # the socket file exists a moment before the daemon accepts on it
        await asyncio.sleep(0.02)


def _dial_reason(message: str, address: str) -> tuple[str, bool]:
    """The useful end of libp2p's "failed to dial: ... * [/ip4/...] dial tcp 1.2.3.4:5: connect: connection refused".

    libp2p also dials other addresses that it knows of the peer. Also returns whether the reason is that of `address`.
    """
    lines = [line.strip(" *") for line in message.splitlines() if line.strip()]
    tried = [line for line in lines if line.startswith("[")]  # one for each address
    own = [line for line in tried if line.startswith(f"[{address}]")]
    words = own or tried or [line for line in lines if "dial" in line or "connect" in line] or lines or [""]
    detail = words[-1]
    return detail.rsplit("] ", 1)[-1] or "the dial failed", bool(own) or len(tried) == 1


async def _resolve(address: str) -> None:
    """Raises an OSError that says why the host of an address to dial cannot be resolved, if it is a name."""
    _, kind, host, *_ = address.split("/")
    family = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}.get(kind)
    if family is None:
        return
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None, family=family)
    except socket.gaierror as exc:
        known = exc.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        raise (WrongAddressError if known else ConnectionError)(f"no address of {host!r}: {exc.strerror}") from exc


def port_is_free(maddr: str, timeout_s: float = 0.0) -> bool:
    """Returns True if no process listens on the port of a host address; waits for that up to `timeout_s`.

    p2pd shares its TCP ports (SO_REUSEPORT): on a port that another p2pd uses, it would start and get half of the
    other's connections.
    """
    deadline = time.monotonic() + timeout_s
    while _bind_error(maddr) == errno.EADDRINUSE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _bind_error(maddr: str) -> int | None:
    """Returns why this machine cannot listen on an address, as the system's error number; None if it can."""
    values = {protocol.name: value for protocol, value in Multiaddr(maddr).items()}
    host, port = values.get("ip4") or values.get("ip6"), values.get("tcp") or values.get("udp")
    if host is None or port is None:
        return None
    family = socket.AF_INET6 if "ip6" in values else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM if "tcp" in values else socket.SOCK_DGRAM) as probe:
            if "tcp" in values:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # lingering connections do not count
            probe.bind((host, int(port)))
            if "tcp" in values:
                probe.listen()
    except OSError as exc:
        return exc.errno
    return None


def _why_not_bound(maddr: str) -> str | None:
    """Returns why this machine cannot listen on an address, with advice; None if it can, or if p2pd knows better."""
    error = _bind_error(maddr)
    if error == errno.EACCES:
        return "permission denied; choose a port above 1023"
    if error != errno.EADDRNOTAVAIL or maddr.startswith("/ip6/::/"):
        return None
    announced = re.sub("/0(?=/|$)", "/31337", maddr)  # one has to choose a port
    _, _, _, transport = announced.split("/", 3)
    return (
        "no network interface of this machine has this address; if it is the public address of a router, give "
        f"--host-maddrs /ip4/0.0.0.0/{transport} --announce-maddrs {announced}"
    )


def with_port(host_maddrs: Sequence[str], port: int | None) -> list[str]:
    """Returns where to listen, with this port if the choice was left to the system."""
    if port is None or len(host_maddrs) != 1 or not host_maddrs[0].endswith("/tcp/0"):
        return list(host_maddrs)
    return [f"{host_maddrs[0].removesuffix('/0')}/{port}"]


def listen_again(host_maddrs: Sequence[str], port: int | None) -> list[str]:
    """Returns where to listen: on an earlier session's port, if the choice was left to the system and it is free."""
    again = with_port(host_maddrs, port)
    if again == list(host_maddrs) or all(port_is_free(maddr, _PORT_TIMEOUT_S) for maddr in again):
        return again
    return list(host_maddrs)


def _socket_parents() -> list[str]:
    """Directories for sockets: the user's choice (TMPDIR), then fallbacks if its path is too long for a socket."""
    return list(dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]))


def _make_socket_directory() -> Path:
    for parent in _socket_parents():
        try:
            directory = Path(tempfile.mkdtemp(prefix=f"{_SOCKET_PREFIX}{os.getpid()}-", dir=parent))
        except OSError:
            continue
        if len(os.fsencode(directory / _LONGEST_SOCKET)) <= _SOCKET_PATH_BYTES:
            return directory
        directory.rmdir()
    raise NetworkProcessError(
        f"no directory for the P2P daemon's sockets: tried {', '.join(_socket_parents())}; "
        "set TMPDIR to a writable directory with a path of at most 50 characters"
    )


def remove_stale_sockets() -> None:
    """Removes the socket directories of killed peers on this machine."""
    for directory in (path for parent in _socket_parents() for path in Path(parent).glob(f"{_SOCKET_PREFIX}*-*")):
        pid = directory.name.removeprefix(_SOCKET_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(directory, ignore_errors=True)


async def bootstrap(daemon: Daemon, maddrs: Sequence[str], timeout_s: float) -> list[str]:
    """Connects to the initial peers, retrying with back-off until one answers. Returns the ids of those that did.

    An address that can never answer is dialled once.

    Raises:
        BootstrapError: none answered within `timeout_s`; the message names each address and why it failed.
    """
    left = list(maddrs)
    deadline = asyncio.get_running_loop().time() + timeout_s
    delay_s = 0.5
    reasons: dict[str, str] = {}
    while True:
        remaining_s = max(deadline - asyncio.get_running_loop().time(), 1.0)
        outcomes = await asyncio.gather(
            *(daemon.connect(maddr, min(10.0, remaining_s)) for maddr in left), return_exceptions=True
        )
        connected = [outcome for outcome in outcomes if isinstance(outcome, str)]
        if connected:
            return connected
        for maddr, outcome in zip(left, outcomes, strict=True):
            if "backoff" not in str(outcome):  # libp2p refuses to redial at once; the earlier failure is the reason
                reasons[maddr] = str(outcome)
        left = [
            maddr for maddr, outcome in zip(left, outcomes, strict=True) if not isinstance(outcome, WrongAddressError)
        ]
        if not left or asyncio.get_running_loop().time() + delay_s > deadline:
            details = "; ".join(f"{maddr}: {reasons.get(maddr, 'no answer')}" for maddr in maddrs)
            if not left:
                raise BootstrapError(f"no initial peer can be reached: {details}")
            several = f"none of the {len(maddrs)} initial peers answered"
            raise BootstrapError(
                f"{'the initial peer did not answer' if len(maddrs) == 1 else several} within {timeout_s:.0f} s "
                f"(is a peer running there, and is its port open?): {details}"
            )
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, 10.0)
