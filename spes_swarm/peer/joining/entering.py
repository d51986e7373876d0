"""How a peer enters a swarm: it opens the run's network, announces itself, and claims experts."""

from __future__ import annotations

import os
from collections.abc import Callable

from spes_swarm.metrics import events
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.daemon import Reach
from spes_swarm.peer.joining.machine import OpenedData, SharedMemory
from spes_swarm.peer.joining.run_finder import FoundRun
from spes_swarm.peer.joining.starting_point import StartingReference
from spes_swarm.peer.memory.peer_plan import PeerPlan
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands
from spes_swarm.port.messages import Presence, RunSettings
from spes_swarm.protocol.members.records import State

_DEFAULT_BANDWIDTH_MBPS = 100.0

Announce = Callable[[State], None]
"""Tells the others what this peer is doing; only a peer that has entered the swarm can."""


def enter_swarm(
    context: SessionContext, found: FoundRun, reach: Reach, data: OpenedData, memory: SharedMemory
) -> Announce:
    """Opens the run in the network process; others see this peer from then on."""
    peer, manifest = context.peer, found.manifest
    settings = RunSettings(
        manifest=manifest,
        layout=memory.layout,
        reference_fd=memory.reference.fd,
        contribution_fd=memory.contribution.fd,
        previous_fd=None if memory.previous is None else memory.previous.fd,
        trainer_pid=os.getpid(),
        client_mode=reach.client_mode,
        bandwidth_mbps=peer.upload_mbps or _DEFAULT_BANDWIDTH_MBPS,
        initial_peers=tuple(found.initial_peers),
        known_peers=tuple(found.known_peers),
        upload_mbps=peer.upload_mbps,
        num_threads=peer.num_threads,
        tokenizer=context.directory.tokenizer if manifest.run.tokenizer.local is not None else None,
        admission=found.admission.shown,
        acts=context.directory.acts,
        proofs=context.directory.proofs,
        track_records=context.directory.track_records,
    )
    review_reach = not (peer.client_mode or peer.assume_reachable)
    context.ask(Commands.open_run, COMMAND_TIMEOUT_S, settings=settings, review_reach=review_reach)
    # The network process has mapped them by now; the mappings outlive the descriptors.
    for vector in filter(None, (memory.reference, memory.contribution, memory.previous)):
        vector.close()

    def announce(state: State) -> None:
        context.status.phase = state
        presence = Presence(
            name=peer.name or "",
            state=state,
            step=0,
            tokens=0,
            tokens_per_step=data.batch_size * manifest.run.training.sequence_length,
            tokens_per_second=0.0,
            loss=None,
            experts=(),
        )
        context.ask(Commands.set_presence, COMMAND_TIMEOUT_S, presence=presence)

    announce("joining")
    # From here on the peer answers others, so a script that starts a swarm need not wait for its first step.
    context.metrics.write(events.Listening(run_id=manifest.run_id, maddrs=reach.maddrs))
    context.directory.remember(manifest)
    found.admission.remember()
    context.data.remember(data.local)
    if manifest.run.training.at_end == "stop" and found.initial_peers:
        newest = context.ask(Commands.swarm_table, None)
        context.leave_if_over(manifest, newest.round if newest is not None else 0)
    return announce


def claim_experts(
    context: SessionContext, found: FoundRun, plan: PeerPlan, reference: StartingReference
) -> tuple[int, ...]:
    """Claims leases on the wanted experts; "auto" means the run's `experts_per_peer`, as far as memory allows."""
    run, room, say = found.manifest.run, plan.experts, context.console.say
    wanted = context.peer.experts
    if wanted.number is None and room < run.experts_per_peer:
        say(f"training {room} instead of {run.experts_per_peer} experts: more do not fit in memory")
    choice = room if wanted.named is None else wanted.named
    held = () if reference.checkpoint is None else reference.checkpoint.meta.held
    if held and wanted.named is None and wanted.number in (None, len(held)):
        choice = tuple(held)
        room = max(room, len(choice))
    if room > run.most_experts:
        say(f"{room} experts requested: a peer keeps at most {run.most_experts} while others can hold the rest")
    return context.ask(Commands.claim, COMMAND_TIMEOUT_S, experts=choice, room=room, fixed=wanted.named is not None)
