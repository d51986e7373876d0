"""Publications on a Hub: the real client library against a server of our own, and everything that can break."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # exported lazily

from spes_swarm.base.errors import HubError, PublicationError, SupersededError
from spes_swarm.publishing import client
from spes_swarm.publishing.publication import PUBLICATION_FILE, read_export
from spes_swarm.publishing.repository import RepositoryTarget
from spes_swarm.publishing.source import open_source
from tests.helpers.hub_publications import PART_BYTES, publish, seen
from tests.helpers.hub_server import STRANGER_TOKEN, HubServer
from tests.helpers.publications import layout_for, packed, values

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.publishing.test_hub_repository"])
# huggingface_hub still sends files as its HTTP library no longer likes them.
pytestmark = [
    pytest.mark.usefixtures("hub_environment"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Round 1 in one file of several parts."""
    return packed(tmp_path_factory.mktemp("large"), 1, "1GB")[0]


def weight_bytes(export: Path) -> int:
    return sum(path.stat().st_size for path in export.glob("*.safetensors"))


def sent(hub: HubServer, before: dict[str, int]) -> int:
    return hub.counters().get("lfs_bytes", 0) - before.get("lfs_bytes", 0)


# When all goes well.


@pytest.mark.slow
def test_each_round_is_one_commit_with_a_tag(hub: HubServer, name: str, exports: list[Path]) -> None:
    assert RepositoryTarget(name).newest() is None
    for number in (1, 2, 3):
        before = hub.counters()
        published = publish(name, exports[number], tag="milestone" if number == 2 else None)
        assert (published.status, published.round) == ("published", number)
        assert sent(hub, before) == weight_bytes(exports[number])
        assert published.bytes_sent is not None
        assert weight_bytes(exports[number]) < published.bytes_sent < weight_bytes(exports[number]) + 100_000
        assert seen(hub, name) == read_export(exports[number])
    assert len(hub.commits(name)) == 4  # the Hub's own first one
    assert seen(hub, name, "milestone").round == 2
    for number in (1, 2, 3):
        assert seen(hub, name, f"round-{number:06d}").round == number
    assert hub.refs(name).keys() == {"main", "milestone", "round-000001", "round-000002", "round-000003"}


def test_publishing_again_sends_no_weights_and_makes_no_commit(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[1])
    before = hub.counters()
    published = publish(name, exports[1])
    assert published.status == "unchanged"
    assert sent(hub, before) == 0
    assert hub.counters()["commits"] == before["commits"]


def test_files_that_the_hub_has_are_not_sent(hub: HubServer, name: str, exports: list[Path], tmp_path: Path) -> None:
    """The same weights in another repository of the same server: only the commit travels."""
    publish(name, exports[1])
    before = hub.counters()
    assert publish(f"{name}-again", exports[1]).status == "published"
    assert sent(hub, before) == 0


@pytest.mark.slow
def test_files_that_are_no_longer_published_disappear(hub: HubServer, name: str, large: Path, tmp_path: Path) -> None:
    publish(name, large)
    export, _ = packed(tmp_path, 2, "60KB")
    publish(name, export)
    assert "model.safetensors" not in hub.tree(name)
    assert seen(hub, name).round == 2


