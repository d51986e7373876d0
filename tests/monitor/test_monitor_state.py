"""The JSON form, its published schema, and what Prometheus reads."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from prometheus_client.parser import text_string_to_metric_families

from spes_swarm.monitor.schema import STATE_SCHEMA
from spes_swarm.monitor.state import Excluded, SwarmState, WithoutDuty, to_text
from spes_swarm.monitor.views.prometheus import metrics_text
from tests.helpers.monitoring import (
    RUN,
    Watched,
    peer_id,
    peer_state,
    points,
    progress,
    routing_state,
    swarm_state,
    troubled_state,
)

STATES = {
    "nobody": swarm_state(),
    "three": swarm_state([peer_state(n) for n in range(3)]),
    "trouble": troubled_state(),
    "from a ledger": Watched().look({peer_id(0): progress(), peer_id(1): progress(name="\x1b[1m<b>")}),
    "routing": routing_state(),
    "liars": swarm_state(
        [peer_state(0)],
        excluded=(
            Excluded(peer_id=peer_id(7), name="", by=1, of=1, since=1.5, verified=False),
            Excluded(peer_id=peer_id(8), name="x", by=1, of=1, since=1.5, verified=True, round=3, part=0, why="y"),
        ),
        without_duty=(WithoutDuty(peer_id=peer_id(9), name="z", by=1, of=1, since=2, kinds=("late",)),),
    ),
    "thousand": swarm_state([peer_state(n) for n in range(1000)]),
}


def validator(definition: str | None = None) -> jsonschema.Draft202012Validator:
    jsonschema.Draft202012Validator.check_schema(STATE_SCHEMA)
    schema = STATE_SCHEMA if definition is None else {"$ref": f"#/$defs/{definition}", "$defs": STATE_SCHEMA["$defs"]}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_every_state_passes_the_published_schema_and_comes_back_equal(name: str) -> None:
    state = STATES[name]
    text = to_text(state)
    validator().validate(json.loads(text))
    assert "\n" not in text
    assert to_text(SwarmState.from_json(json.loads(text))) == text


def test_every_point_of_the_history_passes_the_published_schema() -> None:
    for point in points(3):
        validator("history_point").validate(point.to_json())


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"surprise": 1},
        {"round": -1},
        {"round": 1.5},
        {"status": "fine"},
        {"tokens_total": 1 << 60},
        {"refused": {"ugly": 1}},
        {"consensus": {"digest": "xyz", "agree": 1, "differ": []}},
        {"faults": [{"time": 1.0, "peer_id": "QmX", "kind": "<b>"}]},
    ],
)
def test_the_schema_refuses_what_is_not_a_state(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator().validate({**STATES["three"].to_json(), **change})


@pytest.mark.parametrize("name", ["\x1b[0m", "<b>", 'a"b', "line\nbreak", "x" * 41])
def test_the_schema_refuses_a_name_that_is_not_harmless(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator("peer").validate({**STATES["three"].to_json()["peers"][0], "name": name})


def test_every_field_is_required_and_described_by_the_schema() -> None:
    state = STATES["three"].to_json()
    assert set(STATE_SCHEMA["required"]) == set(STATE_SCHEMA["properties"]) == set(state)
    liars = STATES["liars"].to_json()
    for name, value in (
        ("peer", state["peers"][0]),
        ("expert", state["experts"][0]),
        ("excluded", liars["excluded"][0]),
        ("without_duty", liars["without_duty"][0]),
    ):
        definition = STATE_SCHEMA["$defs"][name]
        assert set(definition["required"]) == set(definition["properties"]) == set(value)


# Prometheus.


def samples(state: SwarmState) -> dict[tuple[str, str, str], float]:
    """By name, peer and remaining label; read by the official parser."""
    found = {}
    for family in text_string_to_metric_families(metrics_text(state)):
        assert family.name.startswith("spes_swarm_")
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["run"] == RUN.run_id
            rest = next((sample.labels[label] for label in ("state", "kind", "expert") if label in sample.labels), "")
            key = (sample.name, sample.labels.get("peer", ""), rest)
            assert key not in found
            found[key] = sample.value
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
def test_the_official_parser_reads_the_metrics_of_every_state(name: str) -> None:
    state, read = STATES[name], samples(STATES[name])
    assert read["spes_swarm_round", "", ""] == state.round
    assert read["spes_swarm_tokens_total", "", ""] == state.tokens_total
    assert read["spes_swarm_up", "", ""] == (state.status == "live")
    assert sum(read["spes_swarm_peers", "", activity] for activity in ("training", "late", "syncing")) == len(
        state.peers
    )
    for peer in state.peers:
        assert read["spes_swarm_peer_tokens_per_second", peer.peer_id, ""] == peer.tokens_per_second
    assert read["spes_swarm_excluded_peers", "", ""] == len(state.excluded)
    assert read["spes_swarm_peers_without_duty", "", ""] == len(state.without_duty)
    for kind, count in state.refused.items():
        assert read["spes_swarm_refused_records_total", "", kind] == count


def test_the_health_of_the_routers_is_exported_for_each_expert() -> None:
    read = samples(STATES["routing"])
    assert read["spes_swarm_load_entropy_ratio", "", ""] == 0.875
    assert read["spes_swarm_dead_experts", "", ""] == 2
    assert read["spes_swarm_held_experts_token_ratio", "", ""] == 0.25
    assert [read["spes_swarm_expert_load", "", str(expert)] for expert in range(8)] == [0.5, *[1.0] * 7]
    assert [read["spes_swarm_expert_dead_layers", "", str(expert)] for expert in range(8)] == [2, *[0] * 7]


def test_what_nobody_has_told_is_left_out() -> None:
    read = samples(swarm_state([peer_state(0, loss=None)], train_loss=None))
    assert ("spes_swarm_train_loss", "", "") not in read
    assert ("spes_swarm_peer_loss", peer_id(0), "") not in read
    assert not [name for name, _, _ in read if name.startswith(("spes_swarm_expert_", "spes_swarm_dead"))]


def test_a_name_cannot_break_out_of_its_label() -> None:
    """Even one that nobody has made harmless."""
    hostile = 'x"} 1\nspes_swarm_round{run="fake"} 666\n# \\'
    state = swarm_state([peer_state(0, name=hostile)])
    assert samples(state)["spes_swarm_round", "", ""] == 12
    (family,) = (f for f in text_string_to_metric_families(metrics_text(state)) if f.name == "spes_swarm_peer_round")
    assert family.samples[0].labels["name"] == hostile
