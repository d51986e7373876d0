"""The trainer's side of the pipe while the network process gets no CPU time."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spes_swarm.base.errors import NetworkProcessError
from spes_swarm.network.client import NetworkClient
from spes_swarm.port.commands import Commands
from spes_swarm.protocol.members.identity import Identity

pytestmark = pytest.mark.slow

_NEVER_S = 120.0  # what waits for so long waits for ever


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[NetworkClient]:
    """A client whose network process is stopped."""
    identity = tmp_path / "identity.key"
    Identity.load_or_create(identity)
    client = NetworkClient(identity, lambda event: None)
    os.kill(client.pid, signal.SIGSTOP)
    yield client
    client.stop(timeout_s=0.1)


def finishes(action: Callable[[], object]) -> bool:
    """Whether something comes to its end."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(_NEVER_S)
    return not thread.is_alive()


def test_commands_to_a_frozen_process_never_wait(frozen: NetworkClient) -> None:
    """Its pipe holds some hundreds: a trainer writes them in a minute, and a joiner's heartbeat in five."""
    assert finishes(lambda: [frozen.submit(Commands.beat) for _ in range(2000)])


def test_a_frozen_process_is_ended_although_its_pipe_is_full(frozen: NetworkClient) -> None:
    assert finishes(lambda: [frozen.submit(Commands.beat) for _ in range(2000)])
    assert finishes(lambda: frozen.stop(timeout_s=0.5))
    with pytest.raises(NetworkProcessError):
        frozen.ask(Commands.view, 1.0)


def test_a_process_that_reads_no_commands_for_long_is_given_up(frozen: NetworkClient) -> None:
    with pytest.raises(NetworkProcessError, match="does not read its commands"):
        [frozen.submit(Commands.beat) for _ in range(100_000)]
