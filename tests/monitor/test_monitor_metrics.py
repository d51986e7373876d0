"""A metric is declared once: what is added to `RoundMetrics` reaches every output of the monitor."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

from spes_swarm.monitor.history_file import read_history
from spes_swarm.monitor.state import HistoryPoint, PeerState, SwarmState
from spes_swarm.protocol.members.round_metrics import RoundMetrics, metrics_of
from tests.helpers.histories import written
from tests.helpers.repository import ROOT

# A run of the monitor in which peers measure one more metric. It needs a process of its own, since the classes that
# inherit it are built at import.
WITH_ONE_MORE = """
import asyncio, json, sys
from pathlib import Path

from tests.helpers import one_more_metric

one_more_metric.declare()

from spes_swarm.monitor.history import History
from spes_swarm.monitor.schema import STATE_SCHEMA
from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.prometheus import metrics_text
from spes_swarm.monitor.views.tracking import follow
from tests.helpers.monitoring import Watched, peer_id, progress

class Notes:
    def log(self, step, figures):
        self.figures = dict(figures)
    def close(self):
        pass

async def track(source, notes):
    task = asyncio.create_task(follow(source, notes))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

watched, notes = Watched(), Notes()
records = {peer_id(n): progress(grad_norm=norm) for n, norm in enumerate((0.5, 0.25, 1e300))}
records = {peer: type(record).model_validate(record.model_dump()) for peer, record in records.items()}
state = watched.look(records)
history = History(Path(sys.argv[1]))
points, removed = watched.ledger.take_changes()
history.write(state, watched.ledger.summary(), points, removed, [])
history.close()
asyncio.run(track(HeldState(state, watched.ledger.points()), notes))
print(json.dumps({
    "schema": STATE_SCHEMA,
    "state": state.to_json(),
    "prometheus": metrics_text(state),
    "tracker": notes.figures,
}))
"""


def test_a_metric_declared_once_reaches_history_schema_prometheus_and_tracker(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    written(path)  # by a version without the metric
    command = [sys.executable, "-c", WITH_ONE_MORE, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    state, schema = shown["state"], shown["schema"]
    assert state["grad_norm"] == 0.5
    assert [peer["grad_norm"] for peer in state["peers"]] == [0.5, 0.25, 1e12]
    for described in (schema, schema["$defs"]["peer"], schema["$defs"]["history_point"]):
        assert described["properties"]["grad_norm"]["description"] == "norm of the pseudo-gradient"
        assert "grad_norm" in described["required"]
    assert "# HELP spes_swarm_grad_norm Norm of the pseudo-gradient.\n" in shown["prometheus"]
    assert 'spes_swarm_grad_norm{run="test-0123456789abcdef01234567"} 0.5\n' in shown["prometheus"]
    assert shown["tracker"]["swarm/grad_norm"] == 0.5
    db = sqlite3.connect(path)
    stored = dict(db.execute("SELECT round, grad_norm FROM rounds"))
    db.close()
    assert stored == {1: None, 2: None, 3: 0.5, 4: None, 5: None}
    # A version that does not know the metric reads the same file.
    _, history = read_history(path)
    assert [point.round for point in history] == [1, 2, 3, 4, 5]


def test_every_metric_has_a_place_in_the_outputs() -> None:
    for carrier in (PeerState, SwarmState, HistoryPoint):
        assert set(metrics_of(RoundMetrics)) < set(metrics_of(carrier))
        assert all(metric.help and not metric.help.endswith(".") for metric in metrics_of(carrier).values())
