"""Publishes a round to a repository of the Hugging Face Hub, or to a directory.

    python -m spes_swarm.publish OUTPUT_DIR --to USER/REPO
    python -m spes_swarm.publish OUTPUT_DIR --to file:/srv/models/mine --tag milestone --keep 10

OUTPUT_DIR belongs to a peer, running or not (its newest checkpoint is published), or was written by
`spes_swarm.export`. Any peer may publish, and the result does not depend on which one does. Readers see either the
whole publication or the previous one. The Hub token comes from HF_TOKEN or `hf auth login`.

Exit codes: 0, published, or already there; 2, a mistake or a refusal, explained in one line on stderr. With `--json`,
one line of JSON on stdout reports the result. No output contains paths or tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import psutil

from spes_swarm.base import log
from spes_swarm.base.address import peer_addresses
from spes_swarm.base.arguments import MAX_SHARD_SIZE, end_program, handle_interrupts, shard_bytes, show_any_text
from spes_swarm.base.errors import UserError
from spes_swarm.config.command_line import OneLineParser


def go_to_background() -> None:
    """Gives this process the lowest CPU and disk priority."""
    os.nice(19)
    process = psutil.Process()
    if hasattr(process, "ionice"):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


def main(arguments: list[str] | None = None) -> int:
    """Command-line entry point; returns the exit code."""
    show_any_text()
    interrupted = "interrupted; earlier publications are intact"
    handle_interrupts("publish", interrupted)
    started = time.monotonic()
    options: argparse.Namespace | None = None
    try:
        options = _parser().parse_args(arguments)
        if options.background:
            go_to_background()
        shard_bytes(options.max_shard_size)
        _check_source(options.directory)
        # Everything below imports torch and transformers, which takes seconds.
        from spes_swarm.publishing.publisher import publish

        with _log_of_peer(options) if options.log is not None else nullcontext():
            published, gone = publish(options)
    except UserError as exc:
        # Without options the message quotes only the command line.
        print(f"publish: {_discreet(str(exc), options) if options else exc}", file=sys.stderr)
        return 2
    except OSError as exc:  # an impossible path, or a limit of the machine; str(exc) may contain a path
        print(f"publish: {exc.strerror or type(exc).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"publish: {interrupted}", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    if options.json:
        summary = {**asdict(published), "seconds": round(seconds, 3), "removed_rounds": gone}
        print(json.dumps(summary), flush=True)
    else:
        verb = "published" if published.status == "published" else "is already published"
        print(f"round {published.round} {verb} ({published.revision}), {seconds:.1f} s")
    return 0


def _log_of_peer(options: argparse.Namespace) -> AbstractContextManager[None]:
    log.context.run, log.context.peer, level = options.log
    log.context.round = lambda: options.due or 0
    return log.writing(options.directory / log.NAME, level, "publisher")


def _check_source(directory: Path) -> None:
    """Rejects a directory that cannot be published."""
    from spes_swarm.publishing.publication import PUBLICATION_FILE
    from spes_swarm.storage.run_directory import RunDirectory

    if not (directory / PUBLICATION_FILE).is_file():
        RunDirectory(directory).require_run()


def _discreet(message: str, options: argparse.Namespace) -> str:
    """Returns the message without paths and tokens, whatever their source: a supervisor may log or forward it."""
    from huggingface_hub import get_token

    from spes_swarm.publishing.target import parse_location

    location = parse_location(options.to) if options.to.startswith("file:") and options.to != "file:" else None
    secrets: list[tuple[str, str]] = [(get_token() or "", "(token)")]
    for path, name in ((options.directory, "DIR"), (location.path if location else None, "the directory")):
        if path is not None:
            secrets += [(str(path.absolute()), name), (str(path), name)]
    for secret, name in secrets:
        if len(secret) > 1:
            message = message.replace(secret, name)
    return " ".join(message.split())


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"found {text!r:.40}, expected a number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"found {text!r:.40}, expected a positive number")


def _addresses(text: str) -> str:
    return " ".join(peer_addresses([text]))


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m spes_swarm.publish", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="the --output-dir of a peer, or an exported directory")
    add("--to", required=True, metavar="USER/REPO|file:DIRECTORY", help="where to publish; created if missing")
    add("--due", type=int, metavar="ROUND", help="do nothing if ROUND or a newer round is already published")
    add("--tag", metavar="NAME", help="an additional name for this round, e.g. a milestone; never removed")
    add("--keep", type=_count, metavar="N", help="afterwards remove the names of all but the newest N rounds")
    add("--private", action="store_true", help="if the repository is created, make it private")
    add("--results", type=Path, metavar="FILE.json", help="tokens, peers, history and contributors for the card")
    add("--license", metavar="ID", help="for the card: the model's license, a Hub identifier")
    add("--base-model", metavar="USER/REPO", help="for the card: the base of an upcycled model")
    add("--data", metavar="TEXT", help="for the card: what the run trains on")
    add("--join-address", type=_addresses, metavar="MADDR", help="for the card: a peer's public address")
    add("--max-shard-size", default=MAX_SHARD_SIZE, metavar="SIZE", help="largest weight file (default: %(default)s)")
    add("--upload-mbps", type=_positive, metavar="MBIT", help="upload rate limit in Mbit/s")
    add("--background", action="store_true", help="run at the lowest CPU and disk priority")
    add("--log", nargs=3, help=argparse.SUPPRESS)  # run, peer and level: by a peer, to whose log this process writes
    add("--json", action="store_true", help="report the result as one line of JSON")
    return parser


if __name__ == "__main__":
    end_program(main())
