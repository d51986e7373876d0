"""What the user asks of `join`: command line and configuration file combined, validated before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from spes_swarm.base.address import check_listen_address, check_peer_address
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.experts_wanted import parse_experts
from spes_swarm.config.file import RawConfigFile, default_config_path, read_config_file
from spes_swarm.config.model_size import MAX_EXPERTS
from spes_swarm.config.peer import PeerConfig, override
from spes_swarm.config.run import RunConfig
from spes_swarm.publishing.location import parse_location


@dataclass(frozen=True)
class JoinRequest:
    """A validated request."""

    run: RunConfig | None  # from the configuration file, to found a run
    run_is_explicit: bool  # the user passed --config
    peer: PeerConfig


@dataclass(frozen=True)
class DraftRequest:
    """A request validated except for the model, which needs transformers."""

    file: RawConfigFile
    run_is_explicit: bool
    peer: PeerConfig

    def complete(self) -> JoinRequest:
        """Builds the run's configuration; imports transformers, which takes seconds.

        Raises:
            ConfigError: the model cannot be built, or lacks the experts that the user wants to train.
        """
        run = self.file.build_run()
        if self.run_is_explicit and run is not None:
            parse_experts(self.peer.experts, run.model.num_experts)
        return JoinRequest(run, self.run_is_explicit, self.peer)


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
    for maddr in peer.initial_peers:
        check_peer_address(maddr)
    for maddr in peer.host_maddrs:
        check_listen_address(maddr)
    for maddr in peer.announce_maddrs:
        check_listen_address(maddr, announced=True)
    for flag in ("publish_every", "publish_mbps", "publish_keep"):
        if flags.get(flag) is not None and peer.publish_to is None:
            raise ConfigError(f"--{flag.replace('_', '-')} requires --publish-to")
    if peer.publish_to is not None:
        parse_location(peer.publish_to)
    if peer.from_hub is not None:
        parse_location(peer.from_hub, with_revision=True)
    parse_experts(peer.experts, MAX_EXPERTS)
    return DraftRequest(file, config_path is not None, peer)
