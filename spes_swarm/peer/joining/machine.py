"""What this machine gives to a run: a device, memory that is shared with the network process, and data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from spes_swarm.base.arrays import SharedVector
from spes_swarm.base.errors import ManifestError
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.data.run_tokenizer import run_tokenizer
from spes_swarm.model.sparse_model import build_model, layout_of
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.run_finder import FoundRun, tokenizer_places
from spes_swarm.peer.local_data import LocalData, held_out_batches
from spes_swarm.peer.memory.capacity import choose_device
from spes_swarm.peer.memory.host_memory import room_for_previous, shared_vectors
from spes_swarm.peer.memory.peer_plan import PeerPlan, plan_peer
from spes_swarm.peer.step_settings import StepSettings, check_tools
from spes_swarm.protocol.consensus.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The device, and what is known of it before the run is found."""

    device: torch.device
    step: StepSettings
    plan: PeerPlan | None  # None: the settings of the run are not known yet


@dataclass(frozen=True, kw_only=True)
class OpenedData:
    """This peer's data, and how much of them it takes at a time."""

    local: LocalData
    sampler: BatchSource
    evaluation: list[NDArray[np.int64]]  # held-out batches, each (B, S)
    batch_size: int  # sequences per local step
    plan: PeerPlan  # what fits on the machine


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """The memory that this process shares with the network process, for a model of this layout."""

    layout: Layout
    reference: SharedVector
    contribution: SharedVector
    previous: SharedVector | None  # used by the network process only; None: not kept


def prepare_machine(context: SessionContext) -> Machine:
    """Chooses the device, and connects the ranks.

    Only after the network process was forked: looking for a CUDA device may initialise the driver.
    """
    peer, ranks = context.peer, context.ranks
    device = choose_device(peer.device)
    if ranks is not None:
        device = ranks.own_device(device)
        ranks.connect(context.console.say, context.stop)
    step = StepSettings.of(peer, device)
    check_tools(peer, device)  # fails early; the model is built much later
    if peer.num_threads is not None:
        torch.set_num_threads(peer.num_threads)
    plan = None if context.run is None else plan_peer(context.run, peer, device, context.num_ranks)
    return Machine(device=device, step=step, plan=plan)


def open_data(context: SessionContext, machine: Machine, found: FoundRun) -> OpenedData:
    """Opens this peer's data; reading them in the background ends with the session."""
    run, plan = found.manifest.run, machine.plan
    batch_size = run.training.batch_size_of(context.peer.batch_size)
    if plan is None:
        plan = plan_peer(run, context.peer, machine.device, context.num_ranks)
    places = tokenizer_places(context, run, found.source, found.connected)
    local = context.data.open(run.data, run_tokenizer(run, places))
    context.metrics.write(local.to_event())
    sampler = local.batches(run, peer_id=context.identity.peer_id, seed=context.data.seed, stop=context.stop)
    context.at_end.callback(sampler.close)
    evaluation = held_out_batches(sampler, run.evaluation)
    return OpenedData(local=local, sampler=sampler, evaluation=evaluation, batch_size=batch_size, plan=plan)


def make_room(context: SessionContext, found: FoundRun, plan: PeerPlan) -> SharedMemory:
    """Lays the model out, and makes the memory that this process shares with the network process."""
    if plan.note:
        context.console.say(plan.note)
    model = found.manifest.run.model
    layout = layout_of(build_model(model.type, model.settings, seed=0, device="meta", on_meta=True))
    if layout.digest != found.manifest.layout_digest:
        raise ManifestError(
            "this version of transformers lays the model out differently from the founder's; "
            "install the version that the run uses"
        )
    size, directory = layout.num_elements, context.directory.path
    reference, contribution = shared_vectors(size, context.peer.reference_storage, directory)
    previous = room_for_previous(size, plan.previous, directory)
    return SharedMemory(layout=layout, reference=reference, contribution=contribution, previous=previous)
