"""Multiaddresses: checks of those that users give, before anything starts, and sorting for display."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from contextlib import suppress

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from spes_swarm.base.errors import AddressError

_PEER, _HOST, _ANNOUNCED = "initial peer", "host address", "announced address"
_MAX_CHARS = 256
_EXAMPLES = {
    _PEER: "/ip4/203.0.113.7/tcp/31337/p2p/Qm...",
    _HOST: "/ip4/0.0.0.0/tcp/31337",
    _ANNOUNCED: "/ip4/203.0.113.7/tcp/31337",
}


def _parse(text: str, role: str) -> Multiaddr:
    try:
        return Multiaddr(text)
    except (MultiaddrError, ValueError, KeyError) as exc:
        culprit = _culprit(text)
        where = "" if culprit == text else f" ({culprit!r} cannot be parsed)"
        raise _wrong(text, role, f"is not a multiaddress{where}") from exc


def _wrong(text: str, role: str, why: str) -> AddressError:
    return AddressError(f"{role} {text!r} {why}; it should look like {_EXAMPLES[role]}")


def _culprit(text: str) -> str:
    """Returns the first component of an address that cannot be parsed, e.g. "/tcp/99999"."""
    if len(text) > _MAX_CHARS:  # each attempt parses the whole prefix again
        return text
    words = text.split("/")
    for num_good in range(len(words) - 1, 1, -1):  # the first word is empty: it precedes the leading slash
        with suppress(MultiaddrError, ValueError, KeyError):
            Multiaddr("/".join(words[:num_good]))
            return "/" + "/".join(words[num_good : num_good + 2])
    return text


def check_peer_address(text: str) -> str:
    """Checks an address to dial, which needs a host, a port and a peer id.

    Raises:
        AddressError: it cannot be parsed, or one of them is missing.
    """
    address = _parse(text, _PEER)
    names = [protocol.name for protocol in address.protocols()]
    if names[-1:] != ["p2p"]:
        raise _wrong(text, _PEER, "does not end in a peer id")
    if not {"ip4", "ip6", "dns", "dns4", "dns6"} & set(names):
        raise _wrong(text, _PEER, "has no host")
    if not {"tcp", "udp"} & set(names):
        raise _wrong(text, _PEER, "has no port")
    return text


def peer_id_of(maddr: str) -> str:
    """Returns the peer id at the end of an address that `check_peer_address` accepts."""
    return maddr.rstrip("/").rsplit("/", 1)[-1]


def without_own(maddrs: Sequence[str], own_peer_id: str) -> list[str]:
    """Returns the addresses of other peers.

    Raises:
        AddressError: all of them are this peer's own.
    """
    others = [maddr for maddr in maddrs if peer_id_of(maddr) != own_peer_id]
    if maddrs and not others:
        raise AddressError(
            f"{_PEER} {maddrs[0]!r} is this peer's own address: give the address of another peer "
            "(each peer needs its own identity: use another --output-dir, without --identity)"
        )
    return others


def check_listen_address(text: str, *, announced: bool = False) -> str:
    """Checks an address to listen on, or to announce to other peers.

    Raises:
        AddressError: it cannot be parsed, ends in a peer id, or is announced without a port.
    """
    role = _ANNOUNCED if announced else _HOST
    address = _parse(text, role)
    names = [protocol.name for protocol in address.protocols()]
    if "p2p" in names:
        raise AddressError(f"{role} {text!r} must not have a peer id; leave off /p2p/...")
    ports = [value for protocol, value in address.items() if protocol.name in ("tcp", "udp")]
    if not ports:
        raise _wrong(text, role, "has no port")
    if announced and "0" in [str(port) for port in ports]:
        raise AddressError(f"{role} {text!r} has port 0; announce the actual port")
    return text


def best_first(maddrs: Sequence[str]) -> list[str]:
    """Sorts addresses by reach: public IPv4, private IPv4, all others (IPv6, names), IPv4 loopback."""

    def reach(text: str) -> int:
        try:
            host = Multiaddr(text).value_for_protocol("ip4")
            ip = ipaddress.ip_address(host)
        except (MultiaddrError, ValueError, KeyError):
            return 2
        return 0 if ip.is_global else 3 if ip.is_loopback else 1

    return sorted(maddrs, key=reach)


def tcp_endpoint(maddr: str) -> tuple[str, int] | None:
    """Returns the IP address and TCP port of a multiaddress; None if it lacks one (names, UDP) or is a circuit."""
    if "/p2p-circuit" in maddr:
        return None
    try:
        values = {protocol.name: value for protocol, value in Multiaddr(maddr).items()}
    except (MultiaddrError, ValueError, KeyError):
        return None
    host, port = values.get("ip4") or values.get("ip6"), values.get("tcp")
    return (host, int(port)) if host is not None and port is not None else None
