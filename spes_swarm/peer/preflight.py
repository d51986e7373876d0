"""Checks that run before slow imports such as torch, which takes seconds. They leave nothing on disk.

A request that passes may still fail later, with the same message: files can vanish, and a driver can be broken.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_swarm.base.address import without_own
from spes_swarm.base.errors import ConfigError, DataError, UserError
from spes_swarm.base.strict import read_section
from spes_swarm.config.data import DataConfig
from spes_swarm.config.data_source import missing_paths
from spes_swarm.config.manifest import RawManifest
from spes_swarm.config.peer import PeerConfig
from spes_swarm.config.run import RunConfig, TrainingConfig
from spes_swarm.data.corpus import check_source
from spes_swarm.peer.join_request import founds_run
from spes_swarm.peer.run_data import PeerData
from spes_swarm.protocol.members.identity import Identity
from spes_swarm.publishing.target import parse_location, parse_model
from spes_swarm.storage.checkpoint import last_peer
from spes_swarm.storage.invitations import own_invitation
from spes_swarm.storage.run_directory import RunDirectory, locked_identity
from spes_swarm.storage.trackers import check_tracker
from spes_swarm.training.ranks.placement import Placement

# Device files of the drivers that torch exposes as "cuda": NVIDIA's (also on Jetson and WSL) and ROCm.
_CUDA_DEVICE_FILES = ("nvidia*", "nvhost-*", "nvmap", "dxg", "kfd")


def check_machine(peer: PeerConfig) -> None:
    """Rejects a request that cannot work on this machine.

    Raises:
        UserError: a requested device, file, directory or package is missing or in use.
    """
    if peer.device.startswith("cuda") and not has_cuda_hardware():
        raise ConfigError(f"device {peer.device!r} was requested, but this machine has no CUDA device; use cpu or auto")
    directory = RunDirectory(Path(peer.output_dir))
    directory.check()
    _check_identity(directory.identity_file(peer.identity), peer.initial_peers)
    known_data = directory.known_data()
    if peer.data is not None:
        # Of a run that exists, PeerData also says what its data are.
        if peer.data_differs or founds_run(peer) or not missing_paths(peer.data):
            check_source(peer.data)
    elif known_data is not None:
        try:
            check_source(known_data.source)
        except DataError as exc:
            raise DataError(f"the data of the last session: {exc}; give --data if they have moved") from exc
    if peer.initial_weights is not None:
        parse_model(peer.initial_weights)
    if peer.log is not None:
        check_tracker(peer.log)
    _check_publications(peer)


def check_request(peer: PeerConfig, run: RunConfig | None, placement: Placement | None) -> None:
    """Applies all checks to a request; see `Session` for the arguments.

    Raises:
        UserError: the request is invalid, or fails `check_machine` or `check_run`.
    """
    own_invitation(peer, RunDirectory(Path(peer.output_dir)))
    if run is not None:
        peer.experts.check(run.model.num_experts)
    check_machine(peer)
    check_run(peer, None if run is None else run.to_dict(), placement)


def check_run(peer: PeerConfig, founded: Mapping[str, Any] | None, placement: Placement | None) -> None:
    """Rejects a request that contradicts the run of the output directory, or cannot found a run.

    Args:
        peer: how this peer takes part.
        founded: settings of the run if this peer founds one, as those of a RunConfig; None: there are none.
        placement: of this process if it is one of several ranks.

    Raises:
        UserError: the request does not fit the directory, or the directory's manifest is corrupt.
    """
    directory = RunDirectory(Path(peer.output_dir))
    stored = directory.raw_manifest()
    run = None if stored is None else stored.run
    if stored is not None and peer.run_id not in (None, stored.run_id):
        raise UserError(
            f"output directory {directory.path} belongs to run {stored.run_id}, not {peer.run_id}; "
            "choose another --output-dir"
        )
    if stored is not None:
        _check_is_same_peer(directory, peer)
        if peer.initial_weights is not None:
            _check_starts_from_model(directory, stored, peer)
    if stored is None and not peer.initial_peers:
        if peer.client_mode:
            raise ConfigError(
                "--client-mode accepts no connections, so no peer could join this one: give the --initial-peers of a "
                "run, or leave out --client-mode"
            )
        if peer.from_hub is None:
            if peer.run_id is not None:
                raise ConfigError("--run-id names a run to join, which needs --initial-peers")
            if founded is None:
                raise ConfigError("founding a run needs a configuration with a `run` section")
            run = founded
    if run is not None:
        batch_size = read_section(TrainingConfig, run["training"], "", "run.training").batch_size_of(peer.batch_size)
        if placement is not None:
            placement.check_batch(batch_size)
        described = read_section(DataConfig, run.get("data", {}), "", "run.data")
        PeerData(peer, directory, print, threading.Event()).choose(described)


def _check_is_same_peer(directory: RunDirectory, peer: PeerConfig) -> None:
    """Refuses another identity than that with which the directory takes part in its run."""
    path = directory.identity_file(peer.identity)
    own = Identity.load(directory.identity).peer_id if directory.identity.exists() else None
    owner = last_peer(directory.checkpoints) or own
    if owner is None or (path.exists() and Identity.load(path).peer_id == owner):
        return
    problem = "is that of another peer" if path.exists() else "does not exist"
    advice = "leave out --identity" if owner == own else "give that peer's file with --identity"
    raise UserError(
        f"output directory {directory.path} belongs to peer {owner}, but identity file {path} {problem}: {advice}, or "
        "choose another --output-dir"
    )


def _check_starts_from_model(directory: RunDirectory, stored: RawManifest, peer: PeerConfig) -> None:
    identity = directory.identity_file(peer.identity)
    if stored.run["model"].get("initial_weights") is None:
        problem = "which does not start from an existing model"
    elif identity.exists() and Identity.load(identity).peer_id != stored.founder:
        problem = "which another peer founded"
    else:
        return  # whether it is this model is checked later
    raise UserError(
        f"output directory {directory.path} belongs to run {stored.run_id}, {problem}: choose another --output-dir to "
        f"found a run from {peer.initial_weights}, or leave out --initial-weights to continue the run"
    )


def check_memory(peer: PeerConfig, run: RunConfig, placement: Placement | None) -> None:
    """Refuses a run that cannot fit into host memory or on the disk; imports torch and transformers, but uses no GPU.

    GPU memory and activations are checked after the network process has been forked.

    Raises:
        ConfigError: the model lacks the wanted experts, or the batch is too large.
        CapacityError: the message says what would fit.
    """
    from spes_swarm.peer.memory.capacity import check_host_memory
    from spes_swarm.peer.memory.disk_space import check_disk

    on_gpu = peer.device != "cpu" and has_cuda_hardware()
    work, experts = check_host_memory(run, peer, on_gpu, 1 if placement is None else placement.world_size)
    check_disk(work, experts, peer)


def has_cuda_hardware(devices: Path = Path("/dev")) -> bool:
    """Returns True if there is a device file of a driver that torch can use as "cuda"."""
    return any(next(devices.glob(pattern), None) is not None for pattern in _CUDA_DEVICE_FILES)


def _check_identity(path: Path, initial_peers: Sequence[str]) -> None:
    if path.exists():
        identity = Identity.load(path)
        with locked_identity(path, identity.peer_id):
            pass
        without_own(initial_peers, identity.peer_id)


def _check_publications(peer: PeerConfig) -> None:
    """Checks publications in directories, and whether there is a token for a Hub, which is contacted later."""
    if peer.from_hub is not None:
        source = parse_location(peer.from_hub, with_revision=True)
        if source.path is not None:
            from spes_swarm.publishing.directory import DirectoryFiles

            DirectoryFiles(source.path, source.revision)
    if peer.publish_to is not None:
        target = parse_location(peer.publish_to)
        if target.path is not None:
            from spes_swarm.publishing.directory import DirectoryTarget

            DirectoryTarget(target.path).check_rights()
        else:
            from spes_swarm.publishing.client import check_access

            check_access(peer.publish_to)
