"""Publications on the tests' Hub, made and read as a peer and its readers would."""

from __future__ import annotations

from pathlib import Path

from spes_swarm.publishing.publication import PUBLICATION_FILE, Publication, parse_publication, read_export
from spes_swarm.publishing.repository import RepositoryTarget
from spes_swarm.publishing.target import Published
from tests.helpers.hub_server import HubServer
from tests.helpers.publications import assert_complete

PART_BYTES = 64 * 1024  # of an upload


def publish(name: str, export: Path, tag: str | None = None, private: bool = False) -> Published:
    target = RepositoryTarget(name, private=private)
    target.check_rights()
    publication = read_export(export)
    return target.publish(export, publication, tag)


def seen(hub: HubServer, name: str, revision: str = "main") -> Publication:
    """What readers see, checked to be whole."""
    files = hub.files(name, revision)
    publication = parse_publication(files[PUBLICATION_FILE], "test")
    assert_complete(files, publication)
    return publication
