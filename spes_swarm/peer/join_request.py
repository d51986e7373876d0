"""What the user asks of a session: settings, in `join` also the command line, validated before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from spes_swarm.base.address import check_listen_address, check_peer_address
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.experts_wanted import parse_experts
from spes_swarm.config.file import RawConfigFile, default_config_path, read_config_file
from spes_swarm.config.model_size import MAX_EXPERTS
from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.config.run import RunConfig
from spes_swarm.publishing.location import parse_location
from spes_swarm.storage.run_directory import RunDirectory


@dataclass(frozen=True)
class DraftRequest:
    """A request of `join` validated except for the model, which needs transformers."""

    peer: PeerConfig
    file: RawConfigFile
    run_is_explicit: bool  # the user passed --config

    def build_run(self) -> RunConfig | None:
        """Builds the run of a Session; imports transformers, which takes seconds.

        Raises:
            ConfigError: its model cannot be built.
        """
        # The quickstart is only for founding: nothing is expected of a run that is joined or continued.
        return self.file.build_run() if self.run_is_explicit or founds_run(self.peer) else None


def founds_run(peer: PeerConfig) -> bool:
    """Returns True if the peer would found a run, rather than join or continue one."""
    if peer.initial_peers or peer.from_hub is not None:
        return False
    return RunDirectory(Path(peer.output_dir)).raw_manifest() is None


def read_request(options: argparse.Namespace) -> DraftRequest:
    """Reads the configuration and applies the flags.

    Raises:
        ConfigError: the configuration or a flag is invalid.
        AddressError: an address is invalid.
    """
    flags = dict(vars(options))
    config_path = flags.pop("config", None)
    file = read_config_file(config_path or default_config_path())
    peer = override(file.peer, **flags)
    for flag in ("publish_every", "publish_mbps", "publish_keep"):
        if flags.get(flag) is not None and peer.publish_to is None:
            raise ConfigError(f"--{flag.replace('_', '-')} requires --publish-to")
    check_peer(peer)
    return DraftRequest(peer, file, config_path is not None)


def check_peer(peer: PeerConfig) -> None:
    """Checks the settings of a peer that have a grammar of their own.

    Raises:
        ConfigError: a setting is invalid.
        AddressError: an address is invalid.
    """
    for maddr in peer.initial_peers:
        check_peer_address(maddr)
    for maddr in peer.host_maddrs:
        check_listen_address(maddr)
    for maddr in peer.announce_maddrs:
        check_listen_address(maddr, announced=True)
    if peer.publish_to is not None:
        parse_location(peer.publish_to)
    if peer.from_hub is not None:
        parse_location(peer.from_hub, with_revision=True)
    parse_experts(peer.experts, MAX_EXPERTS)
