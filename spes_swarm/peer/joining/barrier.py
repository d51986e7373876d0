"""How peers that are to start together wait for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from spes_swarm.base.errors import InvitationError
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.entering import Announce
from spes_swarm.peer.joining.starting_point import StartingPoint, StartingReference
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands
from spes_swarm.port.messages import SwarmView

_BARRIER_S = 120.0  # limit while all peers are present; some may wait for more peers than this one does
_ABSENCE_S = 20.0  # limit once a peer has left or failed
_POLL_S = 0.1


def wait_for_peers(
    context: SessionContext, start: StartingPoint, reference: StartingReference, announce: Announce
) -> StartingReference:
    """Waits until as many peers are ready as the user wants; returns the reference with which all of them begin."""
    if (wanted := context.peer.wait_for_peers) <= 1:
        return reference
    announce("waiting")
    here = 0
    while not context.stop.is_set():
        view, before = context.ask(Commands.view, COMMAND_TIMEOUT_S), here
        if view.out is not None:
            raise InvitationError(view.out)
        if (here := view.num_ready + 1) >= wanted:
            break
        if here != before:
            context.console.say(f"waiting for peers: {here} of {wanted}")
        context.stop.wait(0.5)
    # The peers may have resumed from different checkpoints: all continue from the newest.
    return start.newest(reference)


def begin_together(context: SessionContext, announce: Announce) -> None:
    """Announces that this peer trains, and waits until the others do, too."""
    if (others := context.peer.wait_for_peers - 1) > 0:
        announce("training")
        await_training(lambda: context.ask(Commands.view, COMMAND_TIMEOUT_S), others, context.stop)


def await_training(
    view: Callable[[], SwarmView], others: int, stop: threading.Event, now: Callable[[], float] = time.monotonic
) -> None:
    """Waits until the other peers train, so that no peer starts before all have seen each other.

    This takes about a second, or half a minute if they are connected through a relay on a busy machine.
    """
    begun = all_there = now()
    while not stop.is_set() and now() < min(begun + _BARRIER_S, all_there + _ABSENCE_S):
        seen = view()
        if seen.num_training >= others:
            return
        if seen.num_ready >= others:
            all_there = now()
        stop.wait(_POLL_S)
