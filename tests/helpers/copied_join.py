"""Peers that do not notice that another process on this machine has their identity, as if it were on another one."""

from __future__ import annotations

from contextlib import nullcontext

from scripts.testing.forked_peer import ForkServer
from spes_swarm.join import main


def launch_copied() -> ForkServer:
    """Starts `join` without the lock on its identity."""
    return ForkServer(main=_main)


def _main(arguments: list[str]) -> int:
    from spes_swarm.peer import preflight, session

    for module in (preflight, session):
        setattr(module, "locked_identity", lambda *_: nullcontext())  # noqa: B010 - mypy lets no function be assigned to
    return main(arguments)
