"""A swarm in one process: real trainers and real rounds, with memory in place of processes and connections."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model, layout_of
from spes_swarm.port.messages import Presence, RoundReport, SwarmView, TokenCounts
from spes_swarm.protocol.consensus.reference import ReferenceTable
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from tests.helpers.lone_trainer import TrainerSetup, run_config
from tests.helpers.ports import LocalPort
from tests.helpers.rounds import FakePeer, hold_round, peer

_PATIENCE_S = 180.0


@dataclass
class _Meeting:
    """Holds a round when all peers have come."""

    clock: RoundClock
    peers: list[FakePeer] = field(default_factory=list)
    come: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def round(self) -> int:
        return self.peers[0].reference.round

    def attend(self) -> None:
        with self.changed:
            number = self.round + 1
            self.come += 1
            if self.come == len(self.peers):
                hold_round(self.peers, number, experts=self.clock.synchronises_experts(number))
                self.come = 0
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.round == number, _PATIENCE_S):
                raise TimeoutError(f"not all peers came to round {number}")


class MemoryPeer:
    """One peer: a trainer, and in place of its network process the commands of port.commands.Commands."""

    def __init__(self, directory: Path, run: RunConfig, meeting: _Meeting, held: tuple[int, ...], **setup: Any) -> None:
        model = build_model(run.model.type, run.model.settings, 0, "cpu")
        layout = layout_of(model)
        self._meeting = meeting
        self._mine = peer(layout, flat_from_model(model, layout), held)
        self._mine.reference.finish(0, list(enumerate([0] * len(layout.blocks))))
        meeting.peers.append(self._mine)
        self._presence: Presence | None = None
        self.others: list[MemoryPeer] = []
        self.model = SparseModel(model, held)
        self.setup = TrainerSetup(
            directory=directory,
            run=run,
            model=self.model,
            network=LocalPort(self, in_threads=True),
            reference_N=self._mine.reference.values_N,
            contribution_N=self._mine.live_N,
            **setup,
        )
        self.trainer = self.setup.trainer()
        self.trainer.load_reference(self._mine.reference.table)

    def _training(self) -> list[Presence]:
        presences = [other._presence for other in self.others]
        return [presence for presence in presences if presence is not None and presence.state == "training"]

    @property
    def called_round(self) -> int:
        """See Port."""
        return self._meeting.round + 1 if self._meeting.come else 0

    async def set_presence(self, presence: Presence) -> None:
        """See port.commands.Commands; so are those that follow."""
        self._presence = presence

    async def view(self) -> SwarmView:
        training = self._training()
        return SwarmView(
            num_peers=len(self.others),
            num_ready=len(training),
            num_training=len(training),
            tokens_per_step=sum(presence.tokens_per_step for presence in training),
            tokens=sum(presence.tokens for presence in training),
            tokens_per_second=sum(presence.tokens_per_second for presence in training),
            at=time.monotonic(),
            swarm_round=self._mine.reference.round,
            experts_covered=self._mine.reference.layout.num_experts,
        )

    async def count_tokens(self) -> TokenCounts:
        training = self._training()
        return TokenCounts(
            sum(presence.tokens for presence in training),
            tuple(presence.tokens / presence.tokens_per_step for presence in training),
            begun=sum(presence.tokens_per_step for presence in training) / 2,
        )

    async def run_round(
        self, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport:
        self._mine.tokens, self._mine.routed, self._mine.leaving = tokens, routed, leaving
        self._meeting.attend()
        commit = self._mine.reports[-1]
        return RoundReport(commit, 0.0, 0.0, self._mine.reference.digest.hex(), ExpertChange(self._mine.held), 0)

    async def table(self) -> ReferenceTable:
        return self._mine.reference.table

    async def lineage(self) -> tuple[list[int], bytes]:
        return self._mine.lineage.to_lists()

    async def swarm_tokens(self) -> int:
        return 0

    async def traffic(self) -> tuple[int, int]:
        return 0, 0

    def live_shared(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The shared block that it trains with."""
        shared_N = np.empty(self.model.layout.blocks[0].size, dtype=np.float32)
        self.model.read_block(0, shared_N)
        return shared_N


def memory_swarm(
    directory: Path, held: list[tuple[int, ...]], run: RunConfig | None = None, **setup: Any
) -> list[MemoryPeer]:
    """Peers that hold these experts, ready to train."""
    run = run or run_config()
    meeting = _Meeting(RoundClock.of(run))
    peers = [MemoryPeer(directory / str(number), run, meeting, experts, **setup) for number, experts in enumerate(held)]
    for one in peers:
        one.others = [other for other in peers if other is not one]
    return peers
