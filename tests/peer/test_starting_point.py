"""Where a reference comes from when a run was published: the network process is played by a real reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spes_swarm.base.errors import CheckpointError, LeftEarlyError, TransferError, UserError
from spes_swarm.network.transfer.partial_reference import PartialReference
from spes_swarm.peer.joining.run_finder import FoundRun
from spes_swarm.peer.joining.starting_point import StartingPoint
from spes_swarm.port.messages import SwarmView, TransferReport
from spes_swarm.protocol.consensus.lineage import Lineage
from spes_swarm.protocol.consensus.reference import Reference, ReferenceTable, chunks_of
from spes_swarm.publishing.directory import DirectoryTarget
from spes_swarm.publishing.source import PublicationSource, open_source
from spes_swarm.storage.metrics_file import Metrics
from spes_swarm.storage.run_directory import RunDirectory
from tests.helpers.joining import joining_context
from tests.helpers.ports import LocalPort
from tests.helpers.publications import layout_for, manifest_of, output_dir, packed, values
from tests.helpers.rounds import identity

LAYOUT = layout_for()
ADDRESS = ["/ip4/127.0.0.1/tcp/1/p2p/QmNobody"]
UNTRAINED = (6, 7, 8)  # blocks that the swarm has left as they were published


def published(directory: Path, round_number: int) -> PublicationSource:
    export, publication = packed(directory, round_number)
    DirectoryTarget(directory / "models").publish(export, publication)
    return open_source(f"file:{directory / 'models'}")


def swarm_reference(round_number: int, like: int) -> Reference:
    """What the others have: another round, but for some blocks of an earlier one."""
    values_N = values(round_number)
    for index in UNTRAINED:
        block = LAYOUT.blocks[index]
        values_N[block.start : block.stop] = values(like)[block.start : block.stop]
    reference = Reference(LAYOUT, values_N)
    reference.finish(round_number, [(index, round_number) for index in range(len(LAYOUT.blocks))])
    return reference


class Newcomer:
    """A peer that joins; `others` is what the swarm has, None where nobody answers."""

    def __init__(self, directory: Path, others: Reference | None, *, breaks: bool = False) -> None:
        self.directory = RunDirectory(directory)
        self.directory.checkpoints.mkdir(parents=True, exist_ok=True)
        self.reference = Reference(LAYOUT, np.zeros(LAYOUT.num_elements, dtype=np.float32))
        self.others = others
        self.breaks = breaks  # the others go away when the download begins
        self.found_on_disk: set[int] = set()
        self.metrics = Metrics(directory / "metrics.jsonl", identity(1).peer_id)
        self.context = joining_context(self.directory, LocalPort(self).ask, identity(1), metrics=self.metrics)

    async def view(self) -> SwarmView:
        """See port.commands.Commands; so are those that follow."""
        return SwarmView(int(self.others is not None), 0, 0, 0, 0.0, 0.0, 0.0, 0, 0)

    async def swarm_table(self) -> ReferenceTable | None:
        return None if self.others is None else self.others.table

    async def table(self) -> ReferenceTable:
        return self.reference.table

    async def adopt(self, table_round: int, versions: tuple[int, ...], lineage: Lineage, swarm_tokens: int) -> str:
        self.reference.finish(table_round, list(enumerate(versions)))
        return self.reference.digest.hex()

    async def download(self, if_newer: bool, partial: Path | None) -> TransferReport | None:
        """What download.py does, with nothing between the peers."""
        if self.others is None or self.breaks:
            raise TransferError("nobody delivers")
        if if_newer and self.others.round <= self.reference.round:
            return None
        if partial is not None:
            kept = PartialReference(partial)
            for block in LAYOUT.blocks:
                pieces = [(chunk, kept.read(chunk)) for chunk in chunks_of(block)]
                here = self.others.values_N
                if all(p is not None and np.array_equal(p, here[c.start :][: c.size]) for c, p in pieces):
                    self.found_on_disk.add(block.index)
            kept.remove()
        self.reference.values_N[:] = self.others.values_N
        self.reference.finish(self.others.round, list(enumerate(self.others.versions)))
        return TransferReport(round=self.others.round, digest=self.reference.digest.hex())

    def obtain(self, source: PublicationSource | None, initial_peers: list[str]) -> ReferenceTable:
        absent: Any = None
        found = FoundRun(manifest_of(), absent, source, initial_peers, [], [])
        start = StartingPoint(self.context, found, LAYOUT, self.reference.values_N)
        try:
            return start.obtain(start.fill(), lambda: None).table
        finally:
            self.metrics.close()

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.directory.path / "metrics.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_where_nobody_is_the_run_goes_on_from_what_was_published(tmp_path: Path) -> None:
    source = published(tmp_path, 4)
    newcomer = Newcomer(tmp_path / "peer", None)
    assert newcomer.obtain(source, []).round == 4
    assert newcomer.reference.digest.hex() == source.publication.digest


def test_blocks_that_the_swarm_still_has_come_from_there(tmp_path: Path) -> None:
    source = published(tmp_path, 4)
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    assert newcomer.obtain(source, ADDRESS).round == 9
    assert newcomer.found_on_disk == set(UNTRAINED)
    (event,) = newcomer.events("hub_blocks")
    assert event["blocks"] == list(UNTRAINED)
    assert event["payload_bytes"] == 4 * sum(LAYOUT.blocks[index].size for index in UNTRAINED)


def test_nothing_is_fetched_that_the_swarm_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = published(tmp_path, 4)
    monkeypatch.setattr(PublicationSource, "blocks", lambda *args: pytest.fail("it was asked for blocks"))
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=9))
    assert newcomer.obtain(source, ADDRESS).round == 9


def test_a_second_attempt_fetches_only_what_the_first_has_left_over(tmp_path: Path) -> None:
    source = published(tmp_path, 4)
    first = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    first.context.stop.set()  # noticed after one block
    with pytest.raises(LeftEarlyError):
        first.obtain(source, ADDRESS)
    second = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    second.obtain(source, ADDRESS)
    assert second.found_on_disk == set(UNTRAINED)
    assert second.events("hub_blocks")[-1]["blocks"] == list(UNTRAINED[1:])
    assert not second.directory.partial_reference.exists()


def test_a_publication_that_is_damaged_costs_nothing_where_peers_have_it_all(tmp_path: Path) -> None:
    source = published(tmp_path, 4)
    for path in (tmp_path / "models").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        path.write_bytes(data)
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    assert newcomer.obtain(source, ADDRESS).round == 9
    assert [event["kind"] for event in newcomer.events("fault")] == ["from_hub"]
    assert newcomer.found_on_disk == set(newcomer.events("hub_blocks")[0]["blocks"])


def test_peers_that_go_away_during_the_download_leave_the_publication(tmp_path: Path) -> None:
    source = published(tmp_path, 4)
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=4), breaks=True)
    assert newcomer.obtain(source, ADDRESS).round == 4
    assert newcomer.reference.digest.hex() == source.publication.digest
    assert not newcomer.directory.partial_reference.exists()


def test_a_publication_that_is_newer_than_the_swarm_is_what_counts(tmp_path: Path) -> None:
    source = published(tmp_path, 12)
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    assert newcomer.obtain(source, ADDRESS).round == 12


@pytest.mark.parametrize("others_round", [None, 5])
def test_published_rounds_are_never_passed_over_silently(tmp_path: Path, others_round: int | None) -> None:
    output_dir(tmp_path / "peer", 3, peer=1)
    others = None if others_round is None else swarm_reference(others_round, like=4)
    newcomer = Newcomer(tmp_path / "peer", others)
    with pytest.raises(UserError, match="round 7 is published"):
        newcomer.obtain(published(tmp_path, 7), ADDRESS if others is not None else [])


@pytest.mark.parametrize("others_round", [None, 9])
def test_checkpoints_of_another_version_are_left_to_it(tmp_path: Path, others_round: int | None) -> None:
    output_dir(tmp_path / "peer", 3, peer=1)
    others = None if others_round is None else swarm_reference(others_round, like=4)
    newcomer = Newcomer(tmp_path / "peer", others)
    (checkpoint,) = newcomer.directory.checkpoints.iterdir()
    (checkpoint / "meta.json").write_text('{"format": 2}')
    if others is None:
        with pytest.raises(CheckpointError, match="no peer of the run was found"):
            newcomer.obtain(None, [])
    else:
        assert newcomer.obtain(None, ADDRESS).round == 9
    assert list(newcomer.directory.checkpoints.iterdir()) == [checkpoint]
    (fault,) = newcomer.events("fault")
    assert "written by another version" in fault["detail"]


def test_an_older_checkpoint_catches_up_with_a_swarm_that_has_gone_on(tmp_path: Path) -> None:
    output_dir(tmp_path / "peer", 3, peer=1)
    newcomer = Newcomer(tmp_path / "peer", swarm_reference(9, like=4))
    assert newcomer.obtain(published(tmp_path, 7), ADDRESS).round == 9
