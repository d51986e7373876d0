"""What people type as addresses, and what they get to read when it is wrong."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from spes_swarm.base.address import (
    best_first,
    host_of,
    listen_address,
    listen_addresses,
    peer_address,
    peer_addresses,
    peer_id_of,
    usable_peer_addresses,
    without_own,
)
from spes_swarm.base.errors import AddressError
from spes_swarm.config.file import load_config
from spes_swarm.config.peer import PeerConfig
from spes_swarm.monitor.options import parse_options

# Written out, so that the tests have the same names in every process that collects them.
PEER = "QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"
RELAY = "QmTFHvAKDCj4WxYhTX6EFACrG9sriDHcXAvtboMyB31LCA"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER}",
        f"/dns4/example.org/tcp/31337/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/31337/quic-v1/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/ws/p2p/{PEER}",
        f"/dns/example.org/tcp/443/wss/p2p/{PEER}",
        f"/dnsaddr/example.org/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_addresses_to_dial(text: str) -> None:
    assert peer_address(text) == text
    assert peer_id_of(text) == PEER


NORMAL = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
OTHER = f"/ip4/203.0.113.8/tcp/31337/p2p/{RELAY}"
CID = "bafzbeigo7gxunl7kkztclq7icmrwkvcxkmznwoskko4237solkzc35523a"  # PEER as a CIDv1 in base32


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        (f"{NORMAL}/", NORMAL),
        (f"/{NORMAL}", NORMAL),
        (NORMAL[1:], NORMAL),
        (NORMAL.replace("p2p", "ipfs"), NORMAL),
        (NORMAL.replace("/ip4", "/IP4").replace("/tcp/", "/TCP/"), NORMAL),
        (NORMAL.replace("31337", "031337"), NORMAL),
        (NORMAL.replace(PEER, CID), NORMAL),
        (NORMAL.replace("ip4", "ip6/::ffff:203.0.113.7").replace("/203.0.113.7/tcp", "/tcp"), NORMAL),
        (f"/ip6/2001:DB8:0:0::1/tcp/1/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}"),
        (f"/ip6/[2001:db8::1]/tcp/1/p2p/{PEER}", f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}"),
        (f"/dns4/Example.ORG./tcp/1/p2p/{PEER}", f"/dns4/example.org/tcp/1/p2p/{PEER}"),
        (NORMAL.replace("ip4", "dns4"), NORMAL),
    ],
)
def test_an_address_is_kept_in_its_normal_form(text: str, normal: str) -> None:
    assert peer_addresses([text]) == (normal,)
    assert peer_addresses([normal]) == (normal,)


@pytest.mark.parametrize(
    "text",
    [
        "{0} {1}",
        "{0},{1}",
        "{0}, {1},",
        "{0};{1}",
        "{0}\n{1}\n",
        "\r\n{0}\r\n{1}\r\n",
        "{0} \\\n    {1}",
        "'{0}' '{1}'",
        '"{0} {1}"',
        "\u201c{0}\u201d \u2018{1}\u2019",
        "`{0}` <{1}>",
        '["{0}", "{1}"]',
        "({0}, {1}).",
        "initial-peers {0} {1}",
        "--initial-peers {0} {1}",
        "--initial-peers={0} {1}",
        "\u2013initial-peers {0} {1}",
        "initial_peers: [{0}, {1}]",
        "- {0}\n- {1}",
        "[{0}]({0}), **{1}**",
        "\ufeff{0}\u00a0{1}\u200b",
        "{0} {1} {0}",
        "{0} and {1}",
        "1. {0}\n2. {1}",
        "(1) {0}, (2) {1}",
        "peer: {0}\npeer 2: {1}",
        "Peers:{0};address={1}.",
        "multiaddr: {0}\nMultiaddrs={1}",
        "{0}\uff0c{1}\u3001{0}\u3002",
        "\x1b[32m{0}\x1b[0m \x1b[1;4m{1}\x1b[m",
        "\x1b]8;;https://example.org\x1b\\{0}\x1b]8;;\x07 {1}",
        '{{"maddrs": ["{0}", "{1}"]}}',
        "_{0}_ *{1}*...",
    ],
)
def test_what_comes_along_when_addresses_are_copied_is_no_part_of_them(text: str) -> None:
    assert peer_addresses([text.format(NORMAL, OTHER)]) == (NORMAL, OTHER)
    assert peer_addresses(text.format(NORMAL, OTHER).split(" ")) == (NORMAL, OTHER)


def test_a_terminal_may_break_an_address_into_lines() -> None:
    for column in range(len("/ip4/"), len(NORMAL)):
        broken = f"{NORMAL[:column]}\n  {NORMAL[column:]}"
        assert peer_addresses([broken]) == (NORMAL,)
        assert peer_addresses([f"{OTHER}\n{broken}\r\nand {OTHER}"]) == (OTHER, NORMAL)
    assert listen_addresses(["/ip4/0.0.0.0/tcp/313\n37\n/ip6/::/tcp/1"]) == ("/ip4/0.0.0.0/tcp/31337", "/ip6/::/tcp/1")


@pytest.mark.parametrize("rest", ["foo", "7", "7.5", "31337/p2p/Qm", "203.0.113.8:31337", "the", "/p2p-circuit"])
@pytest.mark.parametrize("form", ["{0} {1}", "{0}\n{1}", "{1} {0}"])
def test_what_is_neither_an_address_nor_comes_along_with_one_is_named(rest: str, form: str) -> None:
    with pytest.raises(AddressError, match="initial peer") as error:
        peer_addresses([form.format(NORMAL, rest)])
    assert rest.rstrip(".") in str(error.value)


def test_a_copied_command_is_no_address() -> None:
    for text in (f"python -m spes_swarm.join --initial-peers {NORMAL} --run-id a-1", f"{NORMAL} --run-id a-1"):
        with pytest.raises(AddressError, match=r"a whole command that was copied is run as it is"):
            peer_addresses([text])


def test_no_address_at_all_is_a_mistake_where_some_are_expected() -> None:
    assert peer_addresses([]) == listen_addresses([]) == ()
    for nothing in ("", " ", ",", "initial-peers"):
        with pytest.raises(AddressError, match="is empty"):
            peer_addresses([nothing])


def test_stored_addresses_that_cannot_be_dialled_are_left_out() -> None:
    assert usable_peer_addresses([f"{NORMAL}/", "rubbish", NORMAL.replace("tcp/31337", "udp/1/quic")]) == [NORMAL]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not end in a peer id"),
        ("example.org:31337", "not a multiaddress"),
        ("/ip4/300.0.0.1/tcp/1", "not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/99999", "not a multiaddress"),
        ("/ip4/1.2.3.4/tcp", "not a multiaddress"),
        ("/nonsense/1", "not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/1/p2p/rubbish", "not a multiaddress"),
        ("/ip4/1.2.3.4/tcp/31337", "does not end in a peer id"),
        (f"/ip4/1.2.3.4/p2p/{PEER}/tcp/31337", "does not end in a peer id"),
        (f"/ip4/1.2.3.4/p2p/{PEER}", "has no port"),
        (f"/tcp/31337/p2p/{PEER}", "has no host"),
        (f"/p2p/{PEER}", "has no host"),
        (f"/ip4/1.2.3.4/udp/1/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/ip4/1.2.3.4/udp/1/quic/p2p/{PEER}", "write quic-v1 in place of quic"),
        (f"/ip4/1.2.3.4/tcp/1/http/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/ip4/1.2.3.4/tcp/1/p2p-circuit/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/ip4/1.2.3.4/tcp/1/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/dnsaddr/example.org/tcp/1/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/ip6zone/eth0/ip6/fe80::1/tcp/1/p2p/{PEER}", "of a kind that p2pd cannot dial"),
        (f"/ip6/fe80::1/tcp/1/p2p/{PEER}", "is link-local"),
        (f"/ip4/0.0.0.0/tcp/1/p2p/{PEER}", "is not the address of a machine: 0.0.0.0 only means"),
        (f"/ip6/::/tcp/1/p2p/{PEER}", "is not the address of a machine"),
        (f"/ip4/224.0.0.1/tcp/1/p2p/{PEER}", "stands for several"),
        (f"/ip4/255.255.255.255/tcp/1/p2p/{PEER}", "stands for several"),
        (f"/ip4/0.0.0.1/tcp/1/p2p/{PEER}", "is not the address of a machine: 0.0.0.1 is reserved"),
        (f"/ip4/240.0.0.1/tcp/1/p2p/{PEER}", "240.0.0.1 is reserved"),
        (f"/dns/0.0.0.0/tcp/1/p2p/{PEER}", "is not the address of a machine"),
        (f"/dnsaddr/1.2.3.4/p2p/{PEER}", "has no port"),
        (f"/ip4/example.org/tcp/1/p2p/{PEER}", "a name of a host is written /dns4/example.org"),
        (PEER, "not a multiaddress"),
        ("http://203.0.113.7:8080/", "not a multiaddress"),
    ],
)
def test_addresses_that_cannot_be_dialled(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as error:
        peer_address(text)
    assert repr(text) in str(error.value)
    assert str(error.value).endswith("it should look like /ip4/203.0.113.7/tcp/31337/p2p/Qm...")


def test_the_own_address_is_skipped_and_refused_where_there_is_no_other() -> None:
    own, other = (f"/ip4/203.0.113.7/tcp/31337/p2p/{peer_id}" for peer_id in (PEER, RELAY))
    circuit = f"{other}/p2p-circuit/p2p/{PEER}"
    assert without_own([own, other, circuit], PEER) == [other]
    assert without_own([], PEER) == []
    with pytest.raises(AddressError, match=f"'{own}' is this peer's own address: give the address of another peer"):
        without_own([own, circuit], PEER)


def test_addresses_to_listen_on() -> None:
    for text in ("/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/31337", "/ip6/::/tcp/0", "/ip4/0.0.0.0/udp/4001/quic-v1"):
        assert listen_address(text) == text
        assert listen_addresses([f"--host-maddrs '{text}/',"]) == (text,)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:31337", "host address .* not a multiaddress"),
        ("/ip4/0.0.0.0", "has no port"),
        ("/ip4/0.0.0.0/udp/4001/quic", "write quic-v1 in place of quic"),
        ("/ip4/0.0.0.0/tcp/443/wss", "of a kind that p2pd cannot listen on"),
        ("/ip4/255.255.255.255/tcp/1", "stands for several"),
        (f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER}", "must not have a peer id"),
    ],
)
def test_addresses_that_cannot_be_listened_on(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why):
        listen_address(text)


@pytest.mark.parametrize("text", ["localhost:1", "/ip4/0.0.0.0", "/ip4/0.0.0.0/tcp/99999"])
def test_the_example_is_of_the_kind_that_was_asked_for(text: str) -> None:
    with pytest.raises(AddressError, match=r"it should look like /ip4/0\.0\.0\.0/tcp/31337$"):
        listen_address(text)
    with pytest.raises(AddressError, match=r"it should look like /ip4/203\.0\.113\.7/tcp/31337$"):
        listen_address(text, announced=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("foo", "is not a multiaddress; it should"),
        ("tcp://1.2.3.4:5", "is not a multiaddress (1.2.3.4:5 is written /ip4/1.2.3.4/tcp/5); it should"),
        (f"a.org:5/p2p/{PEER}", "is not a multiaddress (a.org:5 is written /dns4/a.org/tcp/5); it should"),
        ("/nonsense/1", "is not a multiaddress; it should"),
        ("/ip4/300.0.0.1/tcp/1", "is not a multiaddress; it should"),
        ("/ip4/1.2.3.4/tcp", "is not a multiaddress ('/tcp' cannot be parsed); it should"),
        (f"/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "is not a multiaddress ('/tcp/99999' cannot be parsed); it should"),
        ("/ip4/1.2.3.4/tcp/1/p2p/rubbish", "is not a multiaddress ('/p2p/rubbish' cannot be parsed); it should"),
    ],
)
def test_the_complaint_is_in_our_words_and_says_where(text: str, why: str) -> None:
    with pytest.raises(AddressError) as error:
        peer_address(text)
    assert str(error.value).startswith(f"initial peer {text!r} {why}")
    with pytest.raises(AddressError, match=re.escape(str(error.value))):
        peer_addresses([text])


def test_an_announced_address_needs_its_real_port() -> None:
    text = "/ip4/203.0.113.7/tcp/31337"
    assert listen_address(text, announced=True) == text
    for wrong, why in (
        ("/ip4/203.0.113.7/tcp/0", "port 0"),
        ("/ip4/203.0.113.7", "no port"),
        ("/ip4/0.0.0.0/tcp/31337", "only means that a peer listens on all of its addresses"),
        ("x", "announced address"),
    ):
        with pytest.raises(AddressError, match=why):
            listen_address(wrong, announced=True)


@pytest.mark.slow
@given(st.text(max_size=40) | st.lists(st.sampled_from(["ip4", "tcp", "p2p", "1", "1.2.3.4", PEER, ""])).map("/".join))
@example(f"/ip6zone/lo/ip6/fe80::1/tcp/1/p2p/{PEER}")
def test_no_text_fails_in_another_way(text: str) -> None:
    for parse in (peer_address, listen_address):
        try:
            assert parse(parse(text)) == parse(text)
        except AddressError as error:
            message = str(error)
        else:
            continue
        assert "\n" not in message


def test_the_address_that_reaches_farthest_comes_first() -> None:
    loopback, private, public = (f"/ip4/{ip}/tcp/1/p2p/{PEER}" for ip in ("127.0.0.1", "10.0.0.5", "8.8.8.8"))
    named, link_local = f"/dns4/example.org/tcp/1/p2p/{PEER}", f"/ip4/169.254.1.1/tcp/1/p2p/{PEER}"
    assert best_first([loopback, private, public]) == [public, private, loopback]
    assert best_first([loopback, named, public]) == [public, named, loopback]
    assert best_first([loopback, link_local])[0] == link_local
    assert best_first([]) == []


def test_settings_of_a_peer_and_of_the_monitor_are_normal_forms(tmp_path: Path) -> None:
    path = tmp_path / "peer.yaml"
    texts: dict[str, Any] = {"initial_peers": [f"'{NORMAL}/'\n{OTHER}"], "host_maddrs": ["/ip4/0.0.0.0/tcp/0/"]}
    path.write_text(yaml.safe_dump({"peer": texts}), encoding="utf-8")
    announced = ("/ip4/203.0.113.7/tcp/1/, /ip4/203.0.113.8/tcp/1",)
    for peer in (load_config(path).peer, dataclasses.replace(PeerConfig(**texts), announce_maddrs=announced)):
        assert peer.initial_peers == (NORMAL, OTHER)
        assert peer.host_maddrs == ("/ip4/0.0.0.0/tcp/0",)
    assert peer.announce_maddrs == ("/ip4/203.0.113.7/tcp/1", "/ip4/203.0.113.8/tcp/1")
    options = parse_options(["--initial-peers", f"{NORMAL}/,{OTHER}\r\n"])
    assert options.initial_peers == (NORMAL, OTHER)


@pytest.mark.parametrize(
    ("maddr", "host"),
    [
        ("/ip4/203.0.113.7/tcp/31337", "203.0.113.7"),
        ("/ip4/203.0.113.7/udp/9/quic-v1", "203.0.113.7"),
        ("/ip4/203.0.113.7/tcp/31337/p2p/QmRelay/p2p-circuit", "203.0.113.7"),
        ("/ip6/2001:db8:1:2:3:4:5:6/tcp/1", "2001:db8:1:2::/64"),
        ("/ip6/2001:db8:1:2:ffff::1/tcp/2", "2001:db8:1:2::/64"),
        ("/p2p/QmRelay/p2p-circuit", ""),
        ("", ""),
    ],
)
def test_ports_and_ids_are_free_but_hosts_are_not(maddr: str, host: str) -> None:
    assert host_of(maddr) == host
