"""`monitor --log`: the swarm's figures, one step for each round, in an experiment tracker."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from spes_swarm.monitor.state import HistoryPoint, StateSource
from spes_swarm.protocol.members.round_metrics import metrics_of
from spes_swarm.storage.trackers import Tracked, Tracker, open_tracker

_DIRECTORY: Final = Path("runs/monitor")  # for trackers that write files


def open_swarm_tracker(kind: str, run_id: str) -> Tracker:
    """Opens a tracker for a run; raises what `open_tracker` raises."""
    return open_tracker(kind, Tracked(run_id=run_id, name="monitor", directory=_DIRECTORY))


async def follow(source: StateSource, tracker: Tracker) -> None:
    """Logs each new round once the next one has been seen, until cancelled; logs the last one at the end."""
    logged = max((point.round for point in source.history()), default=0) - 1
    try:
        while True:
            points = source.history()
            logged = _log(tracker, points[:-1], logged)
            await source.wait_for_change(60.0)
    finally:
        _log(tracker, source.history(), logged)
        tracker.close()


def _log(tracker: Tracker, points: list[HistoryPoint], logged: int) -> int:
    for point in points:
        if point.round > logged:
            values = {f"swarm/{name}": getattr(point, name) for name in metrics_of(HistoryPoint)}
            tracker.log(point.round, {name: float(value) for name, value in values.items() if value is not None})
            logged = point.round
    return logged
