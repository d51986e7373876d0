"""What a user asks `join` for: command line and configuration file together, checked before anything starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from spes_swarm.address import check_listen_address, check_peer_address
from spes_swarm.config import PeerConfig, RunConfig, default_config_path, load_config, override, parse_experts
from spes_swarm.errors import ConfigError


@dataclass(frozen=True)
class JoinRequest:
    """A request without contradictions in itself."""

    run: RunConfig | None  # of the configuration file, for founding a run
    run_is_explicit: bool  # the user named that file
    peer: PeerConfig


def read_request(options: argparse.Namespace) -> JoinRequest:
    """Reads the configuration and applies the flags.

    Raises:
        ConfigError: the configuration or a flag is wrong.
        AddressError: an address is.
    """
    flags = dict(vars(options))
    config_path = flags.pop("config", None)
    run, peer = load_config(config_path or default_config_path())
    peer = override(peer, **flags)
    for maddr in peer.initial_peers:
        check_peer_address(maddr)
    for maddr in peer.host_maddrs:
        check_listen_address(maddr)
    for maddr in peer.announce_maddrs:
        check_listen_address(maddr, announced=True)
    for flag in ("publish_every", "publish_mbps", "publish_keep"):
        if flags.get(flag) is not None and peer.publish_to is None:
            raise ConfigError(f"--{flag.replace('_', '-')} belongs to --publish-to, which is not given")
    if peer.publish_to is not None or peer.from_hub is not None:
        from spes_swarm.hub.target import parse_location  # takes seconds

        if peer.publish_to is not None:
            parse_location(peer.publish_to)
        if peer.from_hub is not None:
            parse_location(peer.from_hub, with_revision=True)
    if config_path is not None and run is not None:
        parse_experts(peer.experts, run.model.num_experts)
    return JoinRequest(run, config_path is not None, peer)
