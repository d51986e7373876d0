"""Virtual hosts (local_network.py) of which some are behind a home router.

A router is another namespace that lets connections out, under its own address, and none in.

                     ┌─ eth0 host 0
    switch: bridge ──┼─ eth0 host 1
                     └─ eth0 router of host 2 lan0 ── eth0 host 2 (192.168.77.2)
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Collection, Sequence

from scripts.testing.local_network import LocalNetwork, LocalNetworkError, enter_namespace, set_kernel

_LAN_ROUTER, LAN_HOST = "192.168.77.1", "192.168.77.2"  # inside every home network
_TIMEOUT_S = 30.0


class HomeNetwork(LocalNetwork):
    """Hosts in one network; those in `behind_nat` have a home router in front of them, whose address others see."""

    def __init__(self, num_hosts: int, behind_nat: Collection[int]) -> None:
        super().__init__(num_hosts)
        self._behind_nat = frozenset(map(self._checked, behind_nat))

    def router(self, host: int) -> str:
        """Name of the namespace of a host's home router."""
        return f"{self.namespace(host)}-router"

    def open_router(self, host: int) -> None:
        """Lets a home router accept connections to itself, for a port forwarder on it; by default it drops them."""
        _accept_incoming(self.router(host))

    def _on_switch(self, host: int) -> str:
        return self.router(host) if host in self._behind_nat else self.namespace(host)

    def _add_host(self, host: int) -> None:
        if host not in self._behind_nat:
            super()._add_host(host)
            return
        name, router = self.namespace(host), self.router(host)
        self._connect(router, host)
        self._add_namespace(name)
        self._ip(router, "link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", name)
        self._set_up(router, "lan0", _LAN_ROUTER)
        self._set_up(name, "eth0", LAN_HOST)
        self._ip(name, "route", "add", "default", "via", _LAN_ROUTER)
        set_kernel(router, "ipv4/ip_forward", 1)
        _masquerade(router)
        _drop_incoming(router)


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
        netlink.settimeout(_TIMEOUT_S)
        netlink.send(batch)
        for _ in steps:
            answer = netlink.recv(65536)
            (number,) = struct.unpack_from("=i", answer, 16)
            if number:
                raise OSError(-number, os.strerror(-number))
