"""`python -m spes_swarm.join`: joins a run, or founds one.

Without --initial-peers it founds a run from --config (default: the quickstart) or from an existing model
(--initial-weights), or continues the run that --output-dir belongs to, and prints the command with which others join.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spes_swarm.base.arguments import end_program, exit_code
from spes_swarm.base.errors import ConfigError, LeftEarlyError, NetworkProcessError, RankError
from spes_swarm.base.wording import said_if_slow
from spes_swarm.config.command_line import OneLineParser
from spes_swarm.peer.output import keep_output
from spes_swarm.peer.stop_signals import STOPPED, StopSignals
from spes_swarm.training.ranks.placement import Placement

if TYPE_CHECKING:
    from spes_swarm.peer.session import Session


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Parses the command line of `join`. Flags override the configuration file.

    Raises:
        ConfigError: a flag is unknown, or a value is of the wrong type.
    """
    parser = OneLineParser(
        prog="python -m spes_swarm.join",
        description="Train a Mixture-of-Experts model together with others, without a server.",
        argument_default=argparse.SUPPRESS,
    )
    run = parser.add_argument_group("the run")
    run.add_argument("--config", type=Path, help="YAML file; its `run` section founds a run (default: quickstart)")
    run.add_argument(
        "--initial-weights", metavar="MODEL", help="found the run from this model: a directory, or USER/REPO[@REVISION]"
    )
    run.add_argument("--initial-peers", nargs="+", metavar="MADDR", help="addresses of peers in the run")
    run.add_argument("--run-id", help="refuse to join any other run")
    run.add_argument("--private", action="store_true", help="found a run in which only invited peers take part")
    run.add_argument("--invitation", metavar="WORD|FILE", help="join a private run with this invitation")
    run.add_argument("--wait-for-peers", type=int, metavar="N", help="wait until N peers are ready, including this one")
    run.add_argument("--max-rounds", type=int, metavar="N", help="leave after N rounds")
    _add_peer_arguments(parser)
    network = parser.add_argument_group("network")
    network.add_argument("--host-maddrs", nargs="+", metavar="MADDR", help="addresses to listen on")
    network.add_argument("--announce-maddrs", nargs="+", metavar="MADDR", help="addresses to announce instead")
    network.add_argument("--client-mode", action="store_true", help="only open connections, accept none")
    network.add_argument(
        "--assume-reachable", action="store_true", help="do not check whether others can open connections to this peer"
    )
    network.add_argument(
        "--relay", metavar="auto|off", help="relay connections for others, and use relays (default: auto)"
    )
    network.add_argument(
        "--upload-mbps", type=float, metavar="MBIT", help="upload bandwidth: sets this peer's share of a round's work"
    )
    network.add_argument(
        "--bootstrap-timeout",
        dest="bootstrap_timeout_s",
        type=float,
        metavar="SECONDS",
        help="how long to try to reach an initial peer (default: 60)",
    )
    hub = parser.add_argument_group("publishing")
    hub.add_argument("--publish-to", metavar="USER/REPO|file:DIR", help="publish the model there while training")
    hub.add_argument("--publish-every", type=int, metavar="ROUNDS", help="rounds between publications (default: 100)")
    hub.add_argument(
        "--publish-mbps", type=float, metavar="MBIT", help="upload limit (default: a tenth of --upload-mbps, or 10)"
    )
    hub.add_argument("--publish-keep", type=int, metavar="N", help="published rounds that keep a tag (default: all)")
    hub.add_argument(
        "--from-hub", metavar="USER/REPO[@REVISION]|file:DIR", help="resume a published run, with or without peers"
    )
    return parser.parse_args(arguments)


