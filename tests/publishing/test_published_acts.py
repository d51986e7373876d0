"""The acts of a private run travel with its publication, so that a revocation outlives the peers that knew it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spes_swarm.base.errors import PublicationError
from spes_swarm.config.manifest import Manifest, found_run
from spes_swarm.config.peer import PeerConfig
from spes_swarm.peer.joining.run_finder import RunFinder
from spes_swarm.protocol.admission.acts import Target, revoke, use
from spes_swarm.protocol.admission.grants import Grant, Invitation, extend, new_key
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.export import export, newest_snapshot
from spes_swarm.publishing.publication import describe_acts, parse_publication
from spes_swarm.storage.acts_file import ActsFile
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.joining import joining_context
from tests.helpers.publications import layout_for, manifest_of, output_dir, packed
from tests.helpers.rounds import identity

FOUNDER, GUEST = identity(0), identity(1)


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    run = dataclasses.replace(manifest_of().run, admission="invite")
    return found_run(run, layout_for().digest, FOUNDER)


def some_acts(manifest: Manifest) -> tuple[bytes, bytes]:
    """A use and a revocation."""
    secret, public = new_key()
    chain = extend(None, FOUNDER, manifest.run_id, Grant(key=public, uses=3))
    admission = Invitation(manifest.run_id, chain.wire, secret).admit(GUEST.peer_id)
    target = Target(peer=GUEST.peer_id, at=1.0)
    return use(GUEST.peer_id, admission), revoke(FOUNDER, None, manifest.run_id, target)


def no_network(*command: Any, **arguments: Any) -> Any:
    raise AssertionError("nobody else is asked")


def resume(directory: Path, location: str) -> None:
    directory.mkdir(exist_ok=True)
    peer = PeerConfig(output_dir=str(directory), from_hub=location)
    RunFinder(joining_context(RunDirectory(directory), no_network, FOUNDER, peer)).find()


def test_acts_are_published_and_read_back_unless_they_are_forged(tmp_path: Path, manifest: Manifest) -> None:
    used, revoked = some_acts(manifest)
    forged = revoke(GUEST, None, manifest.run_id, Target(peer=FOUNDER.peer_id, at=1.0))
    out = output_dir(tmp_path / "out", 5, manifest=manifest)
    for act in (used, forged, revoked):
        ActsFile(RunDirectory(out).acts).append(act)
    publication = export(newest_snapshot(out), out, tmp_path / "export")
    assert publication.decoded_acts == [revoked, used]  # revocations first: they matter most

    # A publisher may write anything.
    hostile = publication.model_copy(update={"acts": [*describe_acts([forged]), "A", *publication.acts]})
    (tmp_path / "export" / "spes_swarm.json").write_bytes(hostile.to_bytes())
    DirectoryTarget(tmp_path / "models").publish(tmp_path / "export", publication)
    new = RunDirectory(tmp_path / "new")
    new.path.mkdir()
    ActsFile(new.acts).append(used)
    for _ in range(2):
        resume(new.path, f"file:{tmp_path / 'models'}")
        assert ActsFile(new.acts).read_new() == [used, revoked]


def test_without_acts_the_file_is_as_older_versions_know_it(tmp_path: Path) -> None:
    export, publication = packed(tmp_path, 3)
    assert "acts" not in json.loads((export / "spes_swarm.json").read_text())
    DirectoryTarget(tmp_path / "models").publish(export, publication)
    resume(tmp_path / "new", f"file:{tmp_path / 'models'}")
    assert not RunDirectory(tmp_path / "new").acts.exists()


def test_acts_are_bounded(tmp_path: Path) -> None:
    _, publication = packed(tmp_path, 3)
    assert len(describe_acts([bytes(1000)] * 5000)) == 4 * 2**20 // 1336  # of 4 MiB in base64
    assert len(describe_acts([bytes(3)] * 5000)) == 4096
    for acts in (["A" * 4] * 4097, ["A" * 6000], ["?"]):
        content = {**json.loads(publication.to_bytes()), "acts": acts}
        with pytest.raises(PublicationError, match="acts"):
            parse_publication(json.dumps(content).encode(), "peer")
