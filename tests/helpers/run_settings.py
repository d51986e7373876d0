"""What a trainer hands to its network process, for members without a trainer."""

from __future__ import annotations

import os

from spes_swarm.base.arrays import SharedVector
from spes_swarm.config.manifest import Manifest
from spes_swarm.port.messages import RunSettings
from spes_swarm.protocol.consensus.layout import Layout


def settings_without_trainer(
    manifest: Manifest, layout: Layout, *initial_peers: str
) -> tuple[RunSettings, SharedVector, SharedVector]:
    """Returns settings that name this process, with a new reference and contribution."""
    reference, contribution = (SharedVector.create(layout.num_elements) for _ in range(2))
    settings = RunSettings(
        manifest=manifest,
        layout=layout,
        reference_fd=reference.fd,
        contribution_fd=contribution.fd,
        previous_fd=None,
        trainer_pid=os.getpid(),
        client_mode=False,
        bandwidth_mbps=100.0,
        initial_peers=initial_peers,
    )
    return settings, reference, contribution
