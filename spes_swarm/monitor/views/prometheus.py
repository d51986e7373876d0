"""The state of a run in the text exposition format of Prometheus (0.0.4).

The gauges are those that the fields of the state declare (`Metric.gauge`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from spes_swarm.monitor.state import Consensus, ExpertState, PeerActivity, PeerState, RunInfo, SwarmState
from spes_swarm.protocol.members.round_metrics import RoundMetrics, metrics_of


def metrics_text(state: SwarmState) -> str:
    """All metrics of a state; unknown values are omitted, not zero."""
    return generate_latest(_Snapshot(state)).decode()


class _Snapshot(Collector):
    """Presents one state as a collector of prometheus_client."""

    def __init__(self, state: SwarmState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from _of_run(self._state)
        yield from _of_peers(self._state)
        yield from _of_experts(self._state)


def _of_run(state: SwarmState) -> Iterator[Metric]:
    run = state.run.run_id
    for part, metrics in (
        (state, metrics_of(SwarmState)),
        (state.run, metrics_of(RunInfo)),
        (state.consensus, metrics_of(Consensus)),
    ):
        for field, metric in metrics.items():
            value = getattr(part, field)
            if metric.gauge is not None and value is not None:
                gauge = GaugeMetricFamily(f"spes_swarm_{metric.gauge}", _sentence(metric.help), labels=["run"])
                gauge.add_metric([run], _number(value))
                yield gauge
    up = GaugeMetricFamily("spes_swarm_up", "1 while the monitor sees any peer.", labels=["run"])
    up.add_metric([run], float(state.status == "live"))
    yield up
    tokens = CounterMetricFamily("spes_swarm_tokens", "Tokens that all peers have trained on.", labels=["run"])
    tokens.add_metric([run], float(state.tokens_total))
    yield tokens
    activities = GaugeMetricFamily("spes_swarm_peers", "Peers by activity.", labels=["run", "state"])
    for activity in get_args(PeerActivity):
        activities.add_metric([run, activity], float(sum(peer.state == activity for peer in state.peers)))
    yield activities
    refused = CounterMetricFamily(
        "spes_swarm_refused_records", "Records that the monitor refused.", labels=["run", "kind"]
    )
    for kind, count in sorted(state.refused.items()):
        refused.add_metric([run, kind], float(count))
    yield refused


def _of_peers(state: SwarmState) -> Iterator[Metric]:
    for field, metric in metrics_of(PeerState).items():
        # Of the round metrics, the swarm's medians suffice: each would be one more series for every peer.
        if metric.gauge is None or field in metrics_of(RoundMetrics):
            continue
        gauge = GaugeMetricFamily(
            f"spes_swarm_peer_{metric.gauge}", _sentence(metric.help), labels=["run", "peer", "name"]
        )
        for peer in state.peers:
            value = getattr(peer, field)
            if value is not None:
                gauge.add_metric([state.run.run_id, peer.peer_id, peer.name], _number(value))
        yield gauge


def _of_experts(state: SwarmState) -> Iterator[Metric]:
    for field, metric in metrics_of(ExpertState).items():
        gauge = GaugeMetricFamily(f"spes_swarm_{metric.gauge}", _sentence(metric.help), labels=["run", "expert"])
        for expert in state.experts:
            if expert.load is not None:  # no series for models with so many experts that no load is reported
                gauge.add_metric([state.run.run_id, str(expert.expert)], _number(getattr(expert, field)))
        yield gauge


def _number(value: Any) -> float:
    return float(len(value) if isinstance(value, tuple) else value)


def _sentence(phrase: str) -> str:
    return f"{phrase[0].upper()}{phrase[1:]}."
