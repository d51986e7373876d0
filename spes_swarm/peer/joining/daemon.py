"""The P2P daemon of a peer that joins, and the addresses at which others can connect to it."""

from __future__ import annotations

from dataclasses import dataclass

from spes_swarm.base.address import tcp_endpoint
from spes_swarm.metrics import events
from spes_swarm.network.transport.daemon import listen_again, with_port
from spes_swarm.peer.joining.context import SessionContext
from spes_swarm.peer.joining.run_finder import FoundRun
from spes_swarm.port.commands import COMMAND_TIMEOUT_S, Commands


@dataclass(frozen=True)
class Reach:
    """How others can connect to this peer."""

    maddrs: list[str]  # none if nobody can
    client_mode: bool  # it only opens connections, by choice or because others cannot connect


def listen(context: SessionContext) -> list[str]:
    """Starts p2pd; returns this peer's addresses."""
    maddrs = _start_daemon(context, listen_again(context.peer.host_maddrs, context.directory.known_port()))
    context.console.say(f"peer {context.identity.peer_id}")
    return maddrs


def decide_reach(context: SessionContext, maddrs: list[str], found: FoundRun) -> Reach:
    """Finds out whether others can open connections to this peer; if not, it becomes a private node."""
    reach = _check_reach(context)
    if reach.reachable is False:
        _go_private(context, found.initial_peers)
        maddrs = []
    elif reach.address is not None:
        maddr = f"{reach.address}/p2p/{context.identity.peer_id}"
        maddrs = maddrs if maddr in maddrs else [maddr, *maddrs]
    context.console.say(f"run {found.manifest.run_id}")
    return Reach(maddrs, client_mode=reach.reachable is False)


def _start_daemon(context: SessionContext, host_maddrs: list[str], *, private: bool = False) -> list[str]:
    """Starts p2pd, or restarts it for a peer that cannot be reached; returns this peer's addresses."""
    peer = context.peer
    maddrs = context.ask(
        Commands.start_daemon,
        COMMAND_TIMEOUT_S,
        host_maddrs=host_maddrs,
        announce_maddrs=list(peer.announce_maddrs),
        client_mode=peer.client_mode,
        relay=peer.relay == "auto",
        private=private,
    )
    endpoints = [endpoint for endpoint in map(tcp_endpoint, maddrs) if endpoint is not None]
    if endpoints and not peer.announce_maddrs:
        context.directory.remember_port(endpoints[0][1])
    return maddrs


def _go_private(context: SessionContext, initial_peers: list[str]) -> None:
    """Restarts p2pd as a private node, to which others cannot open connections."""
    peer = context.peer
    if peer.client_mode:
        return  # it never listens
    _start_daemon(context, with_port(peer.host_maddrs, context.directory.known_port()), private=True)
    if initial_peers:
        timeout_s = peer.bootstrap_timeout_s
        context.ask(Commands.bootstrap, timeout_s + 30.0, maddrs=initial_peers, timeout_s=timeout_s)


def _check_reach(context: SessionContext) -> events.Reach:
    """Finds out whether others can open connections to this peer, unless the user has declared it."""
    if context.peer.client_mode or context.peer.assume_reachable:
        reach = events.Reach(reachable=not context.peer.client_mode)
    else:
        reach = context.ask(Commands.check_reach, COMMAND_TIMEOUT_S)
    context.metrics.write(reach)
    for line in reach.describe():
        context.console.say(line)
    return reach
