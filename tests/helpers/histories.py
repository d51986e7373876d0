"""History files as a monitor leaves them behind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from spes_swarm.config.file import load_config
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.monitor.aggregates import Known
from spes_swarm.monitor.history import History
from spes_swarm.monitor.state import Fault, SwarmState
from tests.helpers.monitoring import START, peer_id, points, troubled_state
from tests.helpers.repository import ROOT
from tests.helpers.rounds import identity


def manifest(name: str = "test") -> Manifest:
    """The manifest of a run of this name, founded by identity 0."""
    run = load_config(ROOT / "configs" / "quickstart.yaml").run
    assert run is not None
    return found_run(dataclasses.replace(run, name=name), "ab" * 32, identity(0))


def written(path: Path, count: int = 5) -> SwarmState:
    """Writes a history of `count` rounds; returns the state in the file."""
    shown = troubled_state()
    laptop, other = peer_id(0), peer_id(1)
    history = History(path)
    history.begin(manifest())
    known = Known(
        round=12,
        alive_at=START,
        tokens={laptop: 100, other: 200},
        names={laptop: "laptop"},
        trained_in={0: 12, 3: 7},
        faults=(Fault(time=START, peer_id=laptop, kind="round"),),
    )
    history.write(shown, known, points(count), [], ["/ip4/127.0.0.1/tcp/1/p2p/" + laptop])
    history.close()
    return shown
