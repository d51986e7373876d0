"""The dashboard and the alerts in docs/how-to/grafana.* name metrics that the monitor exports."""

from __future__ import annotations

import re

from scripts.testing.synthetic_swarm import SyntheticSwarm
from spes_swarm.monitor.views.prometheus import metrics_text
from tests.helpers.repository import ROOT


def test_each_metric_of_the_dashboard_and_the_alerts_is_exported() -> None:
    swarm = SyntheticSwarm()
    swarm.advance(60.0)
    exported = set(re.findall(r"^# TYPE (\S+)", metrics_text(swarm.state()), re.MULTILINE))
    for name in ("grafana.json", "grafana.md"):
        text = (ROOT / "docs" / "how-to" / name).read_text(encoding="utf-8")
        named = set(re.findall(r"\bspes_swarm_\w+", text))
        assert len(named) >= 5
        assert named <= exported, (name, named - exported)
