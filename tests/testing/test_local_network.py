"""Hosts that are namespaces: packets pass, are lost, and pass again. With plain sockets."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from scripts.testing.local_network import (
    LocalNetwork,
    LocalNetworkError,
    enter_namespace,
    unavailable_reason,
)
from scripts.testing.local_peer import PATIENCE_S
from tests.helpers.home_network import LAN_HOST, HomeNetwork

T = TypeVar("T")
_REASON = unavailable_reason()
needs_namespaces = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def on_host(network: LocalNetwork, host: int, action: Callable[[], T]) -> T:
    """Does something in a thread on that host: sockets stay where they were made."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            enter_namespace(network.namespace(host))
            results.append(action())
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def listen(network: LocalNetwork, host: int, port: int = 5000) -> socket.socket:
    return on_host(network, host, lambda: socket.create_server((network.address(host), port)))


def connect(network: LocalNetwork, host: int, to: int, port: int = 5000, timeout_s: float = 20.0) -> socket.socket:
    return on_host(network, host, lambda: socket.create_connection((network.address(to), port), timeout_s))


@pytest.fixture
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(3) as three:
        yield three


@needs_namespaces
def test_hosts_reach_each_other_by_their_addresses(network: LocalNetwork) -> None:
    for host in range(3):
        server = listen(network, host)
        for other in range(3):
            with connect(network, other, host) as client:
                accepted, peer = server.accept()
                assert peer[0] == network.address(other)
                client.sendall(b"hello")
                assert accepted.recv(5) == b"hello"
                accepted.close()
        server.close()
    with socket.create_server(("127.0.0.1", 0)) as outside:  # each host has a loopback of its own
        address = outside.getsockname()
        with pytest.raises(ConnectionRefusedError):
            on_host(network, 0, lambda: socket.create_connection(address, 10.0))


@pytest.mark.slow
@needs_namespaces
def test_a_cut_is_silent_and_heals(network: LocalNetwork) -> None:
    server = listen(network, 1)
    before = connect(network, 0, 1)
    accepted, _ = server.accept()
    network.cut([0], [1])
    for a, b in ((0, 1), (1, 0)):  # dropped, not refused
        with pytest.raises(TimeoutError):
            connect(network, a, b, timeout_s=1.5)
    before.sendall(b"lost?")
    accepted.sendall(b"lost too?")
    for end in (before, accepted):
        end.settimeout(1.5)
        with pytest.raises(TimeoutError):
            end.recv(16)
    connect(network, 2, 1).close()  # the third host reaches both
    third = listen(network, 2)
    connect(network, 0, 2).close()
    third.close()
    network.heal()
    for end in (before, accepted):
        end.settimeout(30.0)  # the kernel sends again, at growing intervals
    assert accepted.recv(16) == b"lost?"
    assert before.recv(16) == b"lost too?"
    connect(network, 0, 1).close()
    for end in (before, accepted, server):
        end.close()


@pytest.mark.slow
@needs_namespaces
def test_cuts_between_sets_add_up(network: LocalNetwork) -> None:
    servers = [listen(network, host) for host in range(3)]
    network.cut([0], [1, 2])
    network.cut([0, 1], [1])
    for a, b in ((0, 1), (0, 2), (1, 0), (2, 0)):
        with pytest.raises(TimeoutError):
            connect(network, a, b, timeout_s=1.0)
    connect(network, 1, 1).close()
    connect(network, 1, 2).close()
    network.heal()
    for a in range(3):
        for b in range(3):
            connect(network, a, b).close()
    for server in servers:
        server.close()


