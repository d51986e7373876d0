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
from spes_swarm.base.log import quiet_import_of_hivemind
from spes_swarm.base.wording import said_if_slow
from spes_swarm.config.command_line import OneLineParser, add_flags
from spes_swarm.config.peer import PeerConfig
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
    parser.add_argument("--config", type=Path, help="YAML file; its `run` section founds a run (default: quickstart)")
    parser.add_argument("--private", action="store_true", help="found a run in which only invited peers take part")
    add_flags(parser, PeerConfig)
    return parser.parse_args(arguments)


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
        if not signals.requested.is_set():
            return 0
        print("stopped before this peer had joined", flush=True)
        return signals.early_code
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
    importing = "still importing torch, transformers and hivemind; Ctrl-C stops"
    with said_if_slow(importing, partial(print, flush=True)), quiet_import_of_hivemind():
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
