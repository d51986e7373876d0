"""A trainer whose network process is a stand-in: what the trainer itself does, without sockets and other processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spes_swarm.config.round_clock import RoundClock
from spes_swarm.config.run import RunConfig
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.model.sparse_model import SparseModel, build_model, flat_from_model, layout_of
from spes_swarm.port.commands import Port
from spes_swarm.port.messages import CaughtUp, Presence, RoundReport, SwarmView, TokenCounts
from spes_swarm.protocol.consensus.reference import Reference, ReferenceTable
from spes_swarm.protocol.ownership.lease_table import ExpertChange
from spes_swarm.protocol.rounds.outcome import CommitReport
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.training.ranks.group import RankGroup
from spes_swarm.training.setup import Compute, Reporter, Saving, TrainingStatus
from spes_swarm.training.trainer import Trainer
from tests.helpers.ports import LocalPort
from tests.helpers.swarm import TINY_RUN, merged

HELD = (1, 4)


def run_config(**changes: Any) -> RunConfig:
    """The tests' tiny run with changes."""
    return RunConfig.from_dict(merged(TINY_RUN, changes), "test")


class StubSampler(BatchSource):
    """The same sequences again and again."""

    def next_batch(self, batch_size: int) -> NDArray[np.int64]:
        """See BatchSource."""
        return np.arange(batch_size * 64, dtype=np.int64).reshape(batch_size, 64) % 250

    def state(self) -> dict[str, Any]:
        """See BatchSource."""
        return {"epoch": 0, "position": 0, "identity": 0}

    def restore(self, state: Mapping[str, Any]) -> bool:
        """See BatchSource."""
        return True

    def evaluation_batches(self, num_sequences: int, batch_size: int) -> Iterator[NDArray[np.int64]]:
        """See BatchSource."""
        yield from ()


@dataclass
class StubNetwork:
    """Commits every round as it comes; answers what the trainer asks of a network process.

    Attributes:
        others: how many other peers take part.
        ready: those that are ready to train, as the trainer is told.
        answers: in place of the next rounds, one after the other.
        presences: states that the trainer has announced, in order.
        reported: rounds whose losses it has announced.
        routing_reports, dead_votes: what the others say of their experts.
    """

    reference: Reference
    contribution_N: NDArray[np.float32]
    held: tuple[int, ...]
    clock: RoundClock
    others: int = 0
    ready: tuple[str, ...] = ()
    called_round: int = 0
    answers: list[Callable[[StubNetwork], RoundReport | CaughtUp]] = field(default_factory=list)
    presences: list[str] = field(default_factory=list)
    reported: set[int] = field(default_factory=set)
    on_traffic: Callable[[], None] = lambda: None
    routing_reports: int = 0
    dead_votes: dict[int, int] = field(default_factory=dict)

    async def set_presence(self, presence: Presence) -> None:
        """See port.commands.Commands; so are those that follow."""
        self.presences.append(presence.state)
        if presence.losses is not None:
            self.reported.add(presence.losses.round)

    async def view(self) -> SwarmView:
        return SwarmView(
            *(self.others, self.others, self.others, 0, 0.0, 0.0, 0.0, self.reference.round, 8),
            ready=self.ready,
            routing_reports=self.routing_reports,
            dead_votes=self.dead_votes,
        )

    async def table(self) -> ReferenceTable:
        return self.reference.table

    async def lineage(self) -> tuple[list[int], bytes]:
        return [], b""

    async def swarm_tokens(self) -> int:
        return 0

    async def traffic(self) -> tuple[int, int]:
        self.on_traffic()
        return 10, 20

    async def count_tokens(self) -> TokenCounts:
        return TokenCounts(1 << 40, (1000.0,) * self.others)

    async def run_round(
        self, tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None = None
    ) -> RoundReport | CaughtUp:
        return self.answers.pop(0)(self) if self.answers else self.commit()

    def commit(self) -> RoundReport:
        """Commits what the trainer has contributed."""
        number = self.reference.round + 1
        whole = self.clock.synchronises_experts(number)
        trained = (0, *(1 + expert for expert in self.held)) if whole else (0,)
        for index in trained:
            block = self.reference.layout.blocks[index]
            self.reference.values_N[block.start : block.stop] = self.contribution_N[block.start : block.stop]
        self.reference.finish(number, [(index, number) for index in trained])
        deferred = frozenset() if whole else frozenset(range(8))
        commit = CommitReport(number, ("me", *["other"] * self.others), 1, 0, trained, 8, deferred)
        return RoundReport(commit, 0.0, 0.0, self.reference.digest.hex(), ExpertChange(self.held), 0)


