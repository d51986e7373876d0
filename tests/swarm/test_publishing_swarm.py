"""Peers publish while they train: one dies at it, another takes over; the run goes on from what was published."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from scripts.testing.local_peer import PATIENCE_S, LocalPeer, LocalPeerError
from spes_swarm import publish
from tests.helpers.hub_join import launch_at
from tests.helpers.hub_server import STRANGER_TOKEN, TOKEN, HubServer
from tests.helpers.swarm import TINY_RUN, merged

pytestmark = [
    pytest.mark.swarm,
    # huggingface_hub still sends files as its HTTP library no longer likes them.
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]
REPOSITORY = "user/model"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


def start(hub: HubServer, directory: Path, *arguments: object, token: str = TOKEN) -> LocalPeer:
    common = ["--host-maddrs", "/ip4/127.0.0.1/tcp/0", "--num-threads", "1"]
    # The process that publishes has the lowest priority: peers that train as fast as they can would leave it nothing
    # of a busy machine, and would already be due to publish again when it has ended.
    return LocalPeer(directory, [*common, *map(str, arguments)], launch_at(hub, token, pause_s=0.3))


def publisher_of(peer: LocalPeer) -> psutil.Process | None:
    """The process with which a peer publishes, if it is at it."""
    for process in peer.tree():
        try:
            if "spes_swarm.publish" in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def published(hub: HubServer) -> dict[str, Any] | None:
    """What the repository says of itself; every file that it names must be there with the hash that it says."""
    tree = hub.tree(REPOSITORY)
    if "spes_swarm.json" not in tree:
        return None
    manifest: dict[str, Any] = json.loads(hub.files(REPOSITORY)["spes_swarm.json"])
    assert {file["name"]: file["sha256"] for file in manifest["files"]}.items() <= tree.items()
    return manifest


def test_a_dead_publisher_is_replaced_and_the_run_goes_on_from_the_hub(tmp_path: Path, hub: HubServer) -> None:
    config = tmp_path / "run.yaml"
    # With leases of 20 s whoever is left soon has all experts, so that the curve can be compared.
    changes = {"round": {"progress_ttl_s": 6.0, "lease_s": 20.0}, "experts_per_peer": 8}
    config.write_text(yaml.safe_dump({"run": merged(TINY_RUN, changes)}), "utf-8")
    hub.fail_next("hold", match="/_lfs/", times=1, fraction=0.5)
    volunteer = ["--publish-to", REPOSITORY, "--publish-every", 5, "--wait-for-peers", 2]
    with ExitStack() as stack:
        a = stack.enter_context(start(hub, tmp_path / "a", "--config", config, *volunteer))
        b = stack.enter_context(start(hub, tmp_path / "b", "--initial-peers", a.address(), *volunteer))
        hub.wait_held()
        peers = {peer: process for peer in (a, b) if (process := publisher_of(peer)) is not None}
        assert len(peers) == 1, "only the first in line publishes"
        (victim, process), survivor = *peers.items(), b if a in peers else a
        assert published(hub) is None
        victim.kill()
        process.wait(PATIENCE_S)  # it does not outlive its peer
        hub.release()
        event = survivor.wait_for("publish")
        manifest = published(hub)
        assert manifest is not None
        assert (manifest["round"], manifest["digest"]) == (event["round"], event["digest"])
        rounds = survivor.rounds()
        assert rounds[event["round"]]["digest"] == event["digest"]
        assert manifest["tokens"] > 0
        assert survivor.terminate() == 0
        outputs = [peer.output_dir for peer in (a, b)]
    # Nobody is there any more.
    with start(hub, tmp_path / "c", "--from-hub", f"{REPOSITORY}@round-{event['round']:06}", "--max-rounds", 3) as c:
        assert c.wait() == 0
        assert c.events("from_hub")[0]["digest"] == event["digest"]
        outputs.append(c.output_dir)
        first = c.rounds()[event["round"] + 1]
        assert first["eval_loss"] == pytest.approx(rounds[event["round"]]["eval_loss"], abs=0.15)
        assert first["eval_loss"] < rounds[1]["eval_loss"] - 0.15
    for name in ("metrics.jsonl", "console.log"):
        for text in (output / name for output in outputs):
            assert not text.exists() or TOKEN not in text.read_text(errors="replace"), text
    card = hub.files(REPOSITORY)["README.md"].decode()
    assert TOKEN not in card
    assert str(tmp_path) not in card


def test_a_newcomer_takes_from_the_hub_what_the_swarm_still_has(
    tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only half of the experts are trained, so the blocks of the others stay as they were published."""
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"run": merged(TINY_RUN, {"round": {"inner_steps": 5}})}), "utf-8")
    checkpoints = ["--checkpoint-minutes", 0]
    with start(hub, tmp_path / "a", "--config", config, "--experts", "0,1,2,3", *checkpoints) as a:
        a.wait_for_round(2)
        hub.use(monkeypatch, tmp_path / "cache")
        assert publish.main([str(a.output_dir), "--to", REPOSITORY]) == 0
        a.wait_for_round(max(a.rounds()) + 1)
        joining = ["--initial-peers", a.address(), "--from-hub", REPOSITORY, "--experts", "4,5,6,7"]
        with start(hub, tmp_path / "b", *joining) as b:
            event = b.wait_for("round", lambda e: e["peers"] == 2)
            (from_hub,) = b.events("hub_blocks")
            sync = b.events("sync")[0]
            assert {5, 6, 7, 8} <= set(from_hub["blocks"])
            assert 0 not in from_hub["blocks"]
            assert sync["resumed_bytes"] == from_hub["payload_bytes"]
            assert sync["payload_bytes"] > 0
            assert not b.events("from_hub")
            assert not (b.output_dir / "reference.partial").exists()
            a.wait_for_round(event["round"])
            assert a.rounds()[event["round"]]["digest"] == event["digest"]


def test_a_hub_that_fails_costs_no_round(tmp_path: Path, hub: HubServer) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"run": merged(TINY_RUN, {"round": {"inner_steps": 5}})}), "utf-8")
    hub.fail_next("status", match="whoami", times=-1, status=503)
    with start(
        hub, tmp_path / "a", "--config", config, "--publish-to", REPOSITORY, "--publish-every", 1, "--max-rounds", 400
    ) as peer:
        fault = peer.wait_for("fault", lambda event: event["kind"] == "publish")
        assert f"{REPOSITORY}: the Hub answered with an error (503); " in peer.text()
        assert "; training starts, and publishing is tried when a round is due" in peer.text()
        assert TOKEN not in fault["detail"]
        assert str(tmp_path) not in fault["detail"]
        after = max(peer.rounds())
        peer.wait_for_round(after + 5)
        assert peer.terminate() == 0
    with pytest.raises(LocalPeerError):
        peer.wait_for("publish", timeout_s=0)
    assert published(hub) is None


def test_a_token_that_may_not_publish_is_refused_before_the_first_round(tmp_path: Path, hub: HubServer) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"run": TINY_RUN}), "utf-8")
    refusals = {"hf_wrong": "does not accept the token", STRANGER_TOKEN: "this token cannot create it"}
    for token, why in refusals.items():
        with start(hub, tmp_path / token, "--config", config, "--publish-to", REPOSITORY, token=token) as peer:
            assert peer.wait() == 2
            assert why in peer.text()
            assert not peer.rounds()
