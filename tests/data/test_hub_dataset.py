"""A data set on a Hub, read by the real client: which commit, what is fetched, and connections that break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spes_swarm.base.errors import DataError
from spes_swarm.config.data_source import parse_hf
from spes_swarm.data.streaming.dataset import StreamedDataset
from spes_swarm.data.streaming.preparing import Preparing
from spes_swarm.data.streaming.stream_sampler import StreamSampler
from spes_swarm.data.tokenizer import ByteTokenizer
from tests.helpers.hub_server import HubServer
from tests.helpers.streamed_data import document, save_jsonl, save_parquet

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    import datasets
    import huggingface_hub

    with HubServer(tmp_path / "hub") as server:
        server.use(monkeypatch, tmp_path / "cache")
        # Both read the environment when they are imported.
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        template = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(datasets.config, "STREAMING_READ_RETRY_INTERVAL", 0.01)
        monkeypatch.setattr(datasets.config, "STREAMING_OPEN_RETRY_INTERVAL", 0.01)
        yield server


def opened(name: str) -> StreamedDataset:
    source = parse_hf(name)
    assert source is not None
    return StreamedDataset(source)


def texts(dataset: StreamedDataset) -> list[str]:
    return [example.value for unit in range(dataset.num_units) for example in dataset.read(unit)]


def test_a_revision_is_a_commit_and_stays(tmp_path: Path, hub: HubServer) -> None:
    commit = hub.upload(save_jsonl(tmp_path / "old", [range(9), range(9, 12)]), "user/verses", "dataset")
    newer = hub.upload(save_jsonl(tmp_path / "new", [range(40, 50)]), "user/verses", "dataset")
    old, new = opened(f"hf:user/verses@{commit}"), opened("hf:user/verses")
    assert (old.revision, new.revision) == (commit, newer)
    assert old.digest != new.digest
    assert texts(old) == list(map(document, range(12)))
    assert texts(new) == [document(number) for number in [*range(40, 50), *range(9, 12)]]
    assert {path.name for path in (tmp_path / "cache").rglob("*.jsonl")} == set()  # what streams is not stored


def test_resuming_in_the_middle_fetches_few_rows(tmp_path: Path, hub: HubServer) -> None:
    rows = 64_000
    hub.upload(save_parquet(tmp_path / "set", [range(rows)], rows_in_group=1000), "user/table", "dataset")
    size = (tmp_path / "set" / "part-00000.parquet").stat().st_size
    dataset = opened("hf:user/table")
    assert dataset.num_units == 64
    before = hub.counters()["download_bytes"]
    assert next(dataset.read(40, 0, 500)).value == document(40_500)
    assert hub.counters()["download_bytes"] - before < size / 2


@pytest.mark.parametrize("fault", [{"kind": "cut", "fraction": 0.3}, {"kind": "status", "status": 503}])
def test_broken_connections_lose_no_examples(tmp_path: Path, hub: HubServer, fault: dict[str, object]) -> None:
    hub.upload(save_jsonl(tmp_path / "set", [range(200)]), "user/verses", "dataset")
    dataset = opened("hf:user/verses")
    hub.fail_next(match=".jsonl", times=2, **fault)  # type: ignore[arg-type]
    prepare = Preparing(ByteTokenizer(), is_chat=False, name="verses", say=print)
    sampler = StreamSampler(
        dataset, prepare, sequence_length=16, run_seed=0, peer_id="a", holdout_fraction=0.0, timeout_s=60.0
    )
    try:
        read = "".join(ByteTokenizer().decode(sampler.next_batch(1)[0]) for _ in range(200))
    finally:
        sampler.close()
    assert read.startswith("".join(f"{document(number)}<|endoftext|>" for number in range(60)))


def test_what_cannot_be_found_or_reached_is_one_line(tmp_path: Path, hub: HubServer) -> None:
    hub.upload(save_jsonl(tmp_path / "set", [range(9)]), "user/verses", "dataset")
    for name, reason in (
        ("hf:user/missing", "not found|Not Found"),
        ("hf:user/verses@0123abcd", "0123abcd|Invalid"),
        ("hf:user/verses:other", "'other'"),
    ):
        with pytest.raises(DataError, match=f"{name} cannot be opened: .*({reason})") as error:
            opened(name)
        assert "\n" not in str(error.value)
