"""Publishes a round: to a repository of the Hugging Face Hub, or to a directory.

    python -m spes_swarm.publish OUTPUT_DIR --to USER/REPO
    python -m spes_swarm.publish OUTPUT_DIR --to file:/srv/models/mine --tag milestone --keep 10

OUTPUT_DIR is a peer's, running or not (its newest checkpoint is published), or a directory that `spes_swarm.export`
has written. Any peer may publish, and what it publishes does not depend on which one does. Readers see the whole
publication or the one before. The Hub's token is that of HF_TOKEN or `hf auth login`.

Exit codes: 0, published, or there already; 2, a mistake or a refusal that one line on stderr explains. With `--json`,
one line of JSON on stdout says what came of it. No output has paths or tokens in it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from spes_swarm.base.arguments import OneLineParser
from spes_swarm.base.errors import UserError
from spes_swarm.publishing.publication import MAX_SHARD_SIZE, shard_bytes


def go_to_background() -> None:
    """Gives everything else on this machine the preference, for the processor and for the disk."""
    os.nice(19)
    process = psutil.Process()
    if hasattr(process, "ionice"):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry point."""
    started = time.monotonic()
    options: argparse.Namespace | None = None
    try:
        options = _parser().parse_args(arguments)
        if options.background:
            go_to_background()
        shard_bytes(options.max_shard_size)
        _check_source(options.directory)
        # Only from here on torch and transformers are imported: that takes seconds.
        from spes_swarm.publishing.publisher import publish

        published, gone = publish(options)
    except UserError as exc:
        # A command line that makes no sense is only quoted.
        print(f"publish: {_discreet(str(exc), options) if options else exc}", file=sys.stderr)
        return 2
    except OSError as exc:  # a path that cannot be one, or the machine's limits; its file name would be a path
        print(f"publish: {exc.strerror or type(exc).__name__}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("publish: interrupted; what was published before still is", file=sys.stderr)
        return 130
    seconds = time.monotonic() - started
    if options.json:
        summary: dict[str, Any] = {
            "status": published.status,
            "round": published.round,
            "digest": published.digest,
            "revision": published.revision,
            "bytes_sent": published.bytes_sent,
            "seconds": round(seconds, 3),
            "removed_rounds": gone,
        }
        print(json.dumps(summary), flush=True)
    else:
        verb = "published" if published.status == "published" else "is published already"
        print(f"round {published.round} {verb} ({published.revision}), {seconds:.1f} s")
    return 0


def _check_source(directory: Path) -> None:
    """Refuses what cannot be published."""
    from spes_swarm.publishing.publication import PUBLICATION_FILE
    from spes_swarm.storage.run_directory import RunDirectory

    if not (directory / PUBLICATION_FILE).is_file():
        RunDirectory(directory).require_run()


def _discreet(message: str, options: argparse.Namespace) -> str:
    """The message without paths and tokens, whoever has put them in: a supervisor may log it, or pass it on."""
    from huggingface_hub import get_token

    from spes_swarm.publishing.location import parse_location

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


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="python -m spes_swarm.publish", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="the --output-dir of a peer, or an exported directory")
    add("--to", required=True, metavar="USER/REPO|file:DIRECTORY", help="where to publish; it is made if need be")
    add("--due", type=int, metavar="ROUND", help="do nothing if that round or a newer one is published already")
    add("--tag", metavar="NAME", help="a further name for this round, e.g. a milestone; it is never removed")
    add("--keep", type=_count, metavar="N", help="afterwards remove the names of all rounds but the newest N")
    add("--private", action="store_true", help="if the repository has to be made, only you may read it")
    add("--results", type=Path, metavar="FILE.json", help="tokens, peers, history and contributors for the card")
    add("--license", metavar="ID", help="for the card: the model's licence, an identifier of the Hub")
    add("--base-model", metavar="USER/REPO", help="for the card: what an upcycled model comes from")
    add("--data", metavar="TEXT", help="for the card: what the run trains on")
    add("--join-address", metavar="MADDR", help="for the card: a peer's address that may be public")
    add("--max-shard-size", default=MAX_SHARD_SIZE, metavar="SIZE", help="largest weight file (default: %(default)s)")
    add("--upload-mbps", type=_positive, metavar="MBIT", help="send no faster than so many Mbit/s")
    add("--background", action="store_true", help="leave the processor and the disk to others")
    add("--json", action="store_true", help="say what came of it as one line of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
