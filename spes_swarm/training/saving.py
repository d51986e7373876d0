"""Saves the state of a peer: its live weights and optimiser, and the reference that they belong to."""

from __future__ import annotations

import numpy as np
import torch

from spes_swarm.port.commands import Commands
from spes_swarm.storage.checkpoint import CheckpointMeta, save_checkpoint
from spes_swarm.training.live_weights import LiveWeights
from spes_swarm.training.local_work import LocalWork
from spes_swarm.training.optimiser_state import optimiser_arrays
from spes_swarm.training.setup import TrainerSetup

_COMMAND_TIMEOUT_S = 60.0


def save_peer(
    setup: TrainerSetup,
    live: LiveWeights,
    optimiser: torch.optim.AdamW,
    work: LocalWork,
    *,
    round_number: int,
    step: int,
) -> None:
    """Writes a checkpoint of the last commit and the local work since, and removes the oldest beyond
    `setup.keep_checkpoints`.

    Raises:
        CheckpointError: the checkpoint cannot be written.
        NetworkProcessError: the network process does not answer.
    """
    layout, network = setup.model.layout, setup.network
    table = network.ask(Commands.table, _COMMAND_TIMEOUT_S)
    commits, marks = network.ask(Commands.lineage, _COMMAND_TIMEOUT_S)
    swarm_tokens = network.ask(Commands.swarm_tokens, _COMMAND_TIMEOUT_S)
    live_N = np.empty(layout.num_elements, dtype=np.float32)  # pages that stay untouched take no memory
    live.read_trained(live_N)
    meta = CheckpointMeta(
        run_id=setup.run_id,
        peer_id=setup.peer_id,
        layout_digest=layout.digest,
        round=round_number,
        versions=list(table.versions),
        reference_digest=table.digest.hex(),
        held=list(setup.model.held),
        step=step,
        tokens=work.tokens,
        steps_in_round=work.steps,
        routed=[int(count) for count in work.routed_E],
        cursor=setup.sampler.state(),
        commits=commits,
        marks=marks.hex(),
        swarm_tokens=swarm_tokens,
    )
    save_checkpoint(
        setup.checkpoints,
        meta,
        layout,
        setup.reference_N,
        live_N,
        optimiser_arrays(optimiser, dict(setup.model.trainable_parameters())),
        setup.keep_checkpoints,
    )
    setup.on_saved()
