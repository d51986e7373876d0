"""The event streams: what they say, and that no browser can hold up another."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from spes_swarm.monitor.source import HeldState
from spes_swarm.monitor.views.web import feed
from spes_swarm.monitor.views.web.changes import difference, new_points
from tests.helpers.served_monitor import PATIENCE_S, Served, a_swarm


@pytest.mark.slow
def test_a_stream_begins_with_the_state_and_goes_on_with_changes(served: Served) -> None:
    with served.events() as events:
        name, state = next(events)
        assert name == "state"
        assert len(state["peers"]) == 4
        victim = served.swarm.state().peers[0].peer_id
        served.swarm.kill(victim)
        served.swarm.advance(20.0)
        served.swarm.join("newcomer")
        served.tell()
        name, change = next(events)
        assert name == "change"
        assert change["head"]["round"] == 4
        assert [point["round"] for point in change["history"]] == [4]
        (late,) = [peer for peer in change["peers"] if peer["peer_id"] == victim]
        assert late["state"] == "late"
        assert "name" not in late  # only what differs travels
        assert [peer["name"] for peer in change["peers"] if "name" in peer] == ["newcomer"]
        served.swarm.advance(40.0)
        served.tell()
        _, change = next(events)
        assert change["gone"] == [victim]


def test_changes_add_up_to_the_state() -> None:
    swarm = a_swarm(num_peers=20)
    old = swarm.state().to_json()
    for step in range(12):
        swarm.advance(7.0)
        if step == 3:
            swarm.kill(swarm.state().peers[2].peer_id)
        if step == 5:
            swarm.join("newcomer")
            swarm.corrupt(swarm.state().peers[5].peer_id)
        new = swarm.state().to_json()
        change = difference(old, new)
        assert change is not None
        assert _applied(old, json.loads(json.dumps(change))) == new
        old = new


def _applied(state: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """What the page does with a change (store.js), once more."""
    peers = {peer["peer_id"]: peer for peer in state["peers"] if peer["peer_id"] not in change.get("gone", ())}
    passed = change["time"] - state["time"]
    peers = {peer_id: {**peer, "age_s": peer["age_s"] + passed} for peer_id, peer in peers.items()}
    for fields in change.get("peers", ()):
        peers[fields["peer_id"]] = {**peers.get(fields["peer_id"], {}), **fields}
    experts = {entry["expert"]: entry for entry in [*state["experts"], *change.get("experts", ())]}
    result = {**state, "time": change["time"], **change.get("head", {})}
    result["peers"] = sorted(peers.values(), key=lambda peer: str(peer["peer_id"]))
    result["experts"] = [experts[number] for number in sorted(experts)]
    return result


def test_another_run_is_told_as_a_whole_state() -> None:
    first, second = a_swarm().state().to_json(), a_swarm().state().to_json()
    second["run"] = {**second["run"], "run_id": "other"}
    assert difference(first, second) is None


def test_points_of_the_history_are_told_when_new_or_corrected() -> None:
    points = a_swarm(rounds=5).history()
    corrected = replace(points[3], peers=9)
    assert new_points(points[:4], points) == points[4:]
    assert new_points(points, [*points[:3], corrected, points[4]]) == [corrected]
    assert new_points(points, points) == []
    assert new_points(points, points[:2]) is None
    assert new_points(points, points[1:]) is None


def test_the_number_of_streams_is_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "MAX_STREAMS", 2)
    with served.events() as first, served.events() as second:
        assert next(first)[0] == next(second)[0] == "state"
        refused = served.ask("/api/events")
        assert refused.status == 503
        assert "retry-after" in refused.headers
        assert served.ask("/api/state").status == 200
    deadline = time.monotonic() + PATIENCE_S
    while served.ask("/api/events", "HEAD").status == 503 and time.monotonic() < deadline:
        pass
    with served.events() as again:
        assert next(again)[0] == "state"


def test_a_browser_that_lags_behind_gets_the_state_instead_of_a_backlog() -> None:
    async def scenario() -> None:
        swarm = a_swarm()
        source = HeldState(swarm.state(), swarm.history())
        following = feed.Feed(source)
        slow = following.subscribe()
        assert slow is not None
        for _ in range(100):
            slow.offer(b"event: change\ndata: {}\n\n")
        assert await slow.take(1.0) == b""
        assert following.whole(slow).startswith(b"event: state\n")
        assert not slow.lagging
        slow.offer(b"x")
        assert await slow.take(1.0) == b"x"

    asyncio.run(scenario())


def test_cancelling_ends_open_streams_at_once(served: Served) -> None:
    with served.events() as events:
        next(events)
        begun = time.monotonic()
        served.stop()
        assert list(events) == []
        assert time.monotonic() - begun < PATIENCE_S / 2
    with pytest.raises(ConnectionRefusedError):
        served.ask("/")
