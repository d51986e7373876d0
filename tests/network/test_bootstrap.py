"""The first contact: what can never answer is not waited for, and what cannot be listened on is advised about."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from spes_swarm.base.errors import AddressError, BootstrapError
from spes_swarm.network.transport.daemon import Daemon, WrongAddressError, bootstrap
from tests.helpers.rounds import identity

pytestmark = pytest.mark.slow

NEVER_S = 3600.0  # a test that waits for this long has failed
ANYWHERE = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def daemon(number: int, maddr: str = ANYWHERE) -> AsyncIterator[Daemon]:
    started = await Daemon.start(identity(number).path, [maddr])
    try:
        yield started
    finally:
        await started.stop()


async def refusal(*maddrs: str) -> str:
    """What a fresh peer says about addresses, none of which can ever answer."""
    async with daemon(0) as peer:
        with pytest.raises(BootstrapError, match="no initial peer can be reached: ") as error:
            await asyncio.wait_for(bootstrap(peer, maddrs, NEVER_S), 60.0)
        return str(error.value)


def test_an_address_with_the_id_of_another_peer_is_refused_at_once() -> None:
    async def meet() -> None:
        async with daemon(1) as other:
            (maddr,) = await other.maddrs()
            line = await refusal(maddr.replace(other.peer_id, identity(2).peer_id))
            assert f"another peer answers there, {other.peer_id}; ask for a new address" in line
            # A right address beside it is used.
            async with daemon(0) as peer:
                wrong = maddr.replace(other.peer_id, identity(2).peer_id)
                assert await bootstrap(peer, [wrong, maddr], NEVER_S) == [other.peer_id]

    asyncio.run(meet())


def test_a_server_of_another_kind_is_refused_at_once() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        maddr = f"/ip4/127.0.0.1/tcp/{server.server_port}/p2p/{identity(1).peer_id}"
        assert "what answers there is not a peer" in asyncio.run(refusal(maddr))
        server.shutdown()


def test_a_name_that_nobody_has_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *details: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    line = asyncio.run(refusal(f"/dns4/nowhere.invalid/tcp/1/p2p/{identity(1).peer_id}"))
    assert "no address of 'nowhere.invalid': Name or service not known" in line


def test_a_name_server_that_does_not_answer_may_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(host: str, *details: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def dial() -> None:
        async with daemon(0) as peer:
            with pytest.raises(ConnectionError, match=r"no address of 'nowhere\.invalid': Temporary") as error:
                await peer.connect(f"/dns4/nowhere.invalid/tcp/1/p2p/{identity(1).peer_id}", 30.0)
            assert not isinstance(error.value, WrongAddressError)

    monkeypatch.setattr(socket, "getaddrinfo", busy)
    asyncio.run(dial())


@pytest.mark.parametrize("transport", ["tcp/31337", "tcp/0", "udp/31337/quic-v1"])
def test_the_public_address_of_a_router_is_to_be_announced(transport: str) -> None:
    async def start() -> None:
        async with daemon(0, f"/ip4/203.0.113.7/{transport}"):
            raise AssertionError("it listens")

    usual = transport.replace("tcp/0", "tcp/31337")
    advice = f"give --host-maddrs /ip4/0.0.0.0/{usual} --announce-maddrs /ip4/203.0.113.7/{usual}"
    with pytest.raises(AddressError, match="no network interface of this machine has this address") as error:
        asyncio.run(start())
    assert str(error.value).endswith(advice)


def test_one_address_of_several_that_cannot_be_listened_on_is_not_passed_over() -> None:
    async def start() -> None:
        await Daemon.start(identity(0).path, [ANYWHERE, "/ip4/203.0.113.7/tcp/31337"])

    with pytest.raises(AddressError, match=r"cannot listen on /ip4/203\.0\.113\.7/tcp/31337: no network interface"):
        asyncio.run(start())
