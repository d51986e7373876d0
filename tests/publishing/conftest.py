"""Fixtures of the tests of exports and publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.small_disk import mounted_disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than a model."""
    with mounted_disk(tmp_path / "disk", 128 << 10) as disk:
        yield disk
