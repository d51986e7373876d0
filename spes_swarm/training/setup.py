"""Everything a trainer needs, and the status that it reports to the panel.

Shapes: N elements of the flat vector, B sequences, S tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from spes_swarm.base.arrays import FloatArray
from spes_swarm.config.run import RunConfig
from spes_swarm.data.batch_source import BatchSource
from spes_swarm.model.sparse_model import SparseModel
from spes_swarm.port.commands import Port
from spes_swarm.publishing.background import Publishing
from spes_swarm.storage.metrics_file import Metrics
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


@dataclass(kw_only=True)
class TrainerSetup:
    """Everything a trainer needs."""

    run_id: str
    peer_id: str
    nickname: str
    run: RunConfig
    model: SparseModel
    network: Port
    reference_N: FloatArray
    contribution_N: FloatArray
    sampler: BatchSource
    evaluation: list[npt.NDArray[np.int64]]  # held-out batches, each (B, S)
    device: torch.device
    batch_size: int  # sequences per local step
    micro_batch_size: int | None = None  # most sequences at a time; None: the whole batch
    precision: str = "fp32"  # of matrix products: "fp32", or "bf16" by autocast
    ranks: RankGroup | None = None  # ready to compute gradients of this model; None: this process is the only one
    optimizer_states: str = "device"  # where the moments are: one of `moment_storage.FORMS`
    metrics: Metrics
    checkpoints: Path
    checkpoint_minutes: float
    keep_checkpoints: int
    max_rounds: int | None
    profile_steps: int | None = None  # how many steps are recorded for trace.json.gz, beside the checkpoints
    stop: threading.Event
    publishing: Publishing | None = None
    status: TrainingStatus = field(default_factory=TrainingStatus)
    say: Callable[[str], None] = lambda text: None  # shows a message to the user
    on_round: Callable[[], None] = lambda: None
    on_saved: Callable[[], None] = lambda: None
