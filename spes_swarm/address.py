"""Multiaddresses as users give them and as we show them: checked before anything starts."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from spes_swarm.errors import AddressError

_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/Qm..."


def _parse(text: str, role: str) -> Multiaddr:
    try:
        return Multiaddr(text)
    except (MultiaddrError, ValueError, KeyError) as exc:
        reason = " ".join(str(exc).split())
        raise AddressError(f"{role} {text!r} is not a multiaddress ({reason}); it should look like {_EXAMPLE}") from exc


def check_peer_address(text: str) -> str:
    """Checks an address to dial: a host, a port and a peer id.

    Raises:
        AddressError: it cannot be parsed or lacks one of them.
    """
    role = "initial peer"
    address = _parse(text, role)
    names = [protocol.name for protocol in address.protocols()]
    if names[-1:] != ["p2p"]:
        raise AddressError(f"{role} {text!r} lacks the peer's id at its end; it should look like {_EXAMPLE}")
    if not {"ip4", "ip6", "dns", "dns4", "dns6"} & set(names):
        raise AddressError(f"{role} {text!r} names no host; it should look like {_EXAMPLE}")
    if not {"tcp", "udp"} & set(names):
        raise AddressError(f"{role} {text!r} names no port; it should look like {_EXAMPLE}")
    return text


def peer_id_of(maddr: str) -> str:
    """The peer id at the end of an address that `check_peer_address` accepts."""
    return maddr.rsplit("/", 1)[-1]


def check_listen_address(text: str, *, announced: bool = False) -> str:
    """Checks an address to listen on, or to announce to others.

    Raises:
        AddressError: it cannot be parsed, ends in a peer id, or is announced without a port.
    """
    role = "announced address" if announced else "host address"
    address = _parse(text, role)
    names = [protocol.name for protocol in address.protocols()]
    if "p2p" in names:
        raise AddressError(f"{role} {text!r} must not have a peer id; leave off /p2p/...")
    ports = [value for protocol, value in address.items() if protocol.name in ("tcp", "udp")]
    if not ports:
        raise AddressError(f"{role} {text!r} has no port; it should look like /ip4/0.0.0.0/tcp/31337")
    if announced and "0" in [str(port) for port in ports]:
        raise AddressError(f"{role} {text!r} has port 0; others need the real one")
    return text


def best_first(maddrs: Sequence[str]) -> list[str]:
    """Orders addresses by how far they reach: public, private network, this machine only."""

    def reach(text: str) -> int:
        try:
            host = Multiaddr(text).value_for_protocol("ip4")
            ip = ipaddress.ip_address(host)
        except (MultiaddrError, ValueError, KeyError):
            return 2
        return 0 if ip.is_global else 3 if ip.is_loopback else 1

    return sorted(maddrs, key=reach)
