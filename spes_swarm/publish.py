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
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import get_token

from spes_swarm.arguments import OneLineParser
from spes_swarm.errors import ConfigError, UserError
from spes_swarm.hub.card import CardFacts, Contributor
from spes_swarm.hub.client import limit_upload
from spes_swarm.hub.errors import HubError, PublicationError
from spes_swarm.hub.facts import Results, read_results, results_of_metrics
from spes_swarm.hub.pack import RunFacts, pack
from spes_swarm.hub.plain import MAX_SHARD_SIZE, shard_bytes
from spes_swarm.hub.publication import (
    PUBLICATION_FILE,
    Publication,
    merge_history,
    read_export,
)
from spes_swarm.hub.snapshot import newest_snapshot
from spes_swarm.hub.target import Published, Target, check_tag, is_there, open_target, parse_location
from spes_swarm.run_directory import RunDirectory, lock_file

_WORKSPACE = "publication"  # in OUTPUT_DIR: what is being published
# What only says something about an export that is still to be made.
_OF_THE_CARD = ("results", "license", "base_model", "data", "join_address")


def publish_newest(
    output_dir: Path, target: Target, results: Results | None, card: CardFacts, tag: str | None, shard_size: str
) -> Published:
    """Exports the newest checkpoint of a peer and publishes it; an export that was killed on its way is used again.

    Args:
        output_dir: of the peer, which may be running.
        target: where to.
        results: what is known of the run; None takes what this peer's event log tells. In both cases the history is
            completed by what is published already.
        card: what else the card is to say.
        tag: a further name, or None.
        shard_size: of the weight files.

    Raises:
        UserError: it could not be done; what was published before still is.
    """
    target.check_rights()
    current = target.newest()
    snapshot = newest_snapshot(output_dir)
    is_there(current, snapshot.manifest.run_id, snapshot.round, snapshot.digest, target.label)  # or newer
    workspace = output_dir / _WORKSPACE
    try:
        workspace.mkdir(exist_ok=True)
        (workspace / ".lock").touch()
        lock = lock_file(workspace / ".lock", "this output directory", "another process is publishing from it")
        try:
            export = workspace / "export"
            for path in workspace.glob(".export.*"):  # of a process that was killed
                shutil.rmtree(path)
            if not _is_of(export, snapshot.digest, snapshot.round):
                shutil.rmtree(export, ignore_errors=True)
                known = results or results_of_metrics(RunDirectory(output_dir).metrics, snapshot.round)
                history = merge_history(current.history if current else [], known.history)
                tokens = known.tokens if known.tokens is not None else snapshot.tokens
                facts = RunFacts(tokens=tokens, peers=known.peers, history=history, card=card)
                pack(snapshot, export, facts, shard_size)
            published = publish_export(export, target, tag)
            shutil.rmtree(export)
            return published
        finally:
            os.close(lock)
    except OSError as exc:
        raise HubError(f"the output directory cannot be used for exporting: {exc.strerror}") from exc


def publish_export(export: Path, target: Target, tag: str | None) -> Published:
    """Publishes a directory that `pack` has written.

    Raises:
        UserError: as `publish_newest`.
    """
    publication = read_export(export)
    return target.publish(export, publication, _message(publication), tag)


def _is_of(export: Path, digest: str, round_number: int) -> bool:
    try:
        found = read_export(export)
    except PublicationError:
        return False
    return (found.digest, found.round) == (digest, round_number)


def _message(publication: Publication) -> str:
    tokens = f", {publication.tokens:,} tokens" if publication.tokens is not None else ""
    return f"Round {publication.round}{tokens}"


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
        published, gone = _run(options)
    except UserError as exc:
        # A command line that makes no sense is only quoted.
        print(f"publish: {_discreet(str(exc), options) if options else exc}", file=sys.stderr)
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


def _run(options: argparse.Namespace) -> tuple[Published, list[int]]:
    if options.background:
        go_to_background()
    if options.upload_mbps is not None:
        limit_upload(options.upload_mbps)
    check_tag(options.tag)
    shard_bytes(options.max_shard_size)
    target = open_target(options.to, private=options.private)
    directory: Path = options.directory
    current = target.newest() if options.due is not None else None
    if current is not None and current.round >= options.due:
        return Published(
            status="unchanged", round=current.round, digest=current.digest, revision="main", bytes_sent=0
        ), []
    if (directory / PUBLICATION_FILE).is_file():
        ignored = [f"--{name.replace('_', '-')}" for name in _OF_THE_CARD if getattr(options, name)]
        if ignored:
            raise ConfigError(f"DIR is exported already, with its card: {', '.join(ignored)} would change nothing")
        target.check_rights()
        published = publish_export(directory, target, options.tag)
    else:
        results = read_results(options.results) if options.results else None
        card = _card(options, results)
        published = publish_newest(directory, target, results, card, options.tag, options.max_shard_size)
    return published, target.prune(options.keep) if options.keep else []


def _card(options: argparse.Namespace, results: Results | None) -> CardFacts:
    return CardFacts(
        repository=parse_location(options.to).repo_id,
        license=options.license,
        base_model=options.base_model,
        data=options.data,
        contributors=[Contributor(name=c.name, tokens=c.tokens) for c in (results.contributors if results else ())],
        join_address=options.join_address,
    )


def _discreet(message: str, options: argparse.Namespace) -> str:
    """The message without paths and tokens, whoever has put them in: a supervisor may log it, or pass it on."""
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