@pytest.mark.slow
def test_a_private_repository_is_not_for_strangers(
    hub: HubServer, name: str, exports: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(name, exports[1], private=True)
    assert open_source(name).publication.round == 1
    monkeypatch.setenv("HF_TOKEN", STRANGER_TOKEN)
    with pytest.raises(HubError, match="no such repository, or the token gives no access to it"):
        open_source(name)


@pytest.mark.slow
def test_old_rounds_lose_their_names_and_milestones_keep_theirs(hub: HubServer, name: str, exports: list[Path]) -> None:
    for number, export in enumerate(exports):
        publish(name, export, tag="milestone" if number == 1 else None)
    target = RepositoryTarget(name)
    assert target.prune(keep=2) == [0]
    assert hub.refs(name).keys() == {"main", "milestone", "round-000001", "round-000002", "round-000003"}
    assert target.prune(keep=1) == [2]
    assert hub.refs(name).keys() == {"main", "milestone", "round-000001", "round-000003"}
    assert seen(hub, name).round == 3


@pytest.mark.slow
def test_rounds_only_go_forward(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[2])
    commits = hub.commits(name)
    with pytest.raises(SupersededError, match=f"{name} has round 2 already"):
        publish(name, exports[1])
    fork = read_export(exports[3]).model_copy(update={"round": 2})
    with pytest.raises(SupersededError, match="another state of round 2"):
        RepositoryTarget(name).publish(exports[3], fork)
    assert hub.commits(name) == commits


@pytest.mark.slow
def test_a_tag_is_not_moved(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[1], tag="best")
    with pytest.raises(HubError, match="has a tag best already"):
        publish(name, exports[2], tag="best")
    assert seen(hub, name).round == 1


# Reading.


@pytest.mark.slow
def test_a_reference_comes_back(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[1])
    publish(name, exports[2])
    for location, number in ((name, 2), (f"{name}@round-000001", 1), (f"{name}@main", 2)):
        source = open_source(location)
        reference_N = np.empty(source.layout.num_elements, np.float32)
        source.load(reference_N)
        assert source.publication.round == number
        assert reference_N.tobytes() == values(number).tobytes()
    before = hub.counters()
    open_source(f"{name}@{source.revision}").load(reference_N)
    assert hub.counters()["download_bytes"] - before["download_bytes"] < 20_000  # all weights are in the cache


@pytest.mark.slow
def test_a_damaged_cache_is_mended(hub: HubServer, name: str, large: Path, tmp_path: Path) -> None:
    publish(name, large)
    source = open_source(name)
    reference_N = np.empty(source.layout.num_elements, np.float32)
    source.load(reference_N)
    (cached,) = (tmp_path / "cache").glob("*/snapshots/*/model.safetensors")
    data = bytearray(cached.read_bytes())
    data[-1] ^= 1
    cached.resolve().write_bytes(data)
    source.load(reference_N)
    assert reference_N.tobytes() == values(1).tobytes()


@pytest.mark.slow
def test_a_block_is_fetched_without_the_rest(
    hub: HubServer, name: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spes_swarm.publishing.source._GAP_BYTES", 0)
    publish(name, large)
    source, layout = open_source(name), layout_for()
    before = hub.counters()
    ((index, values_N),) = source.blocks([4])
    place = layout.blocks[4]
    assert index == 4
    assert values_N.tobytes() == values(1)[place.start : place.stop].tobytes()
    fetched = hub.counters()["download_bytes"] - before["download_bytes"]
    assert 4 * place.size <= fetched < 4 * place.size + 10_000  # and the header


@pytest.mark.slow
def test_a_download_that_breaks_off_is_gone_on_with(
    hub: HubServer, name: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(name, large)
    source = open_source(name)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 16 * 1024)  # what is lost at most
    hub.fail_next("cut", match="GET /_cdn/", fraction=0.5)
    before = hub.counters()
    source.load(np.empty(source.layout.num_elements, np.float32))
    ratio = (hub.counters()["download_bytes"] - before["download_bytes"]) / weight_bytes(large)
    assert ratio < 1.6  # the first request counts in full, the second for the missing half


def test_a_repository_that_spes_swarm_has_not_written(hub: HubServer, name: str) -> None:
    RepositoryTarget(name)._create()
    assert RepositoryTarget(name).newest() is None
    with pytest.raises(PublicationError, match="spes_swarm did not write it"):
        open_source(name)
    with pytest.raises(HubError, match="has no such revision"):
        open_source(f"{name}@nowhere")


# When something breaks.


@pytest.mark.slow
def test_a_connection_that_breaks_costs_one_part(hub: HubServer, name: str, tmp_path: Path) -> None:
    export, publication = packed(tmp_path, 10, "1GB")
    before = hub.counters()
    hub.fail_next("drop", match="PUT /_lfs/", fraction=0.5)
    publish(name, export)
    resent = sent(hub, before) - weight_bytes(export)
    assert 0 < resent <= PART_BYTES
    assert seen(hub, name) == publication


@pytest.mark.slow
def test_a_hub_that_goes_away_half_way_is_gone_on_with(hub: HubServer, name: str, tmp_path: Path) -> None:
    """The first files have arrived when all further uploads fail; a second run sends the others."""
    export, publication = packed(tmp_path, 11, "60KB")
    half = publication.weights[len(publication.weights) // 2 :]
    for file in half:
        hub.fail_next("status", match=f"PUT /_lfs/{file.sha256}", times=-1, status=507)
    with pytest.raises(HubError, match="no room left"):
        publish(name, export)
    assert PUBLICATION_FILE not in hub.tree(name)
    hub.mend()
    middle = hub.counters()
    publish(name, export)
    assert seen(hub, name) == publication
    assert sent(hub, middle) == sum(file.size for file in half)


@pytest.mark.slow
@pytest.mark.parametrize(
    "match",
    ["POST /api/models/{}/commit/main", "GET /api/models/{}/revision/main", "POST /api/models/{}/tag/", "PUT /_lfs/"],
)
def test_a_busy_hub_is_waited_for(hub: HubServer, name: str, exports: list[Path], match: str, tmp_path: Path) -> None:
    export, publication = packed(tmp_path, 20, "60KB")
    publish(name, exports[1])
    hub.fail_next("status", match=match.format(name), times=2, status=429, retry_after=0)
    publish(name, export)
    assert seen(hub, name) == publication
    assert len(hub.commits(name)) == 3


def test_a_hub_that_asks_for_too_much_patience(hub: HubServer, name: str, exports: list[Path]) -> None:
    hub.fail_next("status", match="/api/whoami-v2", status=429, retry_after=100_000)
    with pytest.raises(HubError, match="try again later"):
        publish(name, exports[1])


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_made_once(hub: HubServer, name: str, exports: list[Path]) -> None:
    publish(name, exports[1])
    hub.fail_next("lose", match=f"POST /api/models/{name}/commit/")
    assert publish(name, exports[2]).status == "published"
    assert len(hub.commits(name)) == 3
    assert hub.refs(name)["round-000002"] == hub.commits(name)[0]


@pytest.mark.slow
def test_of_two_publishers_the_first_one_counts(hub: HubServer, name: str, exports: list[Path]) -> None:
    """The second one's commit finds that the head has moved, and looks again."""
    publish(name, exports[1])
    hub.fail_next("hold", match=f"POST /api/models/{name}/commit/", fraction=0.0)
    slow = _CONTEXT.Process(target=publish_in_child, args=(name, exports[2], dict(os.environ)))
    slow.start()
    hub.wait_held()
    hub.mend()
    publish(name, exports[3])
    hub.release()
    slow.join(30)
    assert slow.exitcode == 2
    assert seen(hub, name).round == 3
    assert len(hub.commits(name)) == 3


def publish_in_child(name: str, export: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the process that is forked here may have been started with another one
    try:
        publish(name, export)
    except SupersededError:
        os._exit(2)


@pytest.mark.slow
@pytest.mark.parametrize("match", ["PUT /_lfs/", "POST /api/models/{}/commit/", "POST /api/models/{}/tag/"])
def test_a_killed_publisher_leaves_the_publication_before(
    hub: HubServer, name: str, exports: list[Path], tmp_path: Path, match: str
) -> None:
    export, publication = packed(tmp_path, 30 + len(match), "60KB")
    publish(name, exports[1])
    hub.fail_next("hold", match=match.format(name), fraction=0.5)
    process = _CONTEXT.Process(target=publish_in_child, args=(name, export, dict(os.environ)))
    process.start()
    hub.wait_held()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(30)
    hub.mend()
    hub.release()
    assert process.exitcode == -signal.SIGKILL
    # What the machine has taken from the process before it died still arrives: a commit may be made.
    assert seen(hub, name).round in ((1,) if "_lfs" in match else (1, publication.round))
    before = hub.counters()
    publish(name, export)
    assert seen(hub, name) == publication
    assert hub.refs(name)[f"round-{publication.round:06d}"] == hub.commits(name)[0]
    assert sent(hub, before) < weight_bytes(export) if "_lfs" in match else sent(hub, before) == 0


def test_a_round_whose_publisher_died_before_its_tag_gets_it_later(
    hub: HubServer, name: str, exports: list[Path]
) -> None:
    publish(name, exports[1])
    RepositoryTarget(name)._untag("round-000001")
    publish(name, exports[2])
    assert hub.refs(name).keys() == {"main", "round-000001", "round-000002"}
    assert seen(hub, name, "round-000001").round == 1


@pytest.mark.slow
def test_a_hub_whose_disk_is_full(small_disk: Path, exports: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer(small_disk / "hub", PART_BYTES) as full:
        monkeypatch.setenv("HF_ENDPOINT", full.endpoint)
        with pytest.raises(HubError, match="the Hub has no room left"):
            publish("user/model", exports[1])
        assert PUBLICATION_FILE not in full.tree("user/model")


@pytest.mark.filterwarnings("ignore:Not enough free disk space:UserWarning")
def test_a_disk_that_is_too_small_for_what_is_read(
    small_disk: Path, name: str, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(name, large)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(small_disk))
    source = open_source(name)
    with pytest.raises(HubError, match="this machine's disk is full"):
        source.load(np.empty(source.layout.num_elements, np.float32))


def test_a_hub_that_does_not_answer_is_asked_again(hub: HubServer, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "TIMEOUT", httpx.Timeout(2.0))
    hub.fail_next("hold", match="/api/whoami-v2", fraction=0.0)
    RepositoryTarget(name).check_rights()  # the second attempt is answered
    hub.wait_held()
    hub.release()
