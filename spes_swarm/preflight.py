"""What this machine can be seen to lack before torch is imported, which takes seconds. Nothing is changed on disk.

What passes here may still fail later, with the same message: files can vanish, and a driver can be broken.
"""

from __future__ import annotations

import os
from pathlib import Path

from spes_swarm.config import PeerConfig
from spes_swarm.corpus import check_source_exists
from spes_swarm.errors import CheckpointError, ConfigError
from spes_swarm.identity import Identity
from spes_swarm.run_directory import RunDirectory, lock_identity
from spes_swarm.trackers import check_tracker

# Everything that torch may call "cuda": NVIDIA's driver, on Jetson and in the Windows Subsystem for Linux too; ROCm.
_CUDA_DEVICE_FILES = ("nvidia*", "nvhost-*", "nvmap", "dxg", "kfd")


def check_machine(peer: PeerConfig) -> None:
    """Refuses what cannot work on this machine.

    Raises:
        UserError: a device, file, directory or package that the user wants is not there, or in use.
    """
    if peer.device.startswith("cuda") and not has_cuda_hardware():
        raise ConfigError(f"device {peer.device!r} was asked for, but this machine has no CUDA device; use cpu or auto")
    directory = RunDirectory(Path(peer.output_dir))
    directory.check()
    _check_identity(Path(peer.identity) if peer.identity else directory.identity)
    if peer.data is not None:
        check_source_exists(peer.data)
    if peer.initial_weights is not None and not Path(peer.initial_weights).is_dir():
        raise CheckpointError(f"{peer.initial_weights}: no such directory")
    if peer.log is not None:
        check_tracker(peer.log)


def has_cuda_hardware(devices: Path = Path("/dev")) -> bool:
    """Returns True if there is a device file of a driver that torch can use as "cuda"."""
    return any(next(devices.glob(pattern), None) is not None for pattern in _CUDA_DEVICE_FILES)


def _check_identity(path: Path) -> None:
    if path.exists():
        Identity.load(path)
        os.close(lock_identity(path))
