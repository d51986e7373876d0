"""Virtual hosts joined by a switch whose cables can be cut, for experiments and tests of network failures.

Each host is a Linux network namespace with an `eth0`, one end of a veth pair to a bridge in a separate namespace. The
machine's own network is not touched, and no packet leaves the machine. This needs root and the commands `ip`, `tc` and
`bridge` (iproute2), but no packet filter: a cut is a wrong hardware address. Each host gets permanent neighbour entries
that map the hosts across the cut to an unused address, so the switch drops the packets, as a broken cable would.
Established connections stay open and see only silence.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil

from spes_swarm.base.errors import SwarmError

_PREFIX = "spes-swarm-"
# A public range, none of which is reachable from inside, because libp2p treats private addresses differently.
_ADDRESSES = "11.77.0"
_NOBODY = "02:00:00:00:00:00"  # a unicast hardware address that no host has
_NAMESPACES = Path("/run/netns")
_COMMAND_TIMEOUT_S = 30.0
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_MAX_HOSTS = 250
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
    """`num_hosts` hosts (at most 250) in one IPv4 network, numbered from 0; a context manager.

    Raises:
        LocalNetworkError: the network cannot be created here; see `unavailable_reason`.
    """

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts must be 1 to {_MAX_HOSTS}, found {num_hosts}")
        self.num_hosts = num_hosts
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
        self._connect(self.namespace(host), host)

    def _add_namespace(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        set_kernel(name, "ipv6/conf/all/disable_ipv6", 1)  # an automatic IPv6 address would bypass a cut
        self._ip(name, "link", "set", "lo", "up")

    def _connect(self, namespace: str, host: int) -> None:
        """Creates a namespace with the address of a host, connected to the switch."""
        self._add_namespace(namespace)
        port = f"port{host}"
        self._ip(self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._ip(self._switch, "link", "set", port, "master", "br0", "up")
        # The switch learns all hosts; packets to the unused address are not flooded to all ports.
        _run("bridge", "-n", self._switch, "link", "set", "dev", port, "flood", "off")
        self._set_up(namespace, "eth0", self.address(host))

    def _set_up(self, namespace: str, device: str, address: str) -> None:
        self._ip(namespace, "address", "add", f"{address}/24", "dev", device)
        self._ip(namespace, "link", "set", device, "up")

    def __exit__(self, *details: object) -> None:
        """Removes the namespaces; processes still inside lose their network."""
        for host in range(self.num_hosts):
            _delete_namespace(self.namespace(host))
            _delete_namespace(self._on_switch(host))
        _delete_namespace(self._switch)

    def _on_switch(self, host: int) -> str:
        """The namespace with the host's address."""
        return self.namespace(host)

    def namespace(self, host: int) -> str:
        """Name of a host's namespace, as `ip netns exec` and `enter_namespace` take it."""
        return f"{self._name}-{self._checked(host)}"

    def address(self, host: int) -> str:
        """IPv4 address at which others see a host."""
        return f"{_ADDRESSES}.{self._checked(host) + 1}"

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"host {host} does not exist: the network has hosts 0 to {self.num_hosts - 1}")
        return host

    def cut(self, hosts_a: Iterable[int], hosts_b: Iterable[int]) -> None:
        """Drops all packets between the hosts of one set and those of the other, in both directions.

        Packets are lost silently; established connections are not closed. A host in both sets keeps its connections to
        itself. Cuts accumulate until `heal`.
        """
        first, second = set(hosts_a), set(hosts_b)
        pairs = {(a, b) for a in first for b in second if a != b}
        for a, b in sorted(pairs | {(b, a) for a, b in pairs}):
            self._ip(
                self._on_switch(a), "neighbour", "replace", self.address(b),
                "lladdr", _NOBODY, "nud", "permanent", "dev", "eth0",
            )  # fmt: skip

    def heal(self) -> None:
        """Undoes all cuts."""
        for host in range(self.num_hosts):
            # By default `flush` keeps permanent entries. Dropping too many is harmless: the kernel resolves them again.
            self._ip(self._on_switch(host), "neighbour", "flush", "nud", "permanent", "dev", "eth0")

    def limit(self, host: int, mbit_per_s: float | None) -> None:
        """Limits a host's upload and download to this many Mbit/s each; None lifts the limit."""
        ends = ((self._on_switch(host), "eth0"), (self._switch, f"port{host}"))
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


def set_kernel(namespace: str, setting: str, value: int) -> None:
    """Sets a value of /proc/sys/net inside a namespace."""
    _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/net/{setting}")


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
