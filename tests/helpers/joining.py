"""What a peer joins with, for tests of single steps of joining."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.panel import PeerConsole
from spes_swarm.peer.run_data import PeerData
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory
from spes_swarm.training.setup import TrainingStatus


def joining_context(
    directory: RunDirectory,
    ask: Callable[..., Any],
    identity: Identity,
    peer: PeerConfig | None = None,
    run: RunConfig | None = None,
    *,
    metrics: Metrics | None = None,
) -> SessionContext:
    """A peer that asks its network process through `ask` only, and says nothing."""
    peer, stop, console = peer or PeerConfig(), threading.Event(), PeerConsole(quiet=True)
    absent: Any = None
    return SessionContext(
        peer=peer,
        run=run,
        directory=directory,
        identity=identity,
        console=console,
        metrics=metrics or absent,
        network=absent,
        ask=ask,
        data=PeerData(peer, directory, console.say, stop),
        stop=stop,
        status=TrainingStatus(),
        ranks=None,
        started=0.0,
        at_end=ExitStack(),
    )
