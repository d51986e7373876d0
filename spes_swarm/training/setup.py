"""What a trainer gets: model and device (`Compute`), checkpoints (`Saving`), and where it reports (`Reporter`).

Shape: N elements of the flat vector.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from spes_swarm.base.arrays import FloatArray
from spes_swarm.metrics import events
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.training.gradients import autocast
from spes_swarm.training.ranks.group import RankGroup


@dataclass
class TrainingStatus:
    """Status shown by the panel; written by joining and the trainer, faults also by the network client's reader."""

    phase: str = "starting"
    round: int = 0
    step: int = 0
    loss: float | None = None
    eval_loss: float | None = None  # the latest measurement
    eval_loss_stderr: float | None = None
    eval_round: int | None = None  # round after which it was measured
    tokens_per_second: float = 0.0
    teraflops: float = 0.0  # 1e12 operations per second that the steps had to compute
    mfu: float | None = None  # their share of the device's peak, 0 to 1; None: unknown
    peers: int = 1
    held: tuple[int, ...] = ()
    round_seconds: float = 0.0
    round_megabytes: float = 0.0
    faults: int = 0
    last_fault: str = ""
    progress: float = 0.0  # of the current round, 0 to 1

    def note_fault(self, kind: str, detail: str) -> None:
        """Counts a fault, and keeps it for the panel."""
        self.faults += 1
        self.last_fault = f"{kind}: {detail}"


@dataclass(frozen=True)
class Reporter:
    """Where a trainer says what happens: the metrics, the panel and the user."""

    peer_id: str
    metrics: Metrics
    status: TrainingStatus
    say: Callable[[str], None]  # shows a message to the user
    on_round: Callable[[], None]  # called once the event of a round is written

    def note_fault(self, kind: str, detail: str) -> None:
        """Writes a `fault` event, and keeps it for the panel."""
        self.metrics.write(events.Fault(kind=kind, peer=self.peer_id, detail=detail))
        self.status.note_fault(kind, detail)

    def warn(self, kind: str, detail: str) -> None:
        """Notes a fault, and tells the user."""
        self.note_fault(kind, detail)
        self.say(detail)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The model, and the memory and the devices that it is trained with."""

    model: SparseModel
    reference_N: FloatArray
    contribution_N: FloatArray
    device: torch.device
    batch_size: int  # sequences per local step
    micro_batch_size: int | None = None  # most sequences at a time; None: the whole batch
    precision: str = "fp32"  # of matrix products: "fp32", or "bf16" by autocast
    ranks: RankGroup | None = None  # ready to compute gradients of this model; None: this process is the only one
    optimizer_states: str = "device"  # where the moments are: one of `moment_storage.FORMS`

    def autocast(self) -> AbstractContextManager[None]:
        """Returns the context in which losses are computed."""
        return autocast(self.device, self.precision)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Whose checkpoints are written, where and when."""

    run_id: str
    peer_id: str
    checkpoints: Path
    checkpoint_minutes: float
    keep_checkpoints: int
    on_saved: Callable[[], None] = lambda: None
