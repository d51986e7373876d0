"""A rank other than 0: it computes gradients as it is told, and talks to nobody but rank 0.

It has no network process and writes no files. Rank 0 handles signals: torchrun sends them to all ranks, and
this one must go on until rank 0 has left the swarm.
"""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch

from spes_swarm.base import log
from spes_swarm.base.arguments import stop_signals
from spes_swarm.base.errors import RankError
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.training.gradients import Gradients, autocast
from spes_swarm.training.out_of_memory import is_out_of_memory
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.ranks.orders import Replica, Step, Stop
from spes_swarm.training.ranks.placement import Placement
from spes_swarm.training.ranks.shared_gradients import compute_share, exchange_weights


def follow(placement: Placement) -> int:
    """Follows rank 0 until the peer has left the swarm; returns the exit code. Needs the main thread."""
    handled = stop_signals()
    for number in handled:
        signal.signal(number, signal.SIG_DFL)  # until the ranks are connected, nobody waits for this one
    try:
        group = RankGroup(placement)
        group.connect(say=lambda text: print(text, file=sys.stderr))
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        run_orders(group)
    except RankError as exc:
        print(f"join: rank {placement.rank} ends: {exc}", file=sys.stderr)
        return 1
    return 0


def run_orders(group: RankGroup) -> None:
    """Carries out orders until told to stop.

    Raises:
        RankError: another rank of this peer has ended.
    """
    replica = group.next_order()
    if isinstance(replica, Stop):
        group.close()
        return
    assert isinstance(replica, Replica)
    with ExitStack() as stack:
        if replica.log is not None:
            log.context.run, log.context.peer, level = replica.log
            rank = f"rank {group.placement.rank}"
            stack.enter_context(log.writing(Path(replica.output_dir) / log.NAME, level, rank))
        _serve(group, replica)


def _serve(group: RankGroup, replica: Replica) -> None:
    device = group.own_device(torch.device(replica.device_type))
    if replica.num_threads is not None:
        torch.set_num_threads(replica.num_threads)
    model = replica.build(device)
    precision = partial(autocast, device, replica.precision)
    own = Gradients(
        model,
        replica.losses,
        replica.micro_batch_size,
        device=device,
        autocast=precision,
        warn=lambda kind, text: print(f"rank {group.placement.rank}: {text}"),
    )
    while not isinstance(order := group.next_order(), Stop):
        assert isinstance(order, Step)
        run_step(group, model, own, order, device)
    group.close()


def run_step(group: RankGroup, model: SparseModel, own: Gradients, step: Step, device: torch.device) -> None:
    """Computes this rank's share of a step.

    Raises:
        RankError: another rank of this peer has ended, or this one is out of memory.
    """
    model.set_held(step.held)
    exchange_weights(group, model, step)
    batch_BS = torch.empty(step.batch_shape, dtype=torch.int64, device=device)
    group.broadcast([batch_BS])
    try:
        compute_share(group, model, own, batch_BS.cpu().numpy().astype(np.int64, copy=False), step.progress)
    except (MemoryError, RuntimeError) as exc:
        if not is_out_of_memory(exc):
            raise
        # Rank 0 knows; it leaves the swarm, and then gives the order to stop.
