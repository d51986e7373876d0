"""The state of a run in the text exposition format of Prometheus (0.0.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from spes_swarm.monitor.state import PeerState, SwarmState

_ACTIVITIES = ("training", "syncing", "waiting", "joining", "leaving", "late")


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


def _of_run(state: SwarmState) -> Iterator[Metric]:
    run = state.run.run_id
    gauges: dict[str, tuple[str, float | None]] = {
        "round": ("Round that at least half of the peers have committed.", state.round),
        "round_progress_ratio": ("Fraction of the next round's work that is done.", state.round_progress),
        "next_round_seconds": ("Estimated time to the next round.", state.next_round_s),
        "tokens_per_second": ("Training speed of all peers.", state.tokens_per_second),
        "train_loss": ("Training loss of the newest round, median over peers.", state.train_loss),
        "eval_loss": ("Loss on held-out text, median over peers.", state.eval_loss),
        "eval_loss_stderr": ("Standard error of the loss on held-out text.", state.eval_loss_stderr),
        "experts": ("Experts of the model.", state.run.num_experts),
        "experts_covered": ("Experts with at least one holder.", state.experts_covered),
        "consensus_agree_peers": ("Peers at the swarm's round with its most common digest.", state.consensus.agree),
        "consensus_differ_peers": ("Peers whose digest is not the most common one.", len(state.consensus.differ)),
        "up": ("1 while the monitor sees any peer.", float(state.status == "live")),
    }
    for name, (text, value) in gauges.items():
        if value is not None:
            gauge = GaugeMetricFamily(f"spes_swarm_{name}", text, labels=["run"])
            gauge.add_metric([run], float(value))
            yield gauge
    tokens = CounterMetricFamily("spes_swarm_tokens", "Tokens that all peers have trained on.", labels=["run"])
    tokens.add_metric([run], float(state.tokens_total))
    yield tokens
    activities = GaugeMetricFamily("spes_swarm_peers", "Peers by activity.", labels=["run", "state"])
    for activity in _ACTIVITIES:
        activities.add_metric([run, activity], float(sum(peer.state == activity for peer in state.peers)))
    yield activities
    refused = CounterMetricFamily(
        "spes_swarm_refused_records", "Records that the monitor refused.", labels=["run", "kind"]
    )
    for kind, count in sorted(state.refused.items()):
        refused.add_metric([run, kind], float(count))
    yield refused


def _of_peers(state: SwarmState) -> Iterator[Metric]:
    figures: dict[str, tuple[str, Callable[[PeerState], float | None]]] = {
        "round": ("Last round that a peer has committed.", lambda peer: peer.round),
        "tokens_per_second": ("Training speed of a peer.", lambda peer: peer.tokens_per_second),
        "loss": ("Loss of a peer's last local step.", lambda peer: peer.loss),
        "bytes_sent": ("Payload that a peer sent in its last round.", lambda peer: peer.bytes_sent),
        "bytes_received": ("Payload that a peer received in its last round.", lambda peer: peer.bytes_received),
        "round_seconds": ("How long a peer's last round took.", lambda peer: peer.round_seconds),
        "record_age_seconds": ("Age of a peer's last record.", lambda peer: peer.age_s),
        "experts": ("Experts that a peer trains.", lambda peer: len(peer.experts)),
    }
    for name, (text, figure) in figures.items():
        gauge = GaugeMetricFamily(f"spes_swarm_peer_{name}", text, labels=["run", "peer", "name"])
        for peer in state.peers:
            value = figure(peer)
            if value is not None:
                gauge.add_metric([state.run.run_id, peer.peer_id, peer.name], float(value))
        yield gauge
