"""The monitor's command line, checked before anything starts."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spes_swarm.base.address import listen_addresses, peer_addresses
from spes_swarm.base.errors import ConfigError
from spes_swarm.config.command_line import OneLineParser
from spes_swarm.storage.invitations import find_invitation
from spes_swarm.storage.trackers import check_tracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The command-line options, checked to be consistent."""

    initial_peers: Sequence[str]
    run_id: str | None
    invitation: str | None  # the word
    once: bool
    faults: bool
    proofs: Path | None  # folder
    json: bool
    web: tuple[str, int] | None  # host and port
    history: Path | None
    replay: Path | None
    plot: Path | None
    bootstrap: bool
    host_maddrs: Sequence[str]
    announce_maddrs: Sequence[str]
    identity: Path | None
    log: str | None
    refresh_s: float
    timeout_s: float


def parse_options(arguments: list[str] | None) -> Options:
    """Reads the command line.

    Raises:
        ConfigError: an unknown flag, a wrong value, or flags that contradict each other.
        AddressError: an address that cannot be used.
        InvitationError: the invitation is damaged.
    """
    given = Options(**vars(_parser().parse_args(arguments)))
    options = replace(
        given,
        initial_peers=peer_addresses(given.initial_peers),
        invitation=None if given.invitation is None else find_invitation(given.invitation).to_text(),
        host_maddrs=listen_addresses(given.host_maddrs),
        announce_maddrs=listen_addresses(given.announce_maddrs, announced=True),
    )
    _check(options)
    return options


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="python -m spes_swarm.monitor", description="Watch a swarm from its signed DHT records."
    )
    maddrs: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "MADDR"}
    period: dict[str, Any] = {"type": float, "metavar": "SECONDS"}
    parser.add_argument("--initial-peers", **maddrs, help="addresses of peers of the run")
    parser.add_argument("--run-id", help="refuse any run but this one")
    parser.add_argument(
        "--invitation", metavar="WORD|FILE", help="to a private run; an unlimited one is shown to viewers"
    )
    parser.add_argument(
        "--refresh", **period, default=2.0, dest="refresh_s", help="time between refreshes (default: 2)"
    )
    parser.add_argument(
        "--bootstrap-timeout", **period, default=30.0, dest="timeout_s", help="to reach any peer (default: 30)"
    )
    shown = parser.add_argument_group("output")
    shown.add_argument("--once", action="store_true", help="print the state once and exit")
    shown.add_argument("--faults", action="store_true", help="print who is excluded or without duty, and why, and exit")
    shown.add_argument("--proofs", type=Path, metavar="DIR", help="with --faults: save the proofs of lies there")
    shown.add_argument("--json", action="store_true", help="print JSON, one line for each update")
    shown.add_argument(
        "--web", type=_host_and_port, metavar="HOST:PORT", help="serve a web page, /metrics and /api/state"
    )
    shown.add_argument("--log", metavar="tensorboard|wandb|trackio", help="log the swarm's metrics to a tracker")
    kept = parser.add_argument_group("history")
    kept.add_argument("--history", type=Path, metavar="FILE", help="SQLite file that keeps what was seen")
    kept.add_argument("--replay", type=Path, metavar="FILE", help="show the run in such a file; needs no network")
    kept.add_argument("--plot", type=Path, metavar="FILE", help="with --replay: draw the run (png, svg, pdf)")
    entry = parser.add_argument_group("entry point")
    entry.add_argument(
        "--bootstrap",
        action="store_true",
        help="also be an entry point for newcomers; needs --identity and --host-maddrs",
    )
    entry.add_argument(
        "--identity", type=Path, metavar="FILE", help="file that keeps the peer id (default: a new id each time)"
    )
    entry.add_argument("--host-maddrs", **maddrs, help="where to listen, with a fixed port")
    entry.add_argument("--announce-maddrs", **maddrs, help="addresses to announce instead")
    return parser


def _check(options: Options) -> None:
    for name, seconds in (("--refresh", options.refresh_s), ("--bootstrap-timeout", options.timeout_s)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ConfigError(f"{name}: found {seconds:g}, expected more than 0 seconds")
    if options.log is not None:
        check_tracker(options.log)
    _check_output(options)
    if options.replay is not None:
        for name, given in (
            ("--initial-peers", options.initial_peers),
            ("--run-id", options.run_id),
            ("--invitation", options.invitation),
            ("--history", options.history),
            ("--bootstrap", options.bootstrap),
            ("--log", options.log),
            ("--proofs", options.proofs),
        ):
            if given:
                raise ConfigError(f"{name} cannot be combined with --replay, which shows a file and joins no run")
    elif options.plot is not None:
        raise ConfigError("--plot draws a history file: give it with --replay FILE")
    elif not options.initial_peers and (options.history is None or not options.history.exists()):
        raise ConfigError("--initial-peers is missing: give the address of a peer, or show a file with --replay")
    if options.bootstrap:
        if options.identity is None:
            raise ConfigError("--bootstrap needs --identity FILE: newcomers dial an entry point by its peer id")
        if not options.host_maddrs or any(re.search("/(tcp|udp)/0(/|$)", maddr) for maddr in options.host_maddrs):
            raise ConfigError("--bootstrap needs --host-maddrs with a fixed port, such as /ip4/0.0.0.0/tcp/31337")
    elif options.host_maddrs or options.announce_maddrs:
        raise ConfigError("--host-maddrs and --announce-maddrs are for an entry point: give --bootstrap, too")


def _check_output(options: Options) -> None:
    if options.proofs is not None and not options.faults:
        raise ConfigError("--proofs is where --faults saves proofs: give --faults, too")
    if options.faults and options.plot is not None:
        raise ConfigError("--faults prints, --plot draws: give one of them")
    for ending, given in (("--once", options.once), ("--faults", options.faults)):
        for lasting, other in (("--log", options.log), ("--web", options.web), ("--bootstrap", options.bootstrap)):
            if given and other:
                raise ConfigError(f"{ending} prints and exits, {lasting} keeps running: give one of them")


def _host_and_port(text: str) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 65536):
        raise ConfigError(f"--web: found {text!r}, expected HOST:PORT such as 127.0.0.1:8080 or [::1]:8080")
    return host, int(port)