@pytest.mark.slow
@needs_namespaces
def test_a_limited_host_is_slow_in_both_directions(network: LocalNetwork) -> None:
    mbit_per_s, size = 8.0, 1_000_000

    def seconds(source: int, sink: int) -> float:
        server = listen(network, sink)
        sender = connect(network, source, sink)
        receiver, _ = server.accept()
        started = time.monotonic()
        thread = threading.Thread(target=sender.sendall, args=(bytes(size),))
        thread.start()
        received = 0
        while received < size:
            received += len(receiver.recv(65536))
        thread.join()
        for end in (sender, receiver, server):
            end.close()
        return time.monotonic() - started

    network.limit(0, mbit_per_s)
    at_least = 0.8 * 8 * size / (mbit_per_s * 1e6)  # the bucket is full to begin with
    assert seconds(0, 1) > at_least
    assert seconds(1, 0) > at_least
    assert any(seconds(1, 2) < at_least for _ in range(10))  # on a busy machine not each time
    network.limit(0, None)
    assert any(seconds(0, 1) < at_least for _ in range(10))


@pytest.mark.slow
@needs_namespaces
def test_a_home_router_lets_connections_out_and_none_in() -> None:
    with (
        HomeNetwork(3, behind_nat=[0, 1]) as network,
        on_host(network, 0, lambda: socket.create_server(("0.0.0.0", 5000))),
        listen(network, 2) as public,
    ):
        for other in (1, 2):
            with pytest.raises(TimeoutError):
                connect(network, other, 0, timeout_s=1.0)
        for host in (0, 1):
            with connect(network, host, 2) as client:
                accepted, peer = public.accept()
                assert peer[0] == network.address(host)
                assert client.getsockname()[0] == LAN_HOST
                accepted.sendall(b"hello")
                assert client.recv(5) == b"hello"
                accepted.close()
        network.cut([0], [2])
        with pytest.raises(TimeoutError):
            connect(network, 0, 2, timeout_s=1.0)
        network.heal()
        connect(network, 0, 2).close()
        network.open_router(0)
        with pytest.raises(ConnectionRefusedError):  # it is there, and nothing on it listens
            connect(network, 2, 0)


@pytest.mark.slow
@needs_namespaces
def test_nothing_is_left_behind() -> None:
    def namespaces() -> set[str]:
        return {path.name for path in Path("/run/netns").iterdir()}

    with LocalNetwork(2) as network:
        made = {network.namespace(0), network.namespace(1)}
        assert made <= namespaces()
    assert not made & namespaces()
    network = LocalNetwork(1)
    with pytest.raises(ZeroDivisionError), network:
        raise ZeroDivisionError
    assert network.namespace(0) not in namespaces()
    # A process that is killed cannot clean up; the next one does.
    script = (
        "import os, signal; from scripts.testing.local_network import LocalNetwork; "
        "LocalNetwork(1).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as killed:
        assert killed.wait(PATIENCE_S) == -9
    left = f"spes-swarm-{killed.pid}-"
    assert any(name.startswith(left) for name in namespaces())
    with LocalNetwork(1):
        assert not any(name.startswith(left) for name in namespaces())


@pytest.mark.slow
@needs_namespaces
def test_two_processes_have_networks_at_the_same_time(network: LocalNetwork) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str] = context.Queue()
    other = context.Process(target=_second_process, args=(queue,))
    other.start()
    assert queue.get(timeout=PATIENCE_S) not in {network.namespace(host) for host in range(3)}
    other.join()
    assert other.exitcode == 0
    listen(network, 0).close()


def _second_process(queue: multiprocessing.Queue[str]) -> None:
    with LocalNetwork(1) as network:
        listen(network, 0).close()
        queue.put(network.namespace(0))


def test_without_root_there_is_a_clear_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (unavailable_reason() or "")
    with pytest.raises(LocalNetworkError, match="root"), LocalNetwork(1):
        pass


def test_without_iproute2_there_is_a_clear_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "iproute2" in (unavailable_reason() or "")


def test_hosts_are_numbered_from_zero() -> None:
    with pytest.raises(ValueError, match="num_hosts"):
        LocalNetwork(0)
    with pytest.raises(ValueError, match="host 2"):
        HomeNetwork(2, behind_nat=[2])
    network = LocalNetwork(2)
    with pytest.raises(ValueError, match="host 2"):
        network.address(2)
