"""Fixtures of the tests of exports and publications."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.small_disk import mounted_disk

torch.set_num_threads(1)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than a model."""
    with mounted_disk(tmp_path / "disk", 128 << 10) as disk:
        yield disk
