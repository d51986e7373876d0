"""Publications on a disk that others write to: what is not a regular file of the announced size is not read."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spes_swarm.base.errors import HubError, PublicationError
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.publication import (
    MAX_PUBLICATION_BYTES,
    PUBLICATION_FILE,
    check_files,
    load_publication,
    parse_publication,
    read_export,
)
from spes_swarm.publishing.source import open_source
from spes_swarm.publishing.tensor_file import map_tensors, open_regular
from tests.helpers.publications import packed

Damage = Callable[[Path], None]


def pipe(path: Path) -> None:
    """Blocks whoever opens it to read, until somebody opens it to write."""
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def link(path: Path) -> None:
    """To a copy that is right in every byte: what is somewhere else can be exchanged while it is read."""
    copy = path.parent.parent.parent / f"elsewhere-{path.name}"
    shutil.copy(path, copy)
    path.unlink()
    path.symlink_to(copy)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def larger(path: Path) -> None:
    """Some TB of zeros that take no room on the disk."""
    os.truncate(path, 1 << 40)


DAMAGES = {damage.__name__: damage for damage in (pipe, endless, link, directory, larger)}


@pytest.fixture(autouse=True)
def _nothing_blocks() -> Iterator[None]:
    """Ends a test that waits for a pipe, or reads something endless."""

    def too_late(number: int, frame: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(600)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def revision(tmp_path: Path) -> Path:
    """The directory of a publication."""
    export, publication = packed(tmp_path, 1)
    DirectoryTarget(tmp_path / "models").publish(export, publication)
    return tmp_path / "models" / "revisions" / "round-000001"


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("pattern", ["*.safetensors", PUBLICATION_FILE, "config.json"])
def test_only_regular_files_of_the_announced_size_are_read(revision: Path, damage: Damage, pattern: str) -> None:
    location = f"file:{revision.parent.parent}"
    publication = read_export(revision)
    before = open_source(location)
    path = min(revision.glob(pattern))
    damage(path)
    with pytest.raises(PublicationError, match=path.name):
        read_export(revision)
    if path.name == PUBLICATION_FILE:
        for read in (lambda: open_source(location), lambda: load_publication(revision, "it")):
            with pytest.raises(PublicationError, match=path.name):
                read()
        with pytest.raises(PublicationError, match=path.name):
            DirectoryTarget(revision.parent.parent).newest()
        return
    with pytest.raises(PublicationError, match=path.name):
        check_files(revision, publication.files, "it")
    if path.suffix == ".safetensors":
        for source in (before, open_source(location)):
            with pytest.raises(PublicationError, match=path.name):
                source.load(np.empty(source.layout.num_elements, dtype=np.float32))
            with pytest.raises(PublicationError, match=path.name):
                list(source.blocks(range(len(source.layout.blocks))))


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_publisher_does_not_read_them_either(revision: Path, tmp_path: Path, damage: Damage) -> None:
    """It compares with what is there: a damaged revision of the same round is replaced, others are not linked."""
    damage(min(revision.glob("*.safetensors")))
    export, publication = packed(tmp_path, 2)
    published = DirectoryTarget(tmp_path / "models").publish(export, publication)
    assert published.status == "published"
    assert read_export(tmp_path / "models" / "main") == publication


@pytest.mark.parametrize("damage", [pipe, endless, link, directory])
def test_weights_are_mapped_from_regular_files_only(revision: Path, damage: Damage) -> None:
    path = min(revision.glob("*.safetensors"))
    damage(path)
    with pytest.raises((PublicationError, OSError)):
        map_tensors(path)


def test_names_that_lead_out_of_the_directory_are_refused(revision: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(revision, outside)
    models = tmp_path / "models"
    (models / "tags").mkdir()
    (models / "tags" / "best").symlink_to(outside)
    (models / "revisions" / "round-000009").symlink_to(outside)
    for name in ("best", "round-000009"):
        with pytest.raises(PublicationError, match="points outside the directory"):
            open_source(f"file:{models}@{name}")
    (models / "main").unlink()
    (models / "main").symlink_to(outside)
    with pytest.raises(PublicationError, match="points outside the directory"):
        open_source(f"file:{models}")
    with pytest.raises((PublicationError, HubError), match="points outside the directory"):
        DirectoryTarget(models).newest()


def test_a_directory_may_be_a_link_itself(revision: Path, tmp_path: Path) -> None:
    """How users arrange their disks is up to them."""
    (tmp_path / "link").symlink_to(revision.parent.parent)
    assert open_source(f"file:{tmp_path / 'link'}").publication.round == 1
    assert open_source(f"file:{tmp_path / 'link'}@round-000001").publication.round == 1


def test_the_size_is_that_of_the_opened_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with open_regular(path, size=5, max_size=5) as file:
        assert file.read() == b"12345"
    for limits in ({"size": 4}, {"size": 6}, {"max_size": 4}):
        with pytest.raises(PublicationError, match="has 5 bytes"):
            open_regular(path, **limits)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "missing")


def test_a_manifest_of_very_many_values_is_refused_before_they_exist(revision: Path) -> None:
    """Decoding 8 MiB of empty lists would take seconds of CPU time and gigabytes of memory."""
    text = b'{"x":[' + b"[]," * (MAX_PUBLICATION_BYTES // 3 - 10) + b"0]}"
    assert len(text) <= MAX_PUBLICATION_BYTES
    with pytest.raises(PublicationError, match="more entries than any publication"):
        parse_publication(text, "it")


def test_a_header_of_very_many_values_is_refused_before_they_exist(tmp_path: Path) -> None:
    header = b'{"x":[' + b"[]," * 1_000_000 + b"0]}"
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(PublicationError, match="not a safetensors file"):
        map_tensors(path)


def test_the_largest_publication_that_the_schema_allows_is_read(revision: Path) -> None:
    content = json.loads((revision / PUBLICATION_FILE).read_text())
    more = range(10_000 - len(content["files"]))
    content["files"] += [{"name": f"f{i}.bin", "size": i, "sha256": "0" * 64} for i in more]
    content["history"] = [{"round": i, "tokens": i, "loss": 2.5} for i in range(10_000)]
    assert len(parse_publication(json.dumps(content).encode(), "it").files) == 10_000