def read_events(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of one kind in a file of metrics."""
    events = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [event for event in events if event["event"] == kind]


@dataclass(kw_only=True)
class TrainerSetup:
    """What a trainer of the tiny run works with, on a CPU and without evaluations."""

    directory: Path
    run: RunConfig
    model: SparseModel
    network: Port
    reference_N: NDArray[np.float32]
    contribution_N: NDArray[np.float32]
    sampler: BatchSource = field(default_factory=StubSampler)
    evaluation: list[NDArray[np.int64]] = field(default_factory=list)
    micro_batch_size: int | None = None
    precision: str = "fp32"
    ranks: RankGroup | None = None
    optimizer_states: str = "device"
    checkpoint_minutes: float = 60.0
    max_rounds: int | None = None
    profile_steps: int | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    publishing: Any = None
    status: TrainingStatus = field(default_factory=TrainingStatus)
    say: Callable[[str], None] = lambda text: None
    on_round: Callable[[], None] = lambda: None
    on_saved: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)
        self.checkpoints = self.directory / "checkpoints"
        self.metrics = Metrics(self.directory / "metrics.jsonl", "me")

    def trainer(self) -> Trainer:
        """The trainer."""
        return Trainer(
            self.run,
            self.network,
            nickname="",
            compute=Compute(
                model=self.model,
                reference_N=self.reference_N,
                contribution_N=self.contribution_N,
                device=torch.device("cpu"),
                batch_size=2,
                micro_batch_size=self.micro_batch_size,
                precision=self.precision,
                ranks=self.ranks,
                optimizer_states=self.optimizer_states,
            ),
            sampler=self.sampler,
            evaluation=self.evaluation,
            saving=Saving(
                run_id="test",
                peer_id="me",
                checkpoints=self.checkpoints,
                checkpoint_minutes=self.checkpoint_minutes,
                keep_checkpoints=1,
                on_saved=self.on_saved,
            ),
            publishing=self.publishing,
            reporter=Reporter("me", self.metrics, self.status, self.say, self.on_round),
            stop=self.stop,
            max_rounds=self.max_rounds,
            profile_steps=self.profile_steps,
        )


class LoneTrainer:
    """A trainer of the tiny run with its stand-ins."""

    def __init__(
        self,
        directory: Path,
        run: RunConfig | None = None,
        foreign_form: str = "fp32",
        **setup: Any,
    ) -> None:
        torch.set_num_threads(1)
        self.run = run or run_config()
        model = build_model(self.run.model.type, self.run.model.settings, 0, "cpu")
        layout = layout_of(model)
        reference = Reference(layout, flat_from_model(model, layout))
        contribution_N = np.zeros(layout.num_elements, dtype=np.float32)
        reference.finish(0, list(enumerate([0] * len(layout.blocks))))
        self.network = StubNetwork(reference, contribution_N, HELD, RoundClock.of(self.run))
        self.port = LocalPort(self.network)
        self.model = SparseModel(model, HELD, "torch", foreign_form)
        self.stop = threading.Event()
        self.metrics_path = directory / "metrics.jsonl"
        self.said: list[str] = []
        self.setup = TrainerSetup(
            directory=directory,
            run=self.run,
            model=self.model,
            network=self.port,
            reference_N=reference.values_N,
            contribution_N=contribution_N,
            stop=self.stop,
            say=self.said.append,
            **setup,
        )
        self.trainer = self.setup.trainer()
        self.trainer.load_reference(reference.table)

    def close(self) -> None:
        """Closes its metrics."""
        self.setup.metrics.close()

    def statements(self) -> list[tuple[int, int]]:
        """Returns a list to which each round from now on adds the tokens, and those routed, that the trainer states."""
        stated: list[tuple[int, int]] = []
        hold = self.network.run_round

        async def note(tokens: int, routed: tuple[int, ...], leaving: bool, loss_rose: bool | None) -> Any:
            stated.append((tokens, sum(routed)))
            return await hold(tokens, routed, leaving, loss_rose)

        self.network.run_round = note  # type: ignore[method-assign, assignment]
        return stated

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What it has written to its metrics."""
        return read_events(self.metrics_path, kind)

    def live(self) -> NDArray[np.float32]:
        """The weights that it trains with, of all blocks."""
        live_N = np.empty(self.model.layout.num_elements, dtype=np.float32)
        for block in self.model.layout.blocks:
            self.model.read_block(block.index, live_N[block.start : block.stop])
        return live_N
