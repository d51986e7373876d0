"""Settings that have no effect on a peer: they are left out, and the user is told."""

from __future__ import annotations

import pytest
import torch

from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.peer.step_settings import StepSettings


@pytest.mark.parametrize(
    ("storage", "device", "effective", "note"),
    [
        ("host", "cpu", "device", "; --foreign-storage host has no effect on a CPU, which computes in host memory"),
        ("host", "cuda", "host", ""),
    ],
)
def test_storage_that_has_no_effect(storage: str, device: str, effective: str, note: str) -> None:
    settings = StepSettings.of(override(PeerConfig(), foreign_storage=storage), torch.device(device))
    assert (settings.foreign_storage, settings.notes) == (effective, note)
