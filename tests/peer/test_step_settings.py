"""Settings that have no effect on a peer: they are left out, and the user is told."""

from __future__ import annotations

import pytest
import torch

from spes_swarm.config.peer import PeerConfig
from spes_swarm.peer.step_settings import StepSettings


@pytest.mark.parametrize(
    ("storage", "device", "num_ranks", "effective", "note"),
    [
        ("host", "cpu", 1, "device", "; --foreign-storage host has no effect on a CPU, which computes in host memory"),
        ("host", "cuda", 1, "host", ""),
        ("disk", "cpu", 1, "disk", ""),
        ("ranks", "cuda", 1, "device", "; --foreign-storage ranks has no effect on a peer of one rank"),
        ("ranks", "cpu", 2, "ranks", ""),
    ],
)
def test_storage_that_has_no_effect(storage: str, device: str, num_ranks: int, effective: str, note: str) -> None:
    settings = StepSettings.of(PeerConfig(foreign_storage=storage), torch.device(device), num_ranks)
    assert (settings.foreign_storage, settings.notes) == (effective, note)
