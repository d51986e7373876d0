"""What people type as addresses, and what they get to read when it is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_swarm.base.address import best_first, check_listen_address, check_peer_address, peer_id_of, without_own
from spes_swarm.base.errors import AddressError

# Written out, so that the tests have the same names in every process that collects them.
PEER = "QmcGbWygcjpFFa1Tmx6LRxgVbKtWvyn5nMKmaQJ8hKAzY7"
RELAY = "QmTFHvAKDCj4WxYhTX6EFACrG9sriDHcXAvtboMyB31LCA"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/31337/p2p/{PEER}",
        f"/dns4/example.org/tcp/31337/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/31337/quic/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/31337/p2p/{RELAY}/p2p-circuit/p2p/{PEER}",
    ],
)
def test_addresses_to_dial(text: str) -> None:
    assert check_peer_address(text) == text
    assert peer_id_of(text) == peer_id_of(f"{text}/") == PEER


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
    ],
)
def test_addresses_that_cannot_be_dialled(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why) as error:
        check_peer_address(text)
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
    for text in ("/ip4/0.0.0.0/tcp/0", "/ip4/127.0.0.1/tcp/31337", "/ip6/::/tcp/0", "/ip4/0.0.0.0/udp/4001/quic"):
        assert check_listen_address(text) == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0.0.0.0:31337", "host address .* not a multiaddress"),
        ("/ip4/0.0.0.0", "has no port"),
        (f"/ip4/0.0.0.0/tcp/31337/p2p/{PEER}", "must not have a peer id"),
    ],
)
def test_addresses_that_cannot_be_listened_on(text: str, why: str) -> None:
    with pytest.raises(AddressError, match=why):
        check_listen_address(text)


@pytest.mark.parametrize("text", ["localhost:1", "/ip4/0.0.0.0", "/ip4/0.0.0.0/tcp/99999"])
def test_the_example_is_of_the_kind_that_was_asked_for(text: str) -> None:
    with pytest.raises(AddressError, match=r"it should look like /ip4/0\.0\.0\.0/tcp/31337$"):
        check_listen_address(text)
    with pytest.raises(AddressError, match=r"it should look like /ip4/203\.0\.113\.7/tcp/31337$"):
        check_listen_address(text, announced=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("foo", "is not a multiaddress; it should"),
        ("/nonsense/1", "is not a multiaddress; it should"),
        ("/ip4/300.0.0.1/tcp/1", "is not a multiaddress; it should"),
        ("/ip4/1.2.3.4/tcp", "is not a multiaddress ('/tcp' cannot be parsed); it should"),
        (f"/ip4/1.2.3.4/tcp/99999/p2p/{PEER}", "is not a multiaddress ('/tcp/99999' cannot be parsed); it should"),
        ("/ip4/1.2.3.4/tcp/1/p2p/rubbish", "is not a multiaddress ('/p2p/rubbish' cannot be parsed); it should"),
    ],
)
def test_the_complaint_is_in_our_words_and_says_where(text: str, why: str) -> None:
    with pytest.raises(AddressError) as error:
        check_peer_address(text)
    assert str(error.value).startswith(f"initial peer {text!r} {why}")


def test_an_announced_address_needs_its_real_port() -> None:
    text = "/ip4/203.0.113.7/tcp/31337"
    assert check_listen_address(text, announced=True) == text
    for wrong, why in (
        ("/ip4/203.0.113.7/tcp/0", "port 0"),
        ("/ip4/203.0.113.7", "no port"),
        ("x", "announced address"),
    ):
        with pytest.raises(AddressError, match=why):
            check_listen_address(wrong, announced=True)


@pytest.mark.slow
@given(st.text(max_size=40) | st.lists(st.sampled_from(["ip4", "tcp", "p2p", "1", "1.2.3.4", PEER, ""])).map("/".join))
def test_no_text_fails_in_another_way(text: str) -> None:
    for check in (check_peer_address, check_listen_address):
        try:
            assert check(text) == text
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
