"""Virtual hosts joined by a switch whose cables can be cut, for experiments and tests of network failures.

Each host is a Linux network namespace with an `eth0`, one end of a veth pair to a bridge in a separate namespace. The
machine's own network is not touched, and no packet leaves the machine. This needs root and the commands `ip`, `tc` and
`bridge` (iproute2), but no packet filter: a cut is a wrong hardware address. Each host gets permanent neighbour entries
that map the hosts across the cut to an unused address, so the switch drops the packets, as a broken cable would.
Established connections stay open and see only silence.

A host can be behind a home router: another namespace that lets connections out, under its own address, and none in.

                     ┌─ eth0 host 0
    switch: bridge ──┼─ eth0 host 1
                     └─ eth0 router of host 2 lan0 ── eth0 host 2 (192.168.77.2)
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from spes_swarm.base.errors import SwarmError
from spes_swarm.testing.local_peer import PeerProcess

_PREFIX = "spes-swarm-"
_NOBODY = "02:00:00:00:00:00"  # a unicast hardware address that no host has
_NAMESPACES = Path("/run/netns")
_COMMAND_TIMEOUT_S = 30.0
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_MAX_HOSTS = 250
_LAN_ROUTER, LAN_HOST = "192.168.77.1", "192.168.77.2"  # inside every home network
_numbers = itertools.count()


class LocalNetworkError(SwarmError):
    """A network of namespaces cannot be created or changed; the message says why."""


def unavailable_reason() -> str | None:
    """Why local networks are unavailable here (no root, missing commands, not permitted); None if available."""
    if _LIBC is None:
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [command for command in ("ip", "tc", "bridge") if shutil.which(command) is None]
    if missing:
        return f"missing commands (install iproute2): {', '.join(missing)}"
    name = f"{_PREFIX}{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", name, "link", "add", "p0", "type", "veth", "peer", "name", "p1")
    except LocalNetworkError as exc:
        return str(exc)
    finally:
        _delete_namespace(name)
    return None


def enter_namespace(name: str) -> None:
    """Moves the calling thread, and all processes that it starts from now on, into a named network namespace.

    Raises:
        OSError: there is no such namespace, or this process may not enter it.
    """
    assert _LIBC is not None
    namespace = os.open(_NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"network namespace {name}: {os.strerror(number)}")
    finally:
        os.close(namespace)


class LocalNetwork:
    """`num_hosts` hosts in one IPv4 network, numbered from 0; a context manager.

    Args:
        num_hosts: number of hosts, 250 at most.
        behind_nat: hosts that share the address of a home router in front of them, which lets connections out only.
        prefix: first three numbers of the addresses. The default is from a public range (none of which is reachable
            from inside), because libp2p treats private addresses differently.

    Raises:
        LocalNetworkError: the network cannot be created here; see `unavailable_reason`.
    """

    def __init__(self, num_hosts: int, *, behind_nat: Collection[int] = (), prefix: str = "11.77.0") -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts must be 1 to {_MAX_HOSTS}, found {num_hosts}")
        self.num_hosts = num_hosts
        self._behind_nat = frozenset(map(self._checked, behind_nat))
        self._prefix = prefix
        self._name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._name}-switch"

    def __enter__(self) -> Self:
        reason = unavailable_reason()
        if reason is not None:
            raise LocalNetworkError(reason)
        _remove_stale_namespaces()
        try:
            _run("ip", "netns", "add", self._switch)
            self._ip(self._switch, "link", "add", "br0", "type", "bridge")
            self._ip(self._switch, "link", "set", "br0", "up")
            for host in range(self.num_hosts):
                self._add_host(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add_host(self, host: int) -> None:
        name, outside, port = self.namespace(host), self._outside(host), f"port{host}"
        for namespace in {name, outside}:
            _run("ip", "netns", "add", namespace)
            # An automatic IPv6 address would bypass a cut.
            _set(namespace, "ipv6/conf/all/disable_ipv6", 1)
            self._ip(namespace, "link", "set", "lo", "up")
        self._ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", outside)
        self._ip(self._switch, "link", "set", port, "master", "br0", "up")
        # The switch learns all hosts; packets to the unused address are not flooded to all ports.
        _run("bridge", "-n", self._switch, "link", "set", "dev", port, "flood", "off")
        self._set_up(outside, "eth0", self.address(host))
        if outside != name:
            self._ip(outside, "link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", name)
            self._set_up(outside, "lan0", _LAN_ROUTER)
            self._set_up(name, "eth0", LAN_HOST)
            self._ip(name, "route", "add", "default", "via", _LAN_ROUTER)
            _set(outside, "ipv4/ip_forward", 1)
            _masquerade(outside)
            _drop_incoming(outside)

    def _set_up(self, namespace: str, device: str, address: str) -> None:
        self._ip(namespace, "address", "add", f"{address}/24", "dev", device)
        self._ip(namespace, "link", "set", device, "up")

    def _outside(self, host: int) -> str:
        """The namespace connected to the switch: the host's own, or its router's."""
        return self.router(host) if host in self._behind_nat else self.namespace(host)

    def router(self, host: int) -> str:
        """Name of the namespace of a host's home router."""
        return f"{self.namespace(host)}-router"

    def open_router(self, host: int) -> None:
        """Lets a home router accept connections to itself, for a port forwarder on it; by default it drops them."""
        _accept_incoming(self.router(host))

    def __exit__(self, *details: object) -> None:
        """Removes the namespaces; processes still inside lose their network."""
        for host in range(self.num_hosts):
            _delete_namespace(self.namespace(host))
            _delete_namespace(self._outside(host))
        _delete_namespace(self._switch)

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, as `ip netns exec` and `enter_namespace` take it."""
        return f"{self._name}-{self._checked(host)}"

    def address(self, host: int) -> str:
        """IPv4 address at which others see a host: its own, or its router's (behind which it has LAN_HOST)."""
        return f"{self._prefix}.{self._checked(host) + 1}"

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"host {host} does not exist: the network has hosts 0 to {self.num_hosts - 1}")
        return host

    def launch_join(self, host: int) -> Callable[[Sequence[str], Path], PeerProcess]:
        """A `launch` argument of LocalPeer: runs `python -m spes_swarm.join` on a host, with Python's own pid."""
        name = self.namespace(host)

        def launch(arguments: Sequence[str], log: Path) -> PeerProcess:
            with log.open("ab") as output:
                return subprocess.Popen(
                    [sys.executable, "-m", "spes_swarm.join", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    preexec_fn=lambda: enter_namespace(name),
                )

        return launch

    def cut(self, hosts_a: Iterable[int], hosts_b: Iterable[int]) -> None:
        """Drops all packets between the hosts of one set and those of the other, in both directions.

        Packets are lost silently; established connections are not closed. A host in both sets keeps its connections to
        itself. Cuts accumulate until `heal`.
        """
        first, second = set(hosts_a), set(hosts_b)
        pairs = {(a, b) for a in first for b in second if a != b}
        for a, b in sorted(pairs | {(b, a) for a, b in pairs}):
            self._ip(
                self._outside(a), "neighbour", "replace", self.address(b),
                "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0",
            )  # fmt: skip

    def heal(self) -> None:
        """Undoes all cuts."""
        for host in range(self.num_hosts):
            # By default `flush` keeps permanent entries. Dropping too many is harmless: the kernel resolves them again.
            self._ip(self._outside(host), "neighbour", "flush", "nud", "permanent", "dev", "eth0")

    def limit(self, host: int, mbit_per_s: float | None) -> None:
        """Limits a host's upload and download to this many Mbit/s each; None lifts the limit."""
        ends = ((self._outside(host), "eth0"), (self._switch, f"port{host}"))
        for namespace, device in ends:
            with suppress(LocalNetworkError):  # no limit was set
                _run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")
            if mbit_per_s is None:
                continue
            rate_bits = max(int(mbit_per_s * 1e6), 8000)
            # The bucket must hold the bytes of a timer tick (10 ms at worst), and one packet of the veth's offload.
            burst_bytes = max(rate_bits // 8 // 100, 65536 + 1024)
            _run(
                "tc", "-n", namespace, "qdisc", "replace", "dev", device, "root",
                "tbf", "rate", f"{rate_bits}bit", "burst", str(burst_bytes), "latency", "200ms",
            )  # fmt: skip

    def _ip(self, namespace: str, *arguments: str) -> None:
        _run("ip", "-n", namespace, *arguments)


def _run(*command: str) -> str:
    """Runs a command and returns its output.

    Raises:
        LocalNetworkError: it failed; the message has its error output.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise LocalNetworkError(f"`{' '.join(command)}`: {exc}") from exc
    if done.returncode != 0:
        raise LocalNetworkError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


def _set(namespace: str, setting: str, value: int) -> None:
    """Sets a value of /proc/sys/net inside a namespace."""
    _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/net/{setting}")


# Packet filter rules, sent to nf_tables over netlink because the command `nft` is rarely installed. The numbers are
# those of linux/netfilter/nf_tables.h.

_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE = 0, 2, 3, 6
_Attribute = tuple[int, "bytes | str | list[_Attribute]"]


def _masquerade(namespace: str) -> None:
    """Makes a namespace replace the source address of forwarded packets with its own."""
    chain = _chain("nat", "nat", hook=4, priority=100)  # source NAT, after routing
    rule: list[_Attribute] = [(1, "nat"), (2, "chain"), (4, [(1, [(1, "masq"), (2, [])])])]
    _filter(namespace, [(_NEW_TABLE, [(1, "nat")]), (_NEW_CHAIN, chain), (_NEW_RULE, rule)])


def _drop_incoming(namespace: str) -> None:
    """Makes a namespace drop all packets addressed to itself, without an answer."""
    chain = _chain("firewall", "filter", hook=1, priority=0)  # local in
    _filter(namespace, [(_NEW_TABLE, [(1, "firewall")]), (_NEW_CHAIN, [*chain, (5, bytes(4))])])  # policy: drop


def _accept_incoming(namespace: str) -> None:
    """Undoes `_drop_incoming`."""
    _filter(namespace, [(_DELETE_TABLE, [(1, "firewall")])])


def _chain(table: str, kind: str, hook: int, priority: int) -> list[_Attribute]:
    place: list[_Attribute] = [(1, struct.pack(">I", hook)), (2, struct.pack(">I", priority))]
    return [(1, table), (3, "chain"), (4, place), (7, kind)]


def _filter(namespace: str, steps: Sequence[tuple[int, list[_Attribute]]]) -> None:
    """Changes the rules of a namespace, in a temporary thread that enters it.

    Raises:
        LocalNetworkError: the kernel refuses the change.
    """
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter_namespace(namespace)
            _send_to_nf_tables(steps)
        except BaseException as exc:  # raised below, in the caller's thread
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise LocalNetworkError(f"the kernel refuses a packet filter rule: {errors[0]}") from errors[0]


def _send_to_nf_tables(steps: Sequence[tuple[int, list[_Attribute]]]) -> None:
    request, acknowledge, create, append = 0x1, 0x4, 0x400, 0x800
    netfilter, subsystem, ipv4, batch_begin, batch_end = 12, 10, 2, 16, 17

    def pack(attributes: Sequence[_Attribute]) -> bytes:
        packed = b""
        for kind, value in attributes:
            nested = isinstance(value, list)
            data = (
                pack(value) if isinstance(value, list) else value.encode() + b"\0" if isinstance(value, str) else value
            )
            header = struct.pack("=HH", 4 + len(data), kind | (0x8000 if nested else 0))
            packed += header + data + bytes(-len(data) % 4)
        return packed

    def message(kind: int, flags: int, number: int, family: int, resource: int, body: bytes = b"") -> bytes:
        body = struct.pack(">BBH", family, 0, resource) + body
        return struct.pack("=IHHII", 16 + len(body), kind, request | flags, number, 0) + body

    batch = message(batch_begin, 0, 0, 0, subsystem)
    for number, (step, attributes) in enumerate(steps, 1):
        flags = acknowledge | (0 if step == _DELETE_TABLE else create | append)
        batch += message(subsystem << 8 | step, flags, number, ipv4, 0, pack(attributes))
    batch += message(batch_end, 0, len(steps) + 1, 0, subsystem)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netfilter) as netlink:
        netlink.settimeout(_COMMAND_TIMEOUT_S)
        netlink.send(batch)
        for _ in steps:
            answer = netlink.recv(65536)
            (number,) = struct.unpack_from("=i", answer, 16)
            if number:
                raise OSError(-number, os.strerror(-number))


def _delete_namespace(name: str) -> None:
    if (_NAMESPACES / name).exists():
        with suppress(LocalNetworkError):  # another process has just deleted it
            _run("ip", "netns", "delete", name)


def _remove_stale_namespaces() -> None:
    """Removes the namespaces of processes that were killed."""
    for path in _NAMESPACES.glob(f"{_PREFIX}*-*"):
        pid = path.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _delete_namespace(path.name)