def _add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    peer = parser.add_argument_group("this peer")
    peer.add_argument("--experts", metavar="auto|N|i,j", help="which experts to train (default: auto)")
    peer.add_argument("--output-dir", metavar="DIR", help="checkpoints, metrics and identity (default: runs/peer)")
    peer.add_argument("--identity", metavar="FILE", help="identity file (default: OUTPUT_DIR/identity.key)")
    peer.add_argument("--name", help="public nickname")
    peer.add_argument("--data", metavar="SOURCE", help="stdlib, hf:NAME, a path, or a mixture such as 0.7*A + 0.3*B")
    peer.add_argument("--data-differs", action="store_true", help="train on data other than the run's")
    peer.add_argument("--device", metavar="D", help="auto, cpu, cuda, cuda:1 (default: auto)")
    peer.add_argument("--batch-size", type=int, metavar="SEQUENCES", help="sequences in a local step")
    peer.add_argument("--micro-batch-size", metavar="auto|N", help="sequences at a time (default: as many as fit)")
    peer.add_argument("--precision", metavar="auto|fp32|bf16", help="for matrix products (default: bf16 on a GPU)")
    peer.add_argument(
        "--foreign-experts", metavar="FORM", help="how others' experts are stored: fp32, bf16, int8, int4"
    )
    peer.add_argument(
        "--foreign-storage", metavar="device|host", help="where others' experts are kept (default: device)"
    )
    peer.add_argument("--reference-storage", metavar="auto|memory|disk", help="where the swarm's weights are kept")
    peer.add_argument(
        "--previous-reference",
        metavar="auto|memory|disk|none",
        help="where what is needed to take back a harmful round is kept",
    )
    peer.add_argument(
        "--activation-checkpointing", metavar="none|layers|selective", help="recompute activations to save memory"
    )
    peer.add_argument(
        "--optimizer-states", metavar="device|host", help="where the optimiser's moments are (default: device)"
    )
    peer.add_argument("--kernel", metavar="torch|megablocks|loop", help="expert kernel (default: torch)")
    peer.add_argument("--compile", action="store_true", help="compile the model's layers with torch.compile")
    peer.add_argument("--seed", type=int, help="an order of its own for token files (default: the peers divide them)")
    peer.add_argument("--num-threads", type=int, metavar="N", help="CPU threads")
    peer.add_argument(
        "--checkpoint-minutes",
        type=float,
        metavar="M",
        help="write a checkpoint at least every M minutes (default: 20); 0: after every round",
    )
    peer.add_argument(
        "--profile", dest="profile_steps", type=int, metavar="N", help="record N steps for Perfetto: trace.json.gz"
    )
    peer.add_argument(
        "--log-level", metavar="debug|info|warning|error", help="how much OUTPUT_DIR/log.txt tells (default: info)"
    )
    peer.add_argument("--log", metavar="tensorboard|wandb|trackio", help="also send this peer's metrics to a tracker")


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    keep_output()
    signals = StopSignals()
    signals.install()
    return exit_code("join", lambda: _run(arguments, signals), interrupted=STOPPED)


def _run(arguments: list[str] | None, signals: StopSignals) -> int:
    placement = Placement.from_environment(os.environ)
    if placement is not None:
        # Until the ranks have connected, only torchrun can end the others, and it does so only if this rank fails.
        signals.early_code = 1
    try:
        with signals.interruptible():
            if placement is not None and placement.rank > 0:
                return _follow(arguments, placement)
            options = parse_arguments(arguments)
            session = _prepare(options, placement, signals)
        session.run()
    except LeftEarlyError:
        return signals.early_code if signals.requested.is_set() else 0
    except (NetworkProcessError, RankError) as exc:
        print(f"join: {exc}; restart with the same --output-dir to resume from the last checkpoint", file=sys.stderr)
        return 1
    return 0


def _prepare(options: argparse.Namespace, placement: Placement | None, signals: StopSignals) -> Session:
    # Even these imports are slow enough to be interrupted.
    from spes_swarm.peer.join_request import read_request
    from spes_swarm.peer.preflight import check_machine, check_memory, check_run

    draft = read_request(options)
    check_machine(draft.peer)
    check_run(draft.peer, draft.file.run, placement)
    # Everything below imports torch, transformers and hivemind, which takes seconds: mistakes are reported before that.
    with said_if_slow("still importing torch, transformers and hivemind; Ctrl-C stops", partial(print, flush=True)):
        run = draft.build_run()
        if run is not None:
            check_memory(draft.peer, run, placement)  # before hivemind is imported, which takes a second
        from spes_swarm.peer.session import Session

    return Session(draft.peer, run, signals=signals, placement=placement)


def _follow(arguments: list[str] | None, placement: Placement) -> int:
    """Runs a rank other than 0, which gets everything that it needs from rank 0."""
    # At --help or a mistake in the command line every rank must end, or it would wait for rank 0, which prints the text
    # or the reason. This rank reports success: if it failed too, torchrun might end rank 0 before it has printed.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            parse_arguments(arguments)
        except ConfigError:
            return 0
    importing = f"rank {placement.rank} of this peer is still importing torch; Ctrl-C stops"
    with said_if_slow(importing, partial(print, file=sys.stderr)):
        from spes_swarm.training.ranks.follower import follow

    return follow(placement)


if __name__ == "__main__":
    end_program(main())
