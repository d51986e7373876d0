"""Multiaddresses: those that users give are checked before anything starts, and kept in their normal form.

The normal form is the only one that the rest of the package sees: without a slash at the end, with `p2p` and a peer id
in base58, names of hosts in lower case. What p2pd cannot dial or listen on is refused here.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError
from multiaddr.protocols import PROTOCOLS

from spes_swarm.base.errors import AddressError

_PEER, _HOST, _ANNOUNCED = "initial peer", "host address", "announced address"
_NAME_AS_IP = re.compile(r"/?ip[46]/([^/:]*[g-z][^/:]*)/", re.I)
_HOST_AND_PORT = re.compile(r"(?:\w+://)?(([\w.-]+):(\d{1,5}))(?!\w)")
_MAX_CHARS = 256
_EXAMPLES = {
    _PEER: "/ip4/203.0.113.7/tcp/31337/p2p/Qm...",
    _HOST: "/ip4/0.0.0.0/tcp/31337",
    _ANNOUNCED: "/ip4/203.0.113.7/tcp/31337",
}

# What p2pd supports, as names of protocols.
_LISTENING = r"(ip4|ip6|dns4?|dns6) (tcp( ws)?|udp quic-v1)"
_REACHED = r"(ip4|ip6|dns4?|dns6) (tcp( ws| wss| tls ws| tls sni ws)?|udp quic-v1)"
_FORMS = {
    _PEER: rf"(({_REACHED}|dnsaddr) p2p|({_REACHED} p2p|dnsaddr p2p) p2p-circuit p2p)",
    _HOST: _LISTENING,
    _ANNOUNCED: _REACHED,
}
_NAMES = ("dns", "dns4", "dns6", "dnsaddr")

# What comes along when addresses are copied: it is no part of any of them.
_NOISE = re.compile(
    "\x1b(\\[[0-?]*[ -/]*[@-~]|\\][^\x07\x1b]*(\x07|\x1b\\\\))|[\\[\\]\u00ad\u200b-\u200f\u202a-\u202e\u2060\ufeff]"
)
_BETWEEN = re.compile("[\\s,;|\"'`\u00ab\u00bb\u2018-\u201f\u2039\u203a\u3001\u3002<>(){}]+|\\\\+(?=\\s|$)")
_START = re.compile(r"(?<![A-Za-z0-9./-])/*(ip[46]|dns[46]?|dnsaddr)/", re.I)
_LABEL = re.compile(
    r"[-\u2010-\u2015]{0,2}(initial[-_ ]peers?|(host|announce)[-_ ]maddrs?)\b[:=]?(?=[\s/\"'\[]|$)"
    rf"|(?<!\S)\(?\d{{1,3}}[.):]\s*(?={_START.pattern})",
    re.I,
)
_FILLER = re.compile(r"(and|or|(peer|m?addr|multiaddr|address)(e?s)?[-_#]?\d*)[:=]?", re.I)
_LINE_END = re.compile(r"[ \t]*\r?\n[ \t]*")
_MOST_LINES = 4  # that an address is taken to fill in a terminal


def peer_addresses(texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses to dial that a user gives, in their normal form; a text may contain several.

    Raises:
        AddressError: one of them cannot be used, or there is none.
    """
    return _addresses(texts, _PEER, peer_address)


def listen_addresses(texts: Sequence[str], *, announced: bool = False) -> tuple[str, ...]:
    """Returns the addresses to listen on, or to announce, that a user gives, as `peer_addresses` does.

    Raises:
        AddressError: one of them cannot be used, or there is none.
    """
    role = _ANNOUNCED if announced else _HOST
    return _addresses(texts, role, lambda text: listen_address(text, announced=announced))


def _addresses(texts: Sequence[str], role: str, parse: Callable[[str], str]) -> tuple[str, ...]:
    given = _LABEL.sub(" ", _NOISE.sub("", unicodedata.normalize("NFKC", " ".join(texts))))
    starts = [match.start() for match in _START.finditer(given)]
    others = _words(given[: starts[0] if starts else None])
    found: list[str] = []
    for start, end in itertools.pairwise([*starts, len(given)]):
        address, *more = _first_words(given[start:end], parse)
        found.append(address)
        others += more
    others = [word for word in others if _FILLER.fullmatch(word) is None]
    if texts and not found and not others:
        raise _wrong(texts[0], role, "is empty")
    for word in others:
        if word.startswith("-"):
            raise AddressError(
                f"found {word!r} in place of an address ({role}): give only addresses there, and other flags by "
                "themselves (a whole command that was copied is run as it is)"
            )
    return tuple(dict.fromkeys(map(parse, [*others, *found])))


def _words(text: str) -> list[str]:
    words = (word.strip("*_.:!?") for word in _BETWEEN.split(text))
    return [word for word in words if any(map(str.isalnum, word))]


def _first_words(text: str, parse: Callable[[str], str]) -> list[str]:
    """Splits a text that starts with an address, which a terminal may have broken into lines."""
    lines = _LINE_END.split(text)
    for num_lines in range(min(len(lines), _MOST_LINES), 1, -1):
        words = _words("\n".join(["".join(lines[:num_lines]), *lines[num_lines:]]))
        with suppress(AddressError):
            parse(words[0])
            return words
    return _words(text)


