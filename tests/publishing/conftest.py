"""Fixtures of the tests of exports and publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.hub_publications import PART_BYTES
from tests.helpers.hub_server import HubServer
from tests.helpers.publications import packed
from tests.helpers.small_disk import mounted_disk

torch.set_num_threads(1)

_names = iter(f"user/model-{number}" for number in range(1000))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than a model."""
    with mounted_disk(tmp_path / "disk", 128 << 10) as disk:
        yield disk


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """One server for all tests of a file; each has a repository of its own."""
    with HubServer(tmp_path_factory.mktemp("hub"), PART_BYTES) as server:
        yield server


@pytest.fixture
def hub_environment(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """This process uses the server, and waits less than a user would."""
    hub.use(monkeypatch, tmp_path / "cache")
    yield
    hub.mend()


@pytest.fixture
def name() -> str:
    """A repository that is not there yet."""
    return next(_names)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Rounds 0 to 3: several files of one part, and no index of several."""
    directory = tmp_path_factory.mktemp("exports")
    return [packed(directory, number, "60KB")[0] for number in range(4)]
