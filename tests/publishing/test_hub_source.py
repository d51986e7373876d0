"""The way back: a published reference fills a vector, every block verified, whatever the publisher did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spes_swarm.base.arrays import FloatArray
from spes_swarm.base.errors import HubError, PublicationError
from spes_swarm.protocol.consensus.reference import Reference, digest_of_values
from spes_swarm.publishing.card import Results
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.export import pack
from spes_swarm.publishing.publication import PUBLICATION_FILE, describe_file, read_export
from spes_swarm.publishing.source import PublicationSource, open_source
from tests.helpers.publications import MODELS, layout_for, manifest_of, packed, snapshot, values


def published(models: Path, *numbers: int) -> str:
    """A directory with publications of these rounds."""
    target = DirectoryTarget(models)
    for number in numbers:
        export, publication = packed(models.parent, number, tokens=1000 * number, peers=2)
        target.publish(export, publication)
    return f"file:{models}"


def empty(source: PublicationSource) -> FloatArray:
    return np.full(source.layout.num_elements, np.nan, dtype=np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", ["1GB", "30KB"])
@pytest.mark.parametrize("model_type", MODELS)
def test_a_reference_comes_back_bit_by_bit(tmp_path: Path, model_type: str, shard_size: str) -> None:
    manifest = manifest_of(model_type)
    pack(snapshot(4, manifest), tmp_path / "export", Results(tokens=9, peers=2), max_shard_size=shard_size)
    DirectoryTarget(tmp_path / "m").publish(tmp_path / "export", read_export(tmp_path / "export"))
    source = open_source(f"file:{tmp_path / 'm'}")
    reference_N = empty(source)
    source.load(reference_N)
    assert reference_N.tobytes() == values(4, model_type).tobytes()
    assert source.manifest == manifest
    loaded = source.publication
    assert (loaded.round, loaded.tokens, loaded.peers, source.revision) == (4, 9, 2, "round-000004")
    # As the swarm's own books would have it.
    reference = Reference(layout_for(model_type), reference_N)
    reference.adopt(loaded.round, loaded.versions)
    assert reference.digest.hex() == loaded.digest
    assert [digest.hex() for digest in reference.digests] == [block.digest for block in loaded.blocks]
    indices = range(len(source.layout.blocks))
    fetched = dict(source.blocks(indices))
    assert list(fetched) == list(indices)
    for block in source.layout.blocks:
        assert fetched[block.index].tobytes() == reference_N[block.where].tobytes()


def test_each_revision_can_be_read(tmp_path: Path) -> None:
    location = published(tmp_path / "models", 1, 2)
    assert open_source(location).publication.round == 2
    assert open_source(f"{location}@main").publication.round == 2
    assert open_source(f"{location}@round-000001").publication.round == 1
    with pytest.raises(HubError, match=f"{tmp_path / 'models'} has no revision round-000009"):
        open_source(f"{location}@round-000009")
    with pytest.raises(HubError, match=f"nothing was published in {tmp_path / 'nowhere'}; check"):
        open_source(f"file:{tmp_path / 'nowhere'}")


@pytest.mark.slow
def test_where_the_newest_is_damaged_an_earlier_one_is_suggested_and_can_be_read(tmp_path: Path) -> None:
    location = published(tmp_path / "models", 1, 2)
    (tmp_path / "models" / "main" / "spes_swarm.json").write_bytes(b"{")
    with pytest.raises(PublicationError, match=r"name it, as in \.\.\.@round-"):
        open_source(location)
    assert open_source(f"{location}@round-000001").publication.round == 1


def test_a_reader_stays_with_the_revision_that_it_has_opened(tmp_path: Path) -> None:
    source = open_source(published(tmp_path / "models", 1))
    published(tmp_path / "models", 2)
    reference_N = empty(source)
    source.load(reference_N)
    assert source.publication.round == 1
    assert reference_N.tobytes() == values(1).tobytes()


def test_another_run_than_the_expected_is_refused(tmp_path: Path) -> None:
    location = published(tmp_path / "models", 1)
    assert open_source(location, expected_run_id=manifest_of().run_id).manifest == manifest_of()
    with pytest.raises(PublicationError, match="not test-000"):
        open_source(location, expected_run_id="test-000")


# Publishers who lie. The hashes of the files are right: whoever can change a file can change the manifest, too.


@pytest.fixture
def revision(tmp_path: Path) -> Path:
    """The directory of a revision, for tampering."""
    published(tmp_path / "models", 1)
    path = tmp_path / "models" / "revisions" / "round-000001"
    shutil.copytree(path, tmp_path / "copy")  # not linked with the export
    shutil.rmtree(path)
    (tmp_path / "copy").rename(path)
    return path


def tamper(revision: Path, change: Callable[[dict[str, FloatArray]], None]) -> None:
    """Changes the tensors of the first weight file, and says so in the manifest."""
    content = json.loads((revision / PUBLICATION_FILE).read_text())
    name = next(file["name"] for file in content["files"] if file["name"].endswith(".safetensors"))
    tensors = load_file(revision / name)
    change(tensors)
    save_file(tensors, revision / name)
    content["files"] = [
        describe_file(revision / name).model_dump() if file["name"] == name else file for file in content["files"]
    ]
    (revision / PUBLICATION_FILE).write_text(json.dumps(content))


def attempts(revision: Path) -> Iterator[Callable[[], object]]:
    """Both ways to read."""
    source = open_source(f"file:{revision.parent.parent}")
    yield lambda: source.load(empty(source))
    yield lambda: list(source.blocks(range(len(source.layout.blocks))))


def test_a_changed_weight_is_noticed(revision: Path) -> None:
    def change(tensors: dict[str, FloatArray]) -> None:
        next(iter(tensors.values())).flat[0] += 1

    tamper(revision, change)
    for attempt in attempts(revision):
        with pytest.raises(PublicationError, match="does not have the published digest"):
            attempt()


def test_a_missing_tensor_is_noticed(revision: Path) -> None:
    def change(tensors: dict[str, FloatArray]) -> None:
        del tensors[min(tensors)]

    tamper(revision, change)
    for attempt in attempts(revision):
        with pytest.raises(PublicationError, match="missing"):
            attempt()


def test_a_tensor_of_another_shape_is_noticed(revision: Path) -> None:
    def change(tensors: dict[str, FloatArray]) -> None:
        name = min(tensors)
        tensors[name] = tensors[name].reshape(-1, 1).copy()

    tamper(revision, change)
    for attempt in attempts(revision):
        with pytest.raises(PublicationError, match="shape"):
            attempt()


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """Even if the digests are theirs."""
    good = snapshot(1)
    good.blocks[0][0] = np.nan
    digests = tuple(digest_of_values(block_N) for block_N in good.blocks)
    bad = type(good)(good.manifest, good.model, good.layout, 1, good.versions, digests, good.blocks)
    pack(bad, tmp_path / "export", Results())
    DirectoryTarget(tmp_path / "m").publish(tmp_path / "export", read_export(tmp_path / "export"))
    source = open_source(f"file:{tmp_path / 'm'}")
    with pytest.raises(PublicationError, match="'shared'"):
        source.load(empty(source))


def test_weight_files_that_are_larger_than_the_model_are_not_fetched(revision: Path) -> None:
    content = json.loads((revision / PUBLICATION_FILE).read_text())
    content["files"].append({"name": "bomb.safetensors", "size": 1 << 40, "sha256": "0" * 64})
    (revision / PUBLICATION_FILE).write_text(json.dumps(content))
    source = open_source(f"file:{revision.parent.parent}")
    with pytest.raises(PublicationError, match="larger than the model"):
        source.load(empty(source))


def test_a_damaged_disk_is_noticed(revision: Path) -> None:
    path = next(revision.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    source = open_source(f"file:{revision.parent.parent}")
    with pytest.raises(PublicationError, match=path.name):
        source.load(empty(source))


def test_a_vector_that_does_not_fit(tmp_path: Path) -> None:
    source = open_source(published(tmp_path / "models", 1))
    for wrong in (np.empty(3, np.float32), np.empty(source.layout.num_elements, np.float64)):
        with pytest.raises(ValueError, match="expected float32"):
            source.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block 9 of 9"):
        next(source.blocks([9]))
