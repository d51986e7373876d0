"""Refusals by the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from spes_swarm.base.errors import ProtocolError


def refused(kind: str, call: Callable[[], Any]) -> None:
    """Checks that a call raises a ProtocolError of this kind."""
    with pytest.raises(ProtocolError) as error:
        call()
    assert error.value.kind == kind, error.value
