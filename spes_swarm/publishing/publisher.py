"""Publishes a peer's newest checkpoint or an exported directory: the work of `spes_swarm.publish`."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from spes_swarm.base.errors import ConfigError, HubError, PublicationError
from spes_swarm.publishing.card import CardFacts, Results, read_results
from spes_swarm.publishing.client import limit_upload
from spes_swarm.publishing.location import parse_location
from spes_swarm.publishing.pack import facts_of, pack
from spes_swarm.publishing.publication import PUBLICATION_FILE, Publication, read_export
from spes_swarm.publishing.snapshot import newest_snapshot
from spes_swarm.publishing.target import Published, Target, check_tag, is_there, open_target
from spes_swarm.storage.run_directory import lock_file

_WORKSPACE = "publication"  # directory in OUTPUT_DIR that holds the export being published
# Options that affect only an export still to be written.
_OF_THE_CARD = ("results", "license", "base_model", "data", "join_address")


def publish(options: argparse.Namespace) -> tuple[Published, list[int]]:
    """Executes the command line of `spes_swarm.publish`; returns the result, and the rounds whose names were removed.

    Raises:
        UserError: publishing failed; earlier publications are intact.
    """
    if options.upload_mbps is not None:
        limit_upload(options.upload_mbps)
    check_tag(options.tag)
    target = open_target(options.to, private=options.private)
    directory: Path = options.directory
    current = target.newest() if options.due is not None else None
    if current is not None and current.round >= options.due:
        return Published.of(current, "main", was_there=True, bytes_sent=0), []
    if (directory / PUBLICATION_FILE).is_file():
        ignored = [f"--{name.replace('_', '-')}" for name in _OF_THE_CARD if getattr(options, name)]
        if ignored:
            raise ConfigError(f"DIR is already exported with its card: {', '.join(ignored)} would change nothing")
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
        contributors=results.contributors if results else (),
        join_address=options.join_address,
    )


def publish_newest(
    output_dir: Path, target: Target, results: Results | None, card: CardFacts, tag: str | None, shard_size: str
) -> Published:
    """Exports the newest checkpoint of a peer and publishes it; reuses the export of an interrupted publication.

    Without `results` they are read from this peer's event log. The published history is continued.

    Raises:
        UserError: publishing failed; earlier publications are intact.
    """
    target.check_rights()
    current = target.newest()
    snapshot = newest_snapshot(output_dir)
    is_there(current, snapshot.manifest.run_id, snapshot.round, snapshot.digest, target.label)  # raises if superseded
    workspace = output_dir / _WORKSPACE
    try:
        workspace.mkdir(exist_ok=True)
        (workspace / ".lock").touch()
        lock = lock_file(workspace / ".lock", "this output directory", "another process is publishing from it")
        try:
            export = workspace / "export"
            for path in workspace.glob(".export.*"):  # left by a killed process
                shutil.rmtree(path)
            if not _is_of(export, snapshot.digest, snapshot.round):
                shutil.rmtree(export, ignore_errors=True)
                published_before = current.history if current else ()
                facts = facts_of(snapshot, output_dir, results, published=published_before, card=card)
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
        UserError: as in `publish_newest`.
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
