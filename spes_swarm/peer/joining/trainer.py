"""Builds the trainer of a peer that has claimed its experts, and gives it the swarm's weights."""

from __future__ import annotations

from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.machine import Machine, OpenedData, SharedMemory
from spes_swarm.peer.joining.run_finder import FoundRun
from spes_swarm.peer.joining.starting_point import StartingReference
from spes_swarm.peer.panel import round_line
from spes_swarm.peer.step_settings import replica_of
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands
from spes_swarm.publishing.background import Publishing
from spes_swarm.training.ranks.orders import Replica
from spes_swarm.training.setup import Compute, Reporter, Saving
from spes_swarm.training.trainer import Trainer


def make_trainer(
    context: SessionContext,
    machine: Machine,
    found: FoundRun,
    data: OpenedData,
    memory: SharedMemory,
    held: tuple[int, ...],
) -> Trainer:
    """Builds the trainer, whose model has no weights yet; all ranks build the model."""
    run = found.manifest.run
    context.console.say(f"building {run.model.type} on {machine.device}{machine.step.notes}")
    order = replica_of(run, context.peer, machine.device, held, data.plan.micro_batch_size, machine.step)
    if context.ranks is not None:
        context.ranks.send_order(order)
    return _new_trainer(context, machine, found, data, memory, order)


def load_weights(context: SessionContext, trainer: Trainer, reference: StartingReference, data: OpenedData) -> None:
    """Gives the trainer the weights to start from, and its place in the data."""
    checkpoint, table = reference.checkpoint, reference.table
    if checkpoint is None:
        trainer.load_reference(table)
    else:
        trainer.restore(checkpoint, table)
    if checkpoint is None or checkpoint.meta.round < table.round:
        # Do not repeat what the others have trained on.
        view = context.ask(Commands.view, COMMAND_TIMEOUT_S)
        data.sampler.follow(view.ready)
        data.sampler.advance(view.data)


def _new_trainer(
    context: SessionContext, machine: Machine, found: FoundRun, data: OpenedData, memory: SharedMemory, order: Replica
) -> Trainer:
    peer, console, directory, peer_id = context.peer, context.console, context.directory, context.identity.peer_id

    def say_round() -> None:
        if not console.is_terminal:  # on a terminal the panel shows it
            console.say(round_line(context.status))

    def remember_peers() -> None:
        directory.remember_peers(context.network.ask(Commands.peer_maddrs, COMMAND_TIMEOUT_S))

    return Trainer(
        found.manifest.run,
        context.network,
        nickname=peer.name or "",
        compute=Compute(
            model=order.build(machine.device),
            reference_N=memory.reference.values_N,
            contribution_N=memory.contribution.values_N,
            device=machine.device,
            batch_size=data.batch_size,
            micro_batch_size=data.plan.micro_batch_size,
            precision=machine.step.precision,
            ranks=context.ranks,
            optimizer_states=peer.optimizer_states,
        ),
        sampler=data.sampler,
        evaluation=data.evaluation,
        saving=Saving(
            run_id=found.manifest.run_id,
            peer_id=peer_id,
            checkpoints=directory.checkpoints,
            checkpoint_minutes=peer.checkpoint_minutes,
            keep_checkpoints=peer.keep_checkpoints,
            on_saved=remember_peers,
        ),
        publishing=_publishing(context, found),
        reporter=Reporter(peer_id, context.metrics, context.status, console.say, say_round),
        stop=context.stop,
        max_rounds=peer.max_rounds,
        profile_steps=peer.profile_steps,
    )


def _publishing(context: SessionContext, found: FoundRun) -> Publishing | None:
    if context.peer.publish_to is None:
        return None
    return Publishing(
        context.network,
        context.metrics,
        peer=context.peer,
        run_id=found.manifest.run_id,
        peer_id=context.identity.peer_id,
        say=context.console.say,
    )