def _parse(text: str, role: str) -> list[tuple[str, str]]:
    """Splits one address into pairs of protocol and value; the values are in their normal form."""
    lowered = (word.lower() if word.lower() in _KNOWN else word for word in text.split("/"))
    try:
        address = Multiaddr(re.sub(r"/ipfs/(?=\w{20})", "/p2p/", "/".join(lowered)))
        pairs = [(protocol.name, str(value or "")) for protocol, value in address.items()]
    except (MultiaddrError, ValueError, KeyError) as exc:
        culprit = _culprit(text)
        where = "" if culprit == text else f" ({culprit!r} cannot be parsed)"
        if (named := _NAME_AS_IP.match(text)) is not None:
            where = f" (a name of a host is written /dns4/{named[1]})"
        elif (pair := _HOST_AND_PORT.match(text)) is not None:
            kind = "ip4" if pair[2].replace(".", "").isdigit() else "dns4"
            where = f" ({pair[1]} is written /{kind}/{pair[2]}/tcp/{pair[3]})"
        raise _wrong(text, role, f"is not a multiaddress{where}") from exc
    return [_normal(name, value) for name, value in pairs]


_KNOWN = {protocol.name for protocol in PROTOCOLS} | {"ipfs"}


def _normal(name: str, value: str) -> tuple[str, str]:
    if name in _NAMES:
        value = value.lower().rstrip(".")
        with suppress(ValueError):  # an IP address in place of a name
            return _normal("ip4" if ipaddress.ip_address(value).version == 4 else "ip6", value)
        return name, value
    mapped = ipaddress.IPv6Address(value).ipv4_mapped if name == "ip6" else None
    return (name, value) if mapped is None else ("ip4", str(mapped))


def _checked(pairs: list[tuple[str, str]], text: str, role: str) -> str:
    """Returns an address in its normal form, if it is one that p2pd supports."""
    names, port = [name for name, _ in pairs], [value for name, value in pairs if name in ("tcp", "udp")]
    if not {"ip4", "ip6", *_NAMES} & set(names):
        raise _wrong(text, role, "has no host")
    if not port and "dnsaddr" not in names:
        raise _wrong(text, role, "has no port")
    if "quic" in names:
        raise _wrong(text, role, "is of a version of QUIC that libp2p no longer has: write quic-v1 in place of quic")
    if re.fullmatch(_FORMS[role], " ".join(names)) is None:
        verb = "listen on" if role == _HOST else "dial"
        raise _wrong(text, role, f"is of a kind that p2pd cannot {verb}")
    if role != _HOST and "0" in port:
        raise AddressError(f"{role} {text!r} has port 0; give the actual port")
    for name, value in pairs:
        if name in ("ip4", "ip6") and (problem := _unusable(ipaddress.ip_address(value), role)) is not None:
            raise _wrong(text, role, problem)
    return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in pairs)


def _unusable(ip: ipaddress.IPv4Address | ipaddress.IPv6Address, role: str) -> str | None:
    if ip.is_multicast or str(ip) == "255.255.255.255":
        return f"is not the address of a machine: {ip} stands for several"
    if role != _HOST and ip.is_unspecified:
        return f"is not the address of a machine: {ip} only means that a peer listens on all of its addresses"
    if ip.version == 4 and not ip.is_unspecified and (ip.is_reserved or ip.packed[0] == 0):
        return f"is not the address of a machine: {ip} is reserved"
    if ip.version == 6 and ip.is_link_local:
        return "is link-local, which p2pd cannot use"
    return None


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


def peer_address(text: str) -> str:
    """Returns an address to dial, which needs a host, a port and a peer id, in its normal form.

    Raises:
        AddressError: it cannot be parsed, one of them is missing, or p2pd cannot dial it.
    """
    pairs = _parse(text, _PEER)
    if not pairs or pairs[-1][0] != "p2p":
        raise _wrong(text, _PEER, "does not end in a peer id")
    return _checked(pairs, text, _PEER)


def usable_peer_addresses(texts: Sequence[str]) -> list[str]:
    """Returns those of stored addresses that can be dialled, in their normal form."""
    usable = []
    for text in texts:
        with suppress(AddressError):
            usable.append(peer_address(text))
    return usable


def peer_id_of(maddr: str) -> str:
    """Returns the peer id at the end of an address in its normal form."""
    return maddr.rsplit("/", 1)[-1]


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


def listen_address(text: str, *, announced: bool = False) -> str:
    """Returns an address to listen on, or to announce to other peers, in its normal form.

    Raises:
        AddressError: it cannot be parsed, has no port or a peer id, or p2pd cannot use it.
    """
    role = _ANNOUNCED if announced else _HOST
    pairs = _parse(text, role)
    if any(name == "p2p" for name, _ in pairs):
        raise AddressError(f"{role} {text!r} must not have a peer id; leave off /p2p/...")
    return _checked(pairs, text, role)


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


def host_of(maddr: str) -> str:
    """Returns what is costly to have many of in a remote address: the IPv4 address, or the IPv6 network of 64 bits.

    For a circuit it is that of the relay. Addresses of another form count as one: the result is empty.
    """
    kind, _, rest = maddr.removeprefix("/").partition("/")
    with suppress(ValueError):
        host = ipaddress.ip_interface(rest.partition("/")[0].partition("%")[0])
        return str(host.ip if kind == "ip4" else ipaddress.ip_network((host.ip, 64), strict=False))
    return ""
