"""Experiment trackers: TensorBoard, Weights & Biases, Trackio. Each is an optional extra.

All of them work without a network: TensorBoard and Trackio write files, and so does wandb without a login (or as its
own WANDB_MODE says). Training needs none of them: a tracker that fails is dropped, which is reported once.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from spes_swarm.base.errors import ConfigError, UserError
from spes_swarm.metrics import events
from spes_swarm.storage.metrics_file import Metrics

PROJECT: Final = "spes_swarm"


class Tracker(Protocol):
    """Receives metrics; `step` never decreases."""

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Adds the metrics of one step."""

    def close(self) -> None:
        """Writes what is left and closes the tracker."""


@dataclass(frozen=True, kw_only=True)
class Tracked:
    """What a tracker tracks."""

    run_id: str  # groups all peers of a run
    name: str  # of this peer, or of a monitor
    directory: Path  # for trackers that write files


def check_tracker(kind: str) -> None:
    """Checks that a tracker can be used, without importing it.

    Raises:
        ConfigError: there is no such tracker.
        UserError: its package is not installed; the message says how to install it.
    """
    if kind not in _OPENERS:
        raise ConfigError(f"--log: found {kind!r}, expected one of {', '.join(_OPENERS)}")
    if find_spec(kind) is None:
        raise UserError(f"--log {kind} needs the package {kind}: pip install 'spes-swarm[{kind}]'")


def open_tracker(kind: str, tracked: Tracked) -> Tracker:
    """Starts a tracker.

    Raises:
        ConfigError, UserError: as `check_tracker`; or the tracker did not start, with its reason.
    """
    check_tracker(kind)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # trackers print banners; stdout belongs to the command
            return _OPENERS[kind](tracked)
    except Exception as exc:  # each tracker has its own errors
        reason = " ".join(str(exc).split()) or type(exc).__name__
        raise UserError(f"--log {kind} did not start: {reason}") from exc


class _TensorBoard:
    def __init__(self, tracked: Tracked) -> None:
        from torch.utils.tensorboard import SummaryWriter

        directory = tracked.directory / "tensorboard" / tracked.run_id
        self._writer: Any = SummaryWriter(str(directory))

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, tracked: Tracked) -> None:
        import wandb

        # A login prompt would block a process without a terminal forever.
        offline = "WANDB_MODE" not in os.environ and not wandb.login(prompt=False)
        tracked.directory.mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        self._run: Any = wandb.init(
            project=PROJECT,
            name=tracked.name,
            group=tracked.run_id,
            dir=str(tracked.directory),
            mode="offline" if offline else None,
            settings=settings,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, tracked: Tracked) -> None:
        import trackio

        self._module: Any = trackio
        self._run: Any = trackio.init(
            project=PROJECT,
            name=f"{tracked.run_id}/{tracked.name}",
            group=tracked.run_id,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._module.finish()


_OPENERS: Final[dict[str, Callable[[Tracked], Tracker]]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "trackio": _Trackio,
}


class Quiet:
    """Wraps a tracker, so that its failures end the tracking and nothing else."""

    def __init__(self, tracker: Tracker, complain: Callable[[str], None]) -> None:
        self._tracker: Tracker | None = tracker
        self._complain = complain

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """See Tracker; NaN and inf are left out."""
        self._try(lambda tracker: tracker.log(step, {k: v for k, v in figures.items() if math.isfinite(v)}))

    def close(self) -> None:
        """See Tracker."""
        with contextlib.redirect_stdout(sys.stderr):
            self._try(lambda tracker: tracker.close())
        self._tracker = None

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as exc:  # a full disk, a service that is down, a bug in the tracker
            self._tracker = None
            self._complain(f"the tracker failed and is no longer used: {' '.join(str(exc).split())}")


class TrackedMetrics(Metrics):
    """Metrics that also go to a tracker, once the peer has joined a run.

    The local step is the axis of all of them: trackers require steps that never decrease.
    """

    def __init__(self, path: Path, peer_id: str, kind: str, name: str) -> None:
        """Opens the file.

        Raises:
            ConfigError, UserError: there is no such tracker, its package is missing, or the file cannot be written.
        """
        check_tracker(kind)
        super().__init__(path, peer_id)
        self._kind = kind
        self._name = name or peer_id[-8:]
        self._directory = path.parent
        self._tracker: Quiet | None = None
        self._tracker_lock = threading.Lock()
        self._step = 0

    def write(self, event: events.Event) -> None:
        """See Metrics.write; at `join` the tracker starts.

        Raises:
            UserError: the tracker did not start.
        """
        super().write(event)
        if isinstance(event, events.Join):
            tracked = Tracked(run_id=event.run_id, name=self._name, directory=self._directory)
            tracker = open_tracker(self._kind, tracked)
            with self._tracker_lock:
                self._tracker = Quiet(tracker, self._on_failure)
        elif isinstance(event, events.Step):
            self._step = max(self._step, event.step)
        figures = {f"{event.event_name}/{name}": value for name, value in event.figures().items()}
        with self._tracker_lock:
            if self._tracker is not None and figures:
                self._tracker.log(self._step, figures)

    def _on_failure(self, text: str) -> None:
        super().write(events.Fault(kind="tracker", peer=self._peer_id, detail=text))

    def close(self) -> None:
        """See Metrics.close."""
        with self._tracker_lock:
            if self._tracker is not None:
                self._tracker.close()
        super().close()


def open_metrics(path: Path, peer_id: str, kind: str | None, name: str) -> Metrics:
    """Opens a peer's metrics, with a tracker unless `kind` is None; raises what the constructors raise."""
    return Metrics(path, peer_id) if kind is None else TrackedMetrics(path, peer_id, kind, name)
