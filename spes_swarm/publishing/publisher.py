"""Publishes a peer's newest checkpoint or an exported directory: the work of `spes_swarm.publish`."""

from __future__ import annotations

import argparse
import os
import shutil
from contextlib import suppress
from pathlib import Path

from spes_swarm.base.errors import ConfigError, HubError, PublicationError
from spes_swarm.publishing.card import CardFacts, Results, read_results
from spes_swarm.publishing.client import is_passing, limit_upload, without_advice
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.export import export, newest_snapshot
from spes_swarm.publishing.publication import PUBLICATION_FILE, Publication, read_export
from spes_swarm.publishing.repository import RepositoryTarget
from spes_swarm.publishing.target import Published, Target, check_run, check_tag, is_there, parse_location
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
        published = target.publish(directory, read_export(directory), options.tag)
    else:
        results = read_results(options.results) if options.results else None
        published = _publish_newest(target, results, options)
    return published, target.prune(options.keep) if options.keep else []


def open_target(text: str, *, private: bool = False, retries: bool = True) -> Target:
    """Returns the target that `--to` names (USER/REPO or file:DIRECTORY); contacts no server.

    A repository that has to be created is `private` if so wanted. Without `retries`, its calls fail soon.

    Raises:
        ConfigError: `text` is malformed.
    """
    location = parse_location(text)
    if location.path is not None:
        return DirectoryTarget(location.path)
    assert location.repo_id is not None
    return RepositoryTarget(location.repo_id, private=private, retries=retries)


def check_target(text: str, run_id: str) -> str | None:
    """Checks whether a run may be published there; returns why that is unknown if the Hub cannot be asked just now.

    Raises:
        HubError: publishing is not allowed.
        PublicationError: the target belongs to another run, or its publication is invalid.
    """
    target = open_target(text, retries=False)
    try:
        target.check_rights()
        current = target.newest()
    except HubError as exc:
        if is_passing(exc.__cause__):
            return without_advice(str(exc))
        raise
    if current is not None:
        check_run(current, run_id, text)
    return None


def _card(options: argparse.Namespace, results: Results | None) -> CardFacts:
    return CardFacts(
        repository=parse_location(options.to).repo_id,
        license=options.license,
        base_model=options.base_model,
        data=options.data,
        contributors=results.contributors if results else (),
        join_address=options.join_address,
    )


def _publish_newest(target: Target, results: Results | None, options: argparse.Namespace) -> Published:
    """Exports the newest checkpoint of a peer and publishes it; reuses the export of an interrupted publication."""
    output_dir: Path = options.directory
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
            directory = workspace / "export"
            for path in workspace.glob(".export.*"):  # left by a killed process
                shutil.rmtree(path)
            publication = _export_of(directory, snapshot.digest, snapshot.round)
            if publication is None:
                shutil.rmtree(directory, ignore_errors=True)
                publication = export(
                    snapshot,
                    output_dir,
                    directory,
                    results=results,
                    published=current.history if current else (),
                    card=_card(options, results),
                    max_shard_size=options.max_shard_size,
                )
            published = target.publish(directory, publication, options.tag)
            shutil.rmtree(directory)
            return published
        finally:
            os.close(lock)
    except OSError as exc:
        raise HubError(f"the output directory cannot be used for exporting: {exc.strerror}") from exc


def _export_of(directory: Path, digest: str, round_number: int) -> Publication | None:
    """Returns the publication in a directory if it is complete and of this reference."""
    with suppress(PublicationError):
        found = read_export(directory)
        if (found.digest, found.round) == (digest, round_number):
            return found
    return None
