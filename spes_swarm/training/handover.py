"""The trainer's side of a handover: exchanges moments with the network process through shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from spes_swarm.base.arrays import FloatArray, SharedVector
from spes_swarm.metrics import events
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.port.commands import Commands, Port
from spes_swarm.port.messages import ReceivedMoments
from spes_swarm.protocol.ownership.moment_rules import moments_digest, num_moments, slices
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.training.optimiser.expert_moments import WarmUp, read_moments, write_moments
from spes_swarm.training.optimiser.peer_optimiser import PeerOptimiser

_COMMAND_TIMEOUT_S = 30.0


class Handover:
    """Gives the moments of experts to the peers that adopt them, and receives those of adopted experts."""

    def __init__(
        self, network: Port, model: SparseModel, optimiser: PeerOptimiser, metrics: Metrics, warmup_steps: int
    ) -> None:
        self._network = network
        self._model = model
        self._optimiser = optimiser
        self._per_weight = len(optimiser.expert_moments)
        self._metrics = metrics
        self._pending: Future[dict[int, ReceivedMoments]] | None = None  # moments being fetched
        self._arriving: dict[int, FloatArray] = {}
        self.warm_up = WarmUp(warmup_steps)  # warm-up of adopted experts that have no moments yet

    def give(self, round_number: int, experts: Sequence[int]) -> dict[int, str]:
        """Offers the moments of experts that are about to be given up; returns their digests."""
        if not experts:
            return {}
        memory = SharedVector.create(num_moments(experts, self._model.layout, self._per_weight))
        step = 0
        digests: dict[int, str] = {}
        for expert, moments_KN in slices(memory.values_N, experts, self._model.layout, self._per_weight).items():
            step = max(step, read_moments(self._optimiser, self._model, expert, moments_KN))
            digests[expert] = moments_digest(moments_KN)
        self._network.ask(
            Commands.offer_moments,
            _COMMAND_TIMEOUT_S,
            round_number=round_number,
            step=step,
            experts=tuple(experts),
            memory_fd=memory.fd,
        )
        memory.close()
        return digests

    def ask(self, round_number: int, sources: Mapping[int, tuple[str, ...]]) -> None:
        """Requests moments from the peers that give experts up; training continues meanwhile with fresh ones."""
        self._pending = None  # an unfinished fetch is too late
        if not sources:
            return
        memory = SharedVector.create(num_moments(tuple(sources), self._model.layout, self._per_weight))
        self._pending = self._network.submit(
            Commands.fetch_moments, round_number=round_number, sources=dict(sources), memory_fd=memory.fd
        )
        # The network process maps the memory through this process's descriptor.
        self._pending.add_done_callback(lambda _: memory.close())
        self._arriving = slices(memory.values_N, tuple(sources), self._model.layout, self._per_weight)

    def take(self, round_number: int) -> None:
        """Installs the fetched moments once they have arrived."""
        if self._pending is None or not self._pending.done():
            return
        pending, self._pending = self._pending, None
        for expert, received in pending.result().items():
            if expert not in self._model.held:
                continue
            write_moments(self._optimiser, self._model, expert, self._arriving[expert], received.step)
            self.warm_up.stop([expert])
            now_KN = np.empty_like(self._arriving[expert])
            read_moments(self._optimiser, self._model, expert, now_KN)
            digest = moments_digest(now_KN)
            self._metrics.write(events.Moments(expert=expert, peer=received.peer_id, round=round_number, digest=digest))
        self._arriving = {}
