"""Paths that users give."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_swarm.base.errors import UserError
from spes_swarm.base.user_paths import user_path


def test_the_home_of_nobody() -> None:
    with pytest.raises(UserError, match="'~no-such-user/x': there is no such home directory"):
        user_path("~no-such-user/x")
    assert user_path("~/x") == Path.home() / "x"
