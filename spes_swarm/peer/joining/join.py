"""How a peer joins a run: the steps from nothing to a trainer that is ready, in order."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

from spes_swarm.base.wording import said_if_slow
from spes_swarm.config.manifest import Manifest
from spes_swarm.metrics import events
from spes_swarm.peer.joining.barrier import begin_together, wait_for_peers
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.daemon import Reach, decide_reach, listen
from spes_swarm.peer.joining.entering import claim_experts, enter_swarm
from spes_swarm.peer.joining.machine import make_room, open_data, prepare_machine
from spes_swarm.peer.joining.run_finder import FoundRun, find_run
from spes_swarm.peer.joining.starting_point import StartingPoint, StartingReference
from spes_swarm.peer.joining.trainer import load_weights, make_trainer
from spes_swarm.peer.panel import experts_text
from spes_swarm.training.trainer import Trainer


@dataclass(frozen=True)
class Joined:
    """A run that this peer takes part in, and a trainer that is ready."""

    manifest: Manifest
    trainer: Trainer


def join_run(context: SessionContext) -> Joined:
    """Joins the run.

    Raises:
        UserError: an error that the user can fix.
        NetworkProcessError: the network process failed.
        LeftEarlyError: the user stopped the peer, or the run is over.
    """

    def phase(doing: str) -> AbstractContextManager[None]:
        return said_if_slow(f"still {doing}; Ctrl-C stops", context.console.say)

    with phase("preparing the device"):
        machine = prepare_machine(context)
    with phase("starting the P2P daemon"):
        maddrs = listen(context)
    with phase("looking for the run"):
        found = find_run(context)
    with phase("finding out whether others can connect to this peer"):
        reach = decide_reach(context, maddrs, found)
    with phase("opening the data"):
        data = open_data(context, machine, found)
    with phase("computing the model's layout"):
        memory = make_room(context, found, data.plan)
    with phase("reading weights"):
        start = StartingPoint(context, found, memory.layout, memory.reference.values_N)
        stored = start.fill()
    with phase("entering the swarm"):
        announce = enter_swarm(context, found, reach, data, memory)
    with phase("fetching the swarm's weights"):
        reference = start.obtain(stored, announce_syncing=lambda: announce("syncing"))
    with phase("claiming experts"):
        held = claim_experts(context, found, data.plan, reference)
    with phase("building the model"):
        trainer = make_trainer(context, machine, found, data, memory, held)
        if reach.maddrs:  # more threads than this peer's might not suit others
            one_thread = context.peer.num_threads == 1
            found.admission.print_how_to_join(context.console, reach.maddrs, one_thread=one_thread)
    with phase("waiting for peers"):
        reference = wait_for_peers(context, start, reference, announce)
    with phase("loading the weights"):
        load_weights(context, trainer, reference, data)
    with phase("waiting until the other peers train"):
        begin_together(context, announce)
    _report_joined(context, found, reach, reference, held)
    return Joined(found.manifest, trainer)


def _report_joined(
    context: SessionContext, found: FoundRun, reach: Reach, reference: StartingReference, held: tuple[int, ...]
) -> None:
    metrics, first = context.metrics, reference.table.round
    context.at_end.callback(lambda: metrics.write(events.Leave(round=context.status.round)))
    metrics.write(events.Lease(gained=held, lost=()))
    metrics.write(
        events.Join(
            run_id=found.manifest.run_id,
            maddrs=reach.maddrs,
            experts=held,
            round=first,
            seconds=time.monotonic() - context.started,
            ranks=context.num_ranks,
            kernel=context.peer.kernel,
        )
    )
    context.console.say(f"training experts {experts_text(held)} from round {first}; Ctrl-C to leave")
